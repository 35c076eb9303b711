"""The two masters' shells around dips/protocol/standby.py: one renews the lease in its mirror, the other waits for it.

    <mirror>/<run>/master/ledger/0000001005-0000000017.term    the lease (restore.py)
    <mirror>/<run>/master/standby/NAME                         a standby that is there; changed as long as it runs

Each is written by one thread or task of one process. A store that fails for longer than a lease ends the master that
serves (exit code 75) only if a standby may take over; otherwise rounds go on, as without a standby.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import Metric

from dips import daemon
from dips.config import RunFile
from dips.errors import ConfigError, Corrupt, DipsError, FailedMirror
from dips.files import read_boot_id, write_durably
from dips.http import HttpSubject
from dips.master import genesis, restore
from dips.master.genesis import BOUND
from dips.protocol.releases import PROTOCOL
from dips.protocol.standby import (
    CLAIM_S,
    LOOK_S,
    RENEW_S,
    LeaseHolder,
    LeaseWatch,
    PresentStandbys,
    SeenLease,
    StandbyState,
)
from dips.protocol.view import LeaseView, StandbyView
from dips.store.mirror import MirrorStore, insist, read_sealed, seal
from dips.tasks import call_apart
from dips.telemetry.logs import Log
from dips.telemetry.metrics import MetricRow, Status, Table, make_families
from dips.transport.tls import TlsSource

FOLDER = "standby"
MOST_STANDBYS = 8  # that are read at a time
UNUSABLE = -1  # in the place of the number in such a file
MOST_BYTES = 1 << 16  # of a standby's file
AGAIN_S = 0.5  # between two tries of a store that fails


def read_clock() -> float:
    """Return monotonic seconds that go on while the machine sleeps: a lease ends then, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def name_holder(config: RunFile) -> str:
    """Return this process's name for people."""
    return f"{socket.gethostname()} ({config.master.listen}, pid {os.getpid()})"


def name_place(config: RunFile) -> str:
    """Return where this master runs; a master that starts again has the same, a clone of its machine has not."""
    return f"{read_boot_id()} {socket.gethostname()} {config.master.listen}"


# ---- who serves -----------------------------------------------------------------------------------------------------


class BindableMirror(Protocol):
    """The part of LedgerMirror that the keeper uses."""

    def bind(self) -> bool: ...
    def unbind(self) -> None: ...


