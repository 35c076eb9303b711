"""The deciding part of a slave: takes orders, keeps its round, does what it is told when it registers.

Synchronous and deterministic: no thread, clock or socket. One owner calls it, in the daemon the order thread, in the
simulation the simulated world. What must stay true: an order is carried out once however often it comes; what bears
an old term, incarnation, round or seq changes nothing; a version is served only after its Commit; an order that fails
half-way poisons its round, and then only Abort is legal. It does not know how bytes move (Flow) or are kept (Disk).

The first order of a later round proves that the one before ended without a row (its Abort was lost): presumed abort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

from dips.errors import (
    Busy,
    Corrupt,
    DipsError,
    FailedDisk,
    LocalProtocolError,
    Stale,
    StaleVersion,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer.versions import Versions
from dips.protocol import effects as e
from dips.protocol.events import Answer, Done, Folded, Measured, Persisted, Prepared, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeatAnswer
from dips.protocol.manifest import BYTES_PER_PARAMETER, Manifest
from dips.slave.fences import Fences
from dips.slave.moving import Moving, Opened, Report
from dips.slave.ports import Arrays, Disk, Flow, FlowEvents


class Shard:
    """One slave's layers, and what may be done to them.

    `inbox` is where the data flow reports from its threads; its owner then calls `staged`, `refused` and `released`
    here, on the one thread that owns the shard. Without an inbox the flow calls the shard itself.
    """

    def __init__(self, name: str, versions: Versions, disk: Disk, flow: Flow, inbox: FlowEvents | None = None) -> None:
        self.name = name
        self.versions = versions
        self.round: int | None = None  # the open one, None between rounds
        self.poison: str | None = None  # why only Abort of it is legal
        self.writing: VersionId | None = None  # its snapshot, on another thread
        self.reason = ""  # why this slave does not hold what it was told to hold
        self._disk = disk
        self._flow = flow
        self._inbox: FlowEvents = inbox or self
        self._fences = Fences(name)
        self._moving = Moving(versions, flow, disk)
        self._last_round = 0
        self._reserved: VersionId | None = None  # room on the disk for its snapshot
        self._orders: dict[type, Callable[[Any, Opened], Answer]] = {
            e.OpenPush: self._open_push,
            e.Reorder: self._reorder,
            e.DropPush: self._drop_push,
            e.Measure: self._measure,
            e.Fold: self._fold,
            e.Apply: self._apply,
            e.Persist: self._persist,
            e.Commit: self._commit,
            e.Abort: self._abort,
            e.OpenPull: self._open_pull,
            e.ClosePull: self._close_pull,
            e.Retire: self._retire,
            e.Ping: self._ping,
        }

    @property
    def term(self) -> int:
        return self._fences.term

    @property
    def sinc(self) -> int:
        """This life's number, 0 before the first `welcome`."""
        return self._fences.sinc

    @property
    def staged_pushes(self) -> tuple[PushId, ...]:
        """Pushes that are full and not measured: every beat names them."""
        return self._moving.staged()

    @property
    def has_reports(self) -> bool:
        """Whether the master is to be told something."""
        return bool(self._moving.reports)

    # ---- orders --------------------------------------------------------------------------------

    def execute(self, order: e.Order) -> Answer:
        """Carry out an order, or repeat the answer that it got before.

        Raises Stale… (fences), Busy (no slot, no bank; nothing changed: ask again), LocalProtocolError (illegal now),
        FailedDisk (no room, or it broke; nothing else changed), or whatever poisoned the round.
        """
        remembered = self._fences.admit(order)
        if remembered is not None:
            return remembered
        answer = self._orders[type(order.body)](order.body, (order.term, order.number))
        self._fences.remember(order, answer)
        return answer

    def _open_push(self, order: e.OpenPush, opened: Opened) -> Answer:
        """Legal when a version is held; reserves a slot; above the tombstone; a repetition changes nothing."""
        if self.versions.memory is None:
            raise StaleVersion(f"{self.name} holds no version yet, so it opens no push")
        self._moving.open_push(order, opened)
        return Done()

    def _reorder(self, order: e.Reorder, opened: Opened) -> Answer:
        """Always legal; a push that does not move here has nothing to be ordered."""
        self._moving.reorder(order.push, order.places)
        return Done()

    def _drop_push(self, order: e.DropPush, opened: Opened) -> Answer:
        """Always legal; frees the slot, sets the tombstone."""
        self._moving.drop_push(order.push)
        return Done()

    def _measure(self, order: e.Measure, opened: Opened) -> Answer:
        """Legal for a staged push when θ is at the order's version and nothing is prepared; begins the round."""
        self._enter(order.round)
        if self.versions.memory != order.version:
            raise StaleVersion(f"expected to measure against {self.versions.memory}, got {order.version}")
        known = self._moving.full(order.push)
        with self._work(f"Measure of {order.push}"):
            layer_sq = self.versions.measure(order.push)
        known.measured = order.round
        return Measured(layer_sq, all(map(isfinite, layer_sq)))

    def _fold(self, order: e.Fold, opened: Opened) -> Answer:
        """Legal once for a push measured in this round; frees its slot."""
        self._enter(order.round)
        known = self._moving.full(order.push)
        if known.measured != order.round:
            raise LocalProtocolError(f"push {order.push} was not measured in round {order.round}")
        with self._work(f"Fold of {order.push}"):
            self._flow.drop_push(order.push)
            try:
                return Folded(self.versions.fold(order.push, order.weight))
            finally:
                self._moving.take(order.push)

    def _apply(self, order: e.Apply, opened: Opened) -> Answer:
        """Legal when something is folded; makes θ′, m′ beside θ, m. Busy while readers leave the bank of θ′.

        The snapshot's room is taken before anything is computed: a full disk is found while nothing is lost.
        """
        self._enter(order.round)
        memory = self.versions.memory
        if memory is None or order.version != VersionId(memory.version + 1, order.round):
            raise LocalProtocolError(f"Apply of {order.version} in round {order.round} cannot follow {memory}")
        if not self.versions.folded:
            raise LocalProtocolError(f"Apply of {order.version}: no push is folded in round {order.round}")
        self._not_while_writing(f"Apply of {order.version}")
        if order.reserve:
            self._reserve(order.version)
        self._moving.relieve()
        with self._work(f"Apply of {order.version}"):
            self.versions.prepare(order.version, order.scale, order.lr, order.momentum)
        self._moving.unmeasure()
        return Prepared(order.version)

    def _persist(self, order: e.Persist, opened: Opened) -> Answer:
        """Legal for what is prepared, or served; on return it is durable. A disk that fails leaves θ′ as it is."""
        return Persisted(order.version, self._write(order.version, *self._to_write(order))())

    def begin_persist(self, order: e.Order) -> Answer | Callable[[], str]:
        """Carry out a Persist; for the version that is served, return what writes it instead, on any thread.

        Until `end_persist` nothing may take θ and m away: Apply and Load are Busy (protocol.md section 2).
        """
        body = order.body
        assert isinstance(body, e.Persist)
        remembered = self._fences.admit(order)
        if remembered is not None:
            return remembered
        if body.version != self.versions.memory:
            return self.execute(order)
        write = self._write(body.version, *self._to_write(body))
        self.writing = body.version
        return write

    def end_persist(self, order: e.Order, digest: str | None) -> Answer | None:
        """The writer has ended; `digest` is None if it failed. What a master with a successor ordered is forgotten."""
        version, self.writing = self.writing, None
        if digest is None or version is None:
            return None
        answer = Persisted(version, digest)
        if order.term == self.term:
            self._fences.remember(order, answer)
        return answer

    def _to_write(self, order: e.Persist) -> tuple[Arrays, Arrays]:
        held = (self.versions.prepared, self.versions.memory)
        if order.version not in held:
            raise LocalProtocolError(f"Persist of {order.version}: prepared is {held[0]}, served {held[1]}")
        if order.version == self.versions.prepared and self.poison is not None:
            raise LocalProtocolError(f"Persist of {order.version}: {self.poison}; only Abort is legal")
        return self.versions.theta(order.version), self.versions.momentum(order.version)

    def _write(self, version: VersionId, theta: Arrays, momentum: Arrays) -> Callable[[], str]:
        """What writes a snapshot into the room that was reserved for it."""
        if self._reserved == version:
            self._reserved = None

        def write() -> str:
            try:
                return self._disk.write(version, theta, momentum)
            except OSError as error:
                raise FailedDisk(f"{self.name} cannot write the snapshot of {version}: {error}") from error

        return write

    def _not_while_writing(self, what: str) -> None:
        if self.writing is not None:
            raise Busy(f"{what} waits: the snapshot of {self.writing} is being written")

    def _commit(self, order: e.Commit, opened: Opened) -> Answer:
        """Legal for what is prepared or served already; serves it and opens the pulls."""
        self._flip(order.version)
        self._moving.open_pulls(order.pulls, order.version, order.pull_deadline_s, opened)
        return Done()

    def _abort(self, order: e.Abort, opened: Opened) -> Answer:
        """Legal for any round without a row; a round before the open one is over already."""
        memory = self.versions.memory
        if memory is not None and memory != GENESIS and memory.round == order.round:
            raise LocalProtocolError(f"Abort of round {order.round}, which is committed as {memory}")
        if self.round is None or order.round >= self.round:
            self._end_round()
        self._last_round = max(self._last_round, order.round)
        return Done()

    def _open_pull(self, order: e.OpenPull, opened: Opened) -> Answer:
        """Legal for a version that is held; pins it until the pull's readers are done."""
        self._moving.open_pull(order, opened)
        return Done()

    def _close_pull(self, order: e.ClosePull, opened: Opened) -> Answer:
        """Always legal; the pin ends when the last byte in flight is gone."""
        self._moving.close_pull(order.pull)
        return Done()

    def _retire(self, order: e.Retire, opened: Opened) -> Answer:
        """Legal for versions that this slave neither serves nor prepares; deletes their snapshots."""
        needed = {self.versions.memory, self.versions.prepared} & set(order.versions)
        if needed:
            raise LocalProtocolError(
                f"Retire names {', '.join(map(str, needed))}, which {self.name} serves or prepares"
            )
        try:
            self._disk.delete(order.versions)
        except OSError as error:
            raise FailedDisk(f"{self.name} cannot delete snapshots: {error}") from error
        return Done()

    def _ping(self, order: e.Ping, opened: Opened) -> Answer:
        return Done()

    # ---- what the data flow reports --------------------------------------------------------------------------------

    def staged(self, push: PushId, nbytes: int) -> None:
        """All ranges of the push are here, checked; nobody writes any more."""
        self._moving.push_staged(push, nbytes)

    def refused(self, push: PushId, reason: str) -> None:
        """The push cannot be completed: its slot is freed and the master is to be told."""
        self._moving.push_refused(push, reason)

    def released(self, pull: PullId, reason: str) -> None:
        """Nobody reads for the pull any more: its pin ends."""
        self._moving.pull_released(pull)

    def moved(self, pull: PullId) -> None:
        """Nobody reads for the pull from memory any more: its bank may be free."""
        self._moving.pull_moved(pull)

    def take_reports(self) -> list[Report]:
        """Return what the master is to be told since the last call, oldest first."""
        reports, self._moving.reports = self._moving.reports, []
        return reports

    def heal(self, answer: SlaveHeartbeatAnswer) -> list[str]:
        """Drop what the master does not list as live and should know; return the names of what was dropped.

        An answer that says `register` lists nothing to go by; one of an old term changes nothing.
        """
        if answer.register or answer.term < self.term:
            return []
        return self._moving.heal(answer.pushes, answer.pulls, (answer.term, answer.as_of))

    # ---- registration --------------------------------------------------------------------------------

    def registration(
        self, req: int, nonce: str, run: str, address: str, lanes: tuple[str, ...], key: str = ""
    ) -> SlaveRegistered:
        """Say what this slave holds; may raise OSError from the disk."""
        return SlaveRegistered(
            req=req,
            slave=self.name,
            nonce=nonce,
            run=run,
            address=address,
            lanes=lanes,
            term_seen=self.term,
            memory=self.versions.memory,
            prepared=self.versions.prepared,
            complete=self._disk.complete(),
            slots=self.versions.slots,
            reason=self.reason,
            key=key,
        )

    def welcome(self, registered: e.Registered) -> None:
        """Take the incarnation, the term and, the first time, the layers: memory is allocated here.

        Raises StaleTerm for the answer of an old master, CorruptManifest if the manifest cannot be read.
        """
        manifest = Manifest.from_json(registered.manifest)
        self._fences.see_term(registered.term, "Registered")
        self.versions.allocate({layer: manifest.layers[layer].numel for layer in registered.layers})
        if registered.sinc != self.sinc:
            self._moving.drop_all()
            self._fences.sinc = registered.sinc
            self._flow.start(registered.sinc, self._inbox)

    def follow(self, order: e.SlaveOrder) -> bool:
        """Do what the master said to a Register; return True if this slave may serve (Hold), else register again.

        What cannot be done is told in `reason` with the next Register; what was held is held on.
        """
        if isinstance(order, e.Hold):
            self.reason = ""
            return True
        if isinstance(order, e.RegisterLater):
            return False
        try:
            self._obey(order)
            self.reason = ""
        except (Busy, Corrupt, Stale, OSError) as error:
            self.reason = f"{type(order).__name__} {order.version}: {error}"
        return False

    def _obey(self, order: e.LoadVersion | e.CommitVersion | e.AbortVersion) -> None:
        prepared, memory = self.versions.prepared, self.versions.memory
        if isinstance(order, e.AbortVersion):
            if memory == order.version:
                raise LocalProtocolError(f"{order.version} is committed and served here, and was to be aborted")
            if prepared == order.version:
                self._end_round()
        elif prepared == order.version:
            self._flip(order.version)
        elif memory == order.version:
            self._end_round()
        else:
            self._not_while_writing(f"Load of {order.version}")
            self._end_round()
            self._moving.drop_all()
            self._moving.relieve()
            self.versions.load(order.version, lambda theta, momentum: self._disk.read(order.version, theta, momentum))

    # ---- the round --------------------------------------------------------------------------------

    def _enter(self, round_: int) -> None:
        """Be in `round_`; a later one than the open one presumes that one aborted, unless it is in doubt."""
        if self.versions.prepared is not None:
            raise LocalProtocolError(
                f"round {round_}: {self.versions.prepared} is prepared, neither committed nor aborted"
            )
        if round_ < self._last_round or (round_ == self._last_round and self.round is None):
            raise Stale(f"round {round_} is over; the last one at {self.name} was {self._last_round}")
        if round_ != self.round:
            self._end_round()
            self.round = self._last_round = round_
        if self.poison is not None:
            raise LocalProtocolError(f"round {round_}: {self.poison}; only Abort is legal")

    def _reserve(self, version: VersionId) -> None:
        if self._reserved != version:
            self._give_room_back()
        nbytes = 2 * BYTES_PER_PARAMETER * self.versions.numel  # θ and m
        try:
            self._disk.reserve(version, nbytes)
        except OSError as error:
            raise FailedDisk(f"{self.name} has no room for the snapshot of {version}: {error}") from error
        self._reserved = version

    def _give_room_back(self) -> None:
        """What was reserved for a version that no longer waits for its snapshot."""
        if self._reserved is not None:
            self._disk.release(self._reserved)
            self._reserved = None

    def _end_round(self) -> None:
        if self.versions.memory != self._reserved:
            self._give_room_back()
        self.versions.abort()
        self._moving.unmeasure()
        self.round = self.poison = None

    def _flip(self, version: VersionId) -> None:
        if self.versions.memory == version:
            return
        if self.versions.prepared != version:
            raise StaleVersion(
                f"Commit of {version}: {self.name} serves {self.versions.memory}, prepared is {self.versions.prepared}"
            )
        self._not_while_writing(f"Commit of {version}")
        self.versions.flip(version)
        self._end_round()
        self._moving.relieve()  # now, so that the next Apply finds its bank free

    @contextmanager
    def _work(self, what: str) -> Iterator[None]:
        """Whatever fails inside may have left half of it done, so the round is poisoned; Busy is said before any."""
        try:
            yield
        except Busy:
            raise
        except Exception as error:
            self.poison = f"{what} failed: {error!r}"
            if isinstance(error, DipsError):
                raise
            raise LocalProtocolError(f"{self.name}: {self.poison}") from error
