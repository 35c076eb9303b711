"""The ledger's thread and its mirror, the links to the slaves, and the processes of `master.on_version` and
`master.track`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from dips.config import RunFile
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.master import restore
from dips.master.ledger import Ledger
from dips.master.ledger_mirror import LedgerMirror
from dips.master.links import SlaveLinks
from dips.master.newest import NewestVersion
from dips.master.on_version import VersionProcesses
from dips.master.trackers import TrackProcesses
from dips.protocol.effects import Order
from dips.protocol.events import OrderAnswered, OrderFailed
from dips.protocol.records import Record
from dips.protocol.view import RunView
from dips.tasks import Fail
from dips.telemetry import logs
from dips.transport.tls import TlsSource

ROUNDS_BACK = 16  # searched for the newest version
MIRROR_S = 5.0  # a mirror that takes longer is not waited for until it has caught up: rounds go on


class MasterOutside:
    """The daemon's implementation of `Outside` in `dips/master/ports.py`."""

    def __init__(self, ledger: Ledger, tls: TlsSource | None = None) -> None:
        self._ledger, self._links = ledger, SlaveLinks(tls)
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._written = 0  # transactions of this term, counted on the ledger's thread
        self._mirror: LedgerMirror | None = None
        self._on_version: VersionProcesses | None = None
        self._track: TrackProcesses | None = None
        self._newest = NewestVersion.from_history(ledger.read_history(ROUNDS_BACK))  # replaced as a whole
        self.learn_address, self.on_progress = self._links.learn_address, self._links.on_progress

    def begin_mirror(self, config: RunFile, term: int, log: logs.Log) -> None:
        """Begin to mirror the ledger; waits for the first base as long as for a transaction."""
        store = restore.mirror_of(config)
        if store is None:
            return
        if store.shares_disk():
            log.warning("mirror_on_the_same_disk", mirror=store.url, problem="lost with the ledger; is it mounted?")
        self._mirror = LedgerMirror(
            store, config.shared.run, term, lambda: self._thread.submit(self._take_base).result(),
            MIRROR_S, time.monotonic, log,
        )  # fmt: skip
        self._mirror.start()

    def begin_on_version(self, config: RunFile, file: Path | None, log: logs.Log, fail: Fail) -> None:
        """Begin to run the run file's command for every n-th version; `fail` is called with exceptions of its task."""
        section = config.master.on_version
        if section is None:
            return
        if file is None:
            raise ConfigError("master.on_version needs the run file's path")
        self._on_version = VersionProcesses(
            file.resolve(), section, config.master.directory.resolve(), self._find_unprocessed, self.write_records, log
        )
        self._on_version.start(fail)

    def begin_track(self, config: RunFile, file: Path | None, log: logs.Log, fail: Fail) -> None:
        """Begin to send rounds to the trackers in the run file; `fail` is called with exceptions of its tasks."""
        section = config.master.track
        if section is None:
            return
        if file is None:
            raise ConfigError("master.track needs the run file's path")
        self._track = TrackProcesses(file.resolve(), section, config.master.directory.resolve(), log)
        self._track.start(fail)

    async def _find_unprocessed(self, every: int) -> VersionId | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._ledger.find_unprocessed, every)

    def complete_view(self, view: RunView) -> RunView:
        """Return the view with the newest version, the ledger's mirror, `master.on_version` and `master.track`."""
        return replace(
            view,
            newest=self._newest.view(time.time()),
            ledger_mirror=None if self._mirror is None else self._mirror.view(),
            on_version=None if self._on_version is None else self._on_version.view(),
            track=None if self._track is None else self._track.view(),
        )

    async def write_records(self, records: Sequence[Record]) -> None:
        """Write records; return when all are durable, in the mirror too unless it lags. The loop goes on meanwhile."""
        wall = time.time()
        number = await asyncio.get_running_loop().run_in_executor(self._thread, self._write, records, wall)
        if self._mirror is not None:
            await self._mirror.follow(number, records, wall)

    def _write(self, records: Sequence[Record], wall: float) -> int:
        self._ledger.write_records(records, wall)
        self._newest = self._newest.follow_records(records, wall)
        self._written += 1
        return self._written

    def _take_base(self) -> tuple[int, bytes]:
        return self._written, self._ledger.serialize()

    async def execute_order(self, order: Order) -> OrderAnswered | OrderFailed:
        return await self._links.execute_order(order)

    async def close(self) -> None:
        if self._on_version is not None:
            await self._on_version.stop()
        if self._track is not None:
            await self._track.stop()
        await self._links.close()
        if self._mirror is not None:
            self._mirror.close()
        self._thread.shutdown()