class LeaseKeeper:
    """Keeps the lease of one term in the store, on a thread of its own, since a base may take long to write."""

    def __init__(
        self,
        store: MirrorStore,
        run: str,
        term: int,
        holder: str,
        directory: Path,
        log: Log,
        *,
        bound: bool = False,
        claimed_at: float | None = None,
        place: str = "",
        clock: Callable[[], float] = read_clock,
    ) -> None:
        """Keep the lease of this term, which the first write claims, or which was claimed by a write begun at
        `claimed_at`.

        With `bound`, or the file BOUND in the directory, nothing is served without a lease. `place` is `name_place`.
        """
        self._store, self._run, self._log, self._clock = store, run, log, clock
        self.term, self._name, self._note = term, holder, directory / BOUND
        self._changed = threading.Condition()
        bound, nonce = bound or self._note.exists(), uuid.uuid4().hex
        self._holder = LeaseHolder(term, holder, bound=bound, nonce=nonce, place=place)
        self._present = PresentStandbys()
        self._standbys: tuple[StandbyView, ...] = ()
        self._refused: set[str] = set()  # files of standbys that cannot be used
        self._mirror: BindableMirror | None = None
        self._reason, self._claimed = "", claimed_at is not None
        self._tried = self._written = self._ended = self._hurry = False
        if claimed_at is not None:
            self._holder.on_written(self._holder.begin_write(bound, claimed_at), term, claimed_at)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def start(self, patience_s: float) -> bool:
        """Write the first lease; return whether the term is this master's, or it may serve without a lease.

        A store that fails or hangs is waited for, no longer than the patience if no standby can have taken over.
        """
        self._thread.start()
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._tried, patience_s)
                if self._is_decided():
                    return not self._holder.over
                self._log.warning("lease_awaited", store=self._store.url, reason=self._reason)
                self._tried = False

    def follow_mirror(self, mirror: BindableMirror) -> None:
        """Let standbys take over from now on, as far as this mirror keeps up."""
        with self._changed:
            self._mirror, self._hurry = mirror, True
            self._changed.notify_all()

    def require_claim(self) -> None:
        """Raise FailedMirror unless the term is claimed: it may be another's, whose files have the same names."""
        if not self._claimed:
            raise FailedMirror(f"{self._store.url}: term {self.term} is not claimed")

    def close(self) -> None:
        """Stop writing; a write in progress is not waited for."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def left_s(self) -> float:
        """Return how long this master may serve from now on: inf without a standby, below 0 if it must stop."""
        with self._changed:
            return self._holder.serves_until() - self._clock()

    def explain_end(self) -> str:
        """Return why this master may not serve any more."""
        with self._changed:
            why = self._reason or "a later term is claimed there"
            return f"the lease of term {self.term} in {self._store.url} has ended: {why}"

    def view(self) -> LeaseView:
        """Return the lease and the standbys, for status and metrics."""
        with self._changed:
            age_s = self._holder.age_s(self._clock())
            return LeaseView(
                self._name, self._holder.claimable, age_s, bool(self._reason), self._reason, self._standbys
            )

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _is_decided(self) -> bool:
        return self._written or self._holder.over or not self._holder.bound

    def _keep(self) -> None:
        while not self._ended and not self._holder.over:
            begun = self._clock()
            try:
                self._renew(begun)
                due, reason = begun + self._holder.pause_s(bool(self._standbys)), ""
            except Exception as error:  # noqa: BLE001 (whatever it is: a lease that is not renewed ends)
                due, reason = self._clock() + AGAIN_S, str(error) or repr(error)
            with self._changed:
                if reason and not self._reason:
                    self._log.warning("lease_not_renewed", store=self._store.url, reason=reason)
                self._reason, self._tried = reason, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ended or self._hurry, max(0.0, due - self._clock()))
                self._hurry = False

    def _renew(self, begun: float) -> None:
        claimable = self._may_be_claimed() and self._write_note()
        with self._changed:
            lease = self._holder.begin_write(claimable, begun)
        ours = self._claimed = restore.write_lease(self._store, self._run, lease, self._claimed)
        newest = restore.newest_term(self._store) if ours else lease.term + 1
        with self._changed:
            self._holder.on_written(lease, newest, self._clock())
            self._written = not self._holder.over
        if self._holder.over:
            return
        if not lease.claimable:
            self._note.unlink(missing_ok=True)
            if self._mirror is not None:
                self._mirror.unbind()
        restore.remove_leases_before(self._store, lease)
        self._look_for_standbys()

    def _may_be_claimed(self) -> bool:
        """Return whether a standby may take over: one is there, and the mirror has all that was told."""
        if self._mirror is None:
            return self._holder.bound
        return any(standby.ready for standby in self._standbys) and self._mirror.bind()

    def _write_note(self) -> bool:
        """Note durably that a standby may be told so, before it is; return whether that could be done."""
        try:
            if not self._note.exists():
                write_durably(self._note, f"term {self.term}\n".encode(), self._note.with_suffix(".tmp"))
        except OSError as error:
            self._log.error("standby_not_allowed", file=str(self._note), reason=str(error))
            return False
        return True

    def _look_for_standbys(self) -> None:
        """Read the files of standbys; one that is gone, or cannot be used, is removed after PRESENT_S."""
        names = insist(lambda: self._store.list_names(FOLDER))[:MOST_STANDBYS]
        found: dict[str, StandbyView] = {}
        numbers: dict[str, int] = dict.fromkeys(names, UNUSABLE)
        for name in names:
            try:
                content = json.loads(read_sealed(self._store, self._run, f"{FOLDER}/{name}", MOST_BYTES) or b"")
                view = StandbyView(str(content["name"]), bool(content["ready"]), str(content["reason"]))
                numbers[name] = int(content["number"])
                found[name] = replace(view, protocol=int(content.get("protocol", view.protocol)))
            except (Corrupt, ValueError, KeyError, TypeError) as error:
                if name not in self._refused:
                    self._log.warning("standby_refused", file=f"{self._store.url}/{FOLDER}/{name}", reason=str(error))
        self._refused = set(names) - set(found)
        now = self._clock()
        present = self._present.on_look(numbers, now)
        with self._changed:
            self._standbys = tuple(
                replace(found[name], heard_s=self._present.heard_s(name, now)) for name in present if name in found
            )
        for name in set(names) - set(present):
            insist(partial(self._store.remove_path, f"{FOLDER}/{name}"))


# ---- who waits ------------------------------------------------------------------------------------------------------


SELF = (
    MetricRow("dips_standby_ready", "ready", "1 while this standby would take over from a master that is lost."),
    MetricRow("dips_standby_term", "term", "The newest term that this standby has seen."),
    MetricRow("dips_standby_refused", "refused", "Leases that it could not use.", counter=True),
    MetricRow("dips_standby_failed", "failed", "Looks at the store that failed.", counter=True),
)
TABLES: tuple[Table, ...] = ((SELF, ()),)


@dataclass
class _Counts:
    ready: bool = False
    term: int = 0
    refused: int = 0
    failed: int = 0


class Standby:
    """A master that waits: it reads the lease, and says that it is there."""

    def __init__(self, config: RunFile, store: MirrorStore, log: Log, clock: Callable[[], float] = read_clock) -> None:
        self._config, self._store, self._log, self._clock = config, store, log, clock
        self._run, self._name = config.shared.run, name_holder(config)
        self._file, self._number, self._told = f"{FOLDER}/{uuid.uuid4().hex[:12]}", 0, -inf
        self._said: StandbyState | None = None
        self._seen = SeenLease(0)
        self.watch, self.counts = LeaseWatch(), _Counts()

    def look(self) -> LeaseKeeper | None:
        """Look once, and tell the master of it when that is due; return the lease if this master may serve now.

        Blocks as long as the store does.
        """
        keeper = None
        try:
            keeper = self._look_once()
            if keeper is None and self.counts.term and self._clock() - self._told >= RENEW_S:
                self._tell()
        except (DipsError, OSError) as error:
            self.watch.on_failed(str(error))
            self.counts.failed += 1
        self.counts.ready = self.watch.state is StandbyState.READY
        if self._said is not self.watch.state:
            calm = self.watch.state in (StandbyState.READY, StandbyState.CLAIMS)
            (self._log.info if calm else self._log.warning)(
                "stands_by", state=self.watch.state.value, reason=self.watch.reason
            )
            self._said = self.watch.state
        return keeper

    def may_start_again(self) -> bool:
        """Return whether this was the master that serves: its ledger is the newest, and no other renews the lease."""
        lease = self._seen.lease
        if self.watch.state in (StandbyState.LOOKING, StandbyState.CLAIMS):
            return False
        ours = lease is None or lease.place == name_place(self._config)
        if not ours and self.watch.unchanged_s < CLAIM_S:
            return False  # this directory may be a copy of a living master's
        return restore.own_ledger_is_newest(self._config, self._seen.newest_term, self._seen.transactions)

    def leave(self) -> None:
        """Say that no standby is here any more, if the store can be told."""
        try:
            self._store.remove_path(self._file)
        except FailedMirror as error:
            self._log.warning("standby_leaves", reason=str(error))

    def _look_once(self) -> LeaseKeeper | None:
        begun = self._clock()
        seen = restore.look_at_lease(self._store, self._run)
        if seen.newest_term < self.counts.term:
            raise FailedMirror(
                f"{self._store.url}: had term {self.counts.term}, has {seen.newest_term}: it is of another run, or was "
                "emptied; if it is to stay so, start this standby again"
            )
        self._seen, before = seen, self.watch.state
        self.watch.on_look(seen, begun, self._clock())
        self.counts.term = seen.newest_term
        self.counts.refused += self.watch.state is StandbyState.REFUSED and before is not StandbyState.REFUSED
        if self.watch.state is not StandbyState.CLAIMS:
            return None
        begun = self._clock()
        lease = restore.claim_term(self._store, self._run, self._name, claimable=True, above=seen.newest_term)
        if lease is None:
            return None  # another standby was faster: the next look sees its lease
        self._log.warning("term_claimed", term=lease.term, reason=self.watch.reason)
        return LeaseKeeper(
            self._store, self._run, lease.term, self._name, self._config.master.directory, self._log, bound=True,
            claimed_at=begun, place=name_place(self._config),
        )  # fmt: skip

    def _tell(self) -> None:
        state = self.watch.state
        self._number += 1
        # Ready for a lease that allows it: the master allows it when one is there.
        ready = state in (StandbyState.READY, StandbyState.FORBIDDEN)
        content = {
            "name": self._name, "number": self._number, "ready": ready, "reason": self.watch.reason,
            "protocol": PROTOCOL,
        }  # fmt: skip
        insist(lambda: self._store.write_file(self._file, seal(self._run, json.dumps(content).encode())))
        self._told = self._clock()


async def stand_by(
    config: RunFile, tls: TlsSource | None, log: Log, stack: AsyncExitStack, ready: Callable[[], None] = lambda: None
) -> bool:
    """Wait until this master is to serve; return False if it was stopped before. Its ledger is in place then.

    A term that it claimed for the restore is renewed until its ledger's next one is; `stack` ends that. `ready` is
    called once it waits.

    Raise ConfigError if the run file is not one of a standby.
    """
    store = genesis.mirror_of(config)
    if store is None:
        raise ConfigError("master.mirror: a standby needs the mirror of the master whose place it takes, got none")
    if any(slave.supervisor == "exec" for slave in config.slaves):
        raise ConfigError("slaves.supervisor: slaves that a standby starts would be on its own machine: got exec")
    standby, stopped = Standby(config, store, log), asyncio.Event()
    async with AsyncExitStack() as waiting:
        subject = HttpSubject(
            config.shared.run, "master", lambda: asdict(standby.counts), _collect,
            lambda: f"stands by: {standby.watch.reason}",
            daemon.list_disks(config.master.directory, config.master.mirror),
        )  # fmt: skip
        await daemon.open_http(config.master.http, config.http_token, tls, subject, log, waiting)
        waiting.enter_context(daemon.end_signals(stopped.set))
        stopping = asyncio.ensure_future(stopped.wait())
        ready()
        waiting.callback(stopping.cancel)
        serves = False
        while not serves and not stopping.done():
            work = asyncio.wrap_future(call_apart(partial(_try_to_serve, standby, config, log, stack), "standby"))
            either: list[asyncio.Future[Any]] = [work, stopping]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            serves = work.done() and work.result()
            if not serves:
                await asyncio.wait([stopping], timeout=LOOK_S)
        await asyncio.wait([work], timeout=LOOK_S)  # a look under way could still say that it is here
        await asyncio.wait([asyncio.wrap_future(call_apart(standby.leave, "standby"))], timeout=LOOK_S)
    return serves and not stopped.is_set()  # also where it was stopped while it took leave


def _try_to_serve(standby: Standby, config: RunFile, log: Log, stack: AsyncExitStack) -> bool:
    """Look once; return True if this master is to serve, with its ledger in place."""
    keeper = standby.look()
    if keeper is None:
        return standby.may_start_again()
    stack.callback(keeper.close)
    return _take_over(config, keeper, log)


def _take_over(config: RunFile, keeper: LeaseKeeper, log: Log) -> bool:
    """Restore the ledger while the lease of the claimed term is renewed; the master then begins the next term.

    Return False if the term is over already.
    """
    ours = keeper.start(RENEW_S)
    while ours and keeper.left_s() > 0.0:
        try:
            restore.set_aside_old(config, keeper.term, log)
            restore.restore_if_lost(config, log, claimed=keeper.term)
            return True
        except FailedMirror as error:
            log.warning("restore_failed", reason=str(error))
            time.sleep(AGAIN_S)
    log.warning("term_lost", term=keeper.term, reason=keeper.explain_end())
    return False


def _collect(status: Status) -> Iterator[Metric]:
    yield from make_families(SELF, [((), status)], ())
