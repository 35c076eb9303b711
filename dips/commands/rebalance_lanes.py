"""One host's part of a rebalance over the lanes: `dips rebalance --slave NAME`, where slaves share no disk.

The master plans while the run is up (dips/protocol/rebalancing.py). This host copies what its own directory has, pulls
the other layers of the slave, θ and m, from the slaves that hold them, and stages them durably; then it tells the
digest until all hosts have, and the row is written. It asks all along, which keeps the run from going on to another
version. Whatever fails leaves the run as it was, and is repeated by the same command, which copies nothing twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

from dips.client.version_pull import VersionPuller, pulling_name
from dips.commands.operator import ask_master
from dips.config import RunFile, SlaveSection
from dips.errors import ConfigError, DipsError, UnavailableMaster
from dips.files import PidLock
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Pending, RebalancePlanned, Refused
from dips.protocol.events import RebalanceAsked
from dips.slave import staging
from dips.store.tensorfile import F32
from dips.transport.endpoints import Endpoint

ASK_S = 1.0  # pause between two questions; a lease is ten seconds by default
LOCK = ".rebalance.lock"  # beside the slave's own, which it holds as long as it serves its present layers

Say = Callable[[str], None]


def rebalance_over_lanes(config: RunFile, slave: str, master: Endpoint, wait_s: float, say: Say) -> None:
    """Copy the layers that `slave` has by the run file's placement into its directory; return when they are its own.

    wait_s  the longest time without what is waited for: the master, open pushes, the other hosts
    Errors  ConfigError: no such slave or directory here, or the master refuses; UnavailableMaster, UnavailableSlave,
            CorruptSnapshot, FailedDisk: the run is as it was
    """
    section = config.slave_section(slave)
    if not section.directory.is_dir():
        raise ConfigError(
            f"slaves.{slave}.directory: {section.directory} is not here: call this command on the host of {slave}, and "
            "make the directory if it is to be new"
        )
    busy = f"another `dips rebalance` copies into {section.directory}"
    with closing(PidLock(section.directory / LOCK, busy=busy, advice="wait for it")):
        asyncio.run(_HostCopy(config, section, master, wait_s, say).move_layers())


class _HostCopy:
    """The copy of one slave's layers."""

    def __init__(self, config: RunFile, section: SlaveSection, master: Endpoint, wait_s: float, say: Say) -> None:
        self._section, self._master, self._wait_s, self._say = section, master, wait_s, say
        self._run, self._slaves = config.shared.run, tuple(sorted(one.name for one in config.slaves))
        self._said = ""

    async def move_layers(self) -> None:
        version, digest = None, ""
        while (planned := await self._ask_until(version, digest)) is not None:
            holding = asyncio.create_task(self._hold_head())
            try:
                version, digest = planned.version, await self._stage_layers(planned)
            finally:
                holding.cancel()
                with suppress(asyncio.CancelledError):
                    await holding
            self._say(f"{version} is staged for {self._section.name}")

    async def _ask_until(self, version: VersionId | None, digest: str) -> RebalancePlanned | None:
        """Ask until the master has a plan, for a digest another one than that, or the placement is valid: None."""
        until = time.monotonic() + self._wait_s
        while True:
            try:
                result = await self._ask(version, digest)
            except UnavailableMaster as error:
                self._say_once(str(error))
                if time.monotonic() >= until:
                    raise
            else:
                match result:
                    case Acknowledged():
                        return None
                    case RebalancePlanned():
                        return result
                    case Refused():
                        raise ConfigError(result.reason)
                    case Pending(reason):
                        self._say_once(reason)
                if time.monotonic() >= until:
                    raise UnavailableMaster(f"given up after {self._wait_s:g} s: {self._said}; repeat the command")
            await asyncio.sleep(ASK_S)

    async def _ask(self, version: VersionId | None, digest: str) -> Any:
        return await ask_master(self._master, RebalanceAsked(0, self._section.name, self._slaves, version, digest))

    async def _hold_head(self) -> None:
        """Keep the lease while the layers move. If it ends all the same, and the head moves, they are copied again."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                await self._ask(None, "")
            except DipsError as error:
                self._say_once(str(error))

    async def _stage_layers(self, planned: RebalancePlanned) -> str:
        """Make the layers durable in the slave's directory; return the digest of their manifest."""
        directory, name = self._section.directory, self._section.name
        held = staging.find_version(directory / str(planned.version), self._run, name)
        if held is not None and tuple(record.index for record in held.layers) == planned.layers:
            kept = {name: (directory / str(planned.version), held)}
            return (await asyncio.to_thread(staging.stage_parts, (), kept))[name]
        loop = asyncio.get_running_loop()
        async with VersionPuller(self._master, pulling_name(self._master, f"rebalance-{name}")) as puller:

            def fetch(layers: Mapping[int, tuple[F32, F32]]) -> Mapping[int, tuple[str, str]]:
                pulled = asyncio.run_coroutine_threadsafe(puller.pull_layers(planned.version, layers), loop)
                return pulled.result()

            owner = (self._run, name, planned.sinc)
            part = staging.plan_fetch(owner, planned.version, directory, puller.manifest, planned.layers, fetch)
            work = partial(staging.stage_parts, (part,), {}, show=self._say)
            return (await asyncio.to_thread(work))[name]

    def _say_once(self, reason: str) -> None:
        if reason != self._said:
            self._say(reason)
        self._said = reason
