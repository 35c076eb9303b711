"""The deciding part of a slave: fences, retries, tombstones, poisoned rounds, healing, registration."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from dips.errors import (
    Busy,
    CorruptSnapshot,
    DipsError,
    FailedDisk,
    LocalProtocolError,
    RemoteProtocolError,
    Stale,
    StaleIncarnation,
    StalePush,
    StaleTerm,
    StaleVersion,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import twins
from dips.outer.crew import Crew
from dips.outer.versions import Versions
from dips.protocol.effects import (
    Abort,
    AbortVersion,
    Apply,
    ClosePull,
    Commit,
    CommitVersion,
    DropPush,
    Fold,
    Hold,
    LoadVersion,
    Measure,
    OpenPull,
    OpenPush,
    Order,
    OrderBody,
    Persist,
    Ping,
    Registered,
    RegisterLater,
    Reorder,
    Retire,
)
from dips.protocol.events import Answer, Done, Folded, Measured, Persisted, Prepared
from dips.protocol.heartbeats import SlaveHeartbeatAnswer, Transfer
from dips.protocol.manifest import Manifest
from dips.slave import fences
from dips.slave.ports import Arrays, FlowEvents
from dips.slave.shard import Shard

MANIFEST = Manifest.from_shapes([("a.0.w", (2, 3)), ("b.w", (4,)), ("c.w", (1,))])
P1, P2, P3 = (PushId("x", 1, seq) for seq in (1, 2, 3))
PULL = PullId("x", 1, 1)
V1 = VersionId(1, 1)


@dataclass
class Flow:
    """Remembers what it was told; bytes appear when the test writes them into `pushes`."""

    pushes: dict[PushId, Arrays] = field(default_factory=dict)
    codecs: dict[PushId, str] = field(default_factory=dict)
    pulls: dict[PullId, Arrays] = field(default_factory=dict)
    closing: list[PullId] = field(default_factory=list)
    moving: list[PullId] = field(default_factory=list)
    places: dict[PushId, tuple[int, ...]] = field(default_factory=dict)
    lives: list[int] = field(default_factory=list)
    broken: bool = False

    def start(self, sinc: int, events: FlowEvents) -> None:
        self.lives.append(sinc)

    def open_push(self, push: PushId, order: tuple[int, ...], buffers: Arrays, deadline_s: float, codec: str) -> None:
        if self.broken:
            raise RemoteProtocolError("no")
        self.pushes[push], self.codecs[push] = buffers, codec

    def reorder(self, push: PushId, places: tuple[int, ...]) -> None:
        self.places[push] = places

    def drop_push(self, push: PushId) -> None:
        self.pushes.pop(push, None)

    def open_pull(self, pull: PullId, version: VersionId, source: Arrays, deadline_s: float) -> None:
        if self.broken:
            raise RemoteProtocolError("no")
        self.pulls[pull] = source

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        self.pulls[pull] = source
        self.moving.append(pull)

    def close_pull(self, pull: PullId) -> None:
        if self.pulls.pop(pull, None) is not None:
            self.closing.append(pull)

    def transfers(self) -> tuple[Transfer, ...]:
        return ()


@dataclass
class Disk:
    """Snapshots in a dictionary; `error` is raised by the next call that touches one."""

    kept: dict[VersionId, tuple[dict[int, bytes], dict[int, bytes]]] = field(default_factory=dict)
    error: Exception | None = None
    full: bool = False
    reserved: dict[VersionId, int] = field(default_factory=dict)
    writes: int = 0

    def complete(self) -> tuple[VersionId, ...]:
        return tuple(sorted(self.kept))

    def reserve(self, version: VersionId, nbytes: int) -> None:
        if self.full:
            raise OSError(28, "no space left on device")
        self.reserved[version] = nbytes

    def release(self, version: VersionId) -> None:
        self.reserved.pop(version, None)

    def write(self, version: VersionId, theta: Arrays, momentum: Arrays) -> str:
        self._fail()
        self.writes += 1
        self.kept[version] = tuple({i: a.tobytes() for i, a in arrays.items()} for arrays in (theta, momentum))
        return f"digest of {version}"

    def read(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        self._fail()
        if version == GENESIS:
            for arrays, value in ((theta, 1.0), (momentum, 0.0)):
                for array in arrays.values():
                    array.fill(value)
            return
        for arrays, kept in zip((theta, momentum), self.kept[version], strict=True):
            for layer, array in arrays.items():
                array[:] = np.frombuffer(kept[layer], np.float32)

    def map(self, version: VersionId) -> Arrays | None:
        kept = self.kept.get(version)
        return {i: np.frombuffer(raw, np.float32) for i, raw in kept[0].items()} if kept else None

    def delete(self, versions: tuple[VersionId, ...]) -> None:
        self._fail()
        for version in versions:
            self.kept.pop(version, None)

    def _fail(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class Slave:
    """A shard with its flow and disk, and a master's hand: `order` numbers and sends."""

    def __init__(self, slots: int = 2, pinned: int = 1, disk: Disk | None = None) -> None:
        self.flow, self.disk = Flow(), disk or Disk()
        self.shard = Shard("s", Versions(Crew(twins), slots, pinned), self.disk, self.flow)
        self.term, self.number = 1, 0

    def ready(self) -> Slave:
        self.welcome(LoadVersion(GENESIS))
        assert self.shard.follow(LoadVersion(GENESIS)) is False
        self.welcome(Hold())
        assert self.shard.follow(Hold()) is True
        return self

    def welcome(self, order: object, sinc: int = 7, term: int | None = None) -> None:
        self.shard.welcome(
            Registered(term or self.term, sinc, order, GENESIS, (0, 2), ("", ""), MANIFEST.to_json())  # type: ignore[arg-type]
        )

    def made(self, body: OrderBody, term: int | None = None, sinc: int = 7) -> Order:
        self.number += 1
        return Order("s", sinc, term or self.term, self.number, body, 10.0)

    def order(self, body: OrderBody) -> Answer:
        return self.shard.execute(self.made(body))

    def stage(self, push: PushId, value: float) -> None:
        """Open a push, fill it, and say so."""
        assert self.order(OpenPush(push, (0,), 60.0)) == Done()
        for array in self.flow.pushes[push].values():
            array.fill(value)
        self.shard.staged(push, 28)

    def fold(self, push: PushId, value: float, round_: int = 1, weight: float = 1.0) -> None:
        self.stage(push, value)
        assert self.shard.versions.memory is not None
        self.order(Measure(round_, push, self.shard.versions.memory))
        self.order(Fold(round_, push, weight))

    def prepare(self, push: PushId = P1, round_: int = 1, persist: bool = True) -> VersionId:
        """One push in, up to Persisted, or only to Prepared."""
        self.fold(push, 0.5, round_)
        assert self.shard.versions.memory is not None
        version = VersionId(self.shard.versions.memory.version + 1, round_)
        self.order(Apply(round_, version, 1.0, 1.0, 0.0))
        if persist:
            self.order(Persist(version))
        return version

    def state(self) -> tuple[object, ...]:
        """Everything that an order could change."""
        v = self.shard.versions
        thetas = tuple(a.tobytes() for a in v.theta(v.memory).values()) if v.memory else ()
        held = (v.memory, v.prepared, v.folded, v.open_pushes, tuple(v.pins.items()), tuple(v.holders()))
        seen = (self.shard.term, self.shard.sinc, self.shard.round, self.shard.poison)
        return (thetas, held, seen, tuple(self.flow.pushes), tuple(self.flow.pulls), tuple(self.disk.kept))


# ---- a whole round ---------------------------------------------------------------------------------------------------


def test_a_round_from_open_to_commit() -> None:
    """Each order of a round gives its answer, and the version is served only after Commit (guards invariant 2)."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    slave.stage(P2, 0.0)
    assert [(r.push, r.nbytes, r.reason) for r in slave.shard.take_reports()] == [(P1, 28, ""), (P2, 28, "")]
    assert slave.shard.take_reports() == []
    assert slave.shard.staged_pushes == (P1, P2)
    assert slave.order(Measure(1, P1, GENESIS)) == Measured((6 * 0.25, 0.25), True)
    assert slave.shard.staged_pushes == (P2,)
    assert slave.order(Fold(1, P1, 1.0)) == Folded(7 * 0.25)
    assert slave.order(Measure(1, P2, GENESIS)) == Measured((6.0, 1.0), True)
    assert slave.order(Fold(1, P2, 2.0)) == Folded(7 * 2.5**2)
    assert slave.order(Apply(1, V1, 0.5, 1.0, 0.0)) == Prepared(V1)
    assert slave.shard.versions.memory == GENESIS
    assert slave.order(Persist(V1)) == Persisted(V1, "digest of v1@r1")
    assert slave.order(Commit(V1, (PULL,), 60.0)) == Done()
    assert slave.shard.versions.memory == V1
    np.testing.assert_array_equal(slave.flow.pulls[PULL][0], np.full(6, 1 - 1.25, np.float32))
    assert slave.shard.versions.used_bytes == 2 * 28


def test_a_push_with_nan_is_measured_not_finite() -> None:
    """One NaN makes Measured.finite False, so that the master gates it (guards invariant 8)."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    slave.flow.pushes[P1][2][0] = np.nan
    answer = slave.order(Measure(1, P1, GENESIS))
    assert isinstance(answer, Measured)
    assert answer.finite is False
    assert answer.layer_sq[0] == 1.5


# ---- fences and retries ----------------------------------------------------------------------------------------------


def test_every_order_repeated_gets_its_answer_and_changes_nothing() -> None:
    """The same (term, number) repeats the answer, never the work (guards invariants 1 and 4)."""
    slave = Slave().ready()
    bodies: list[OrderBody] = [
        Measure(1, P1, GENESIS),
        Fold(1, P1, 1.0),
        Apply(1, V1, 1.0, 1.0, 0.0),
        Persist(V1),
        Commit(V1, (PULL,), 60.0),
        OpenPull(PullId("x", 1, 2), V1, 60.0),
        ClosePull(PULL),
        DropPush(P2, "over"),
        Retire((VersionId(9, 9),)),
        Ping(),
    ]
    slave.stage(P1, 0.5)
    slave.stage(P2, 0.5)
    for body in bodies:
        order = slave.made(body)
        answer, state = slave.shard.execute(order), slave.state()
        assert slave.shard.execute(order) is answer
        assert slave.state() == state
    assert slave.disk.writes == 1


def test_the_same_number_with_another_body_is_refused() -> None:
    """A number names one order: another one under it is a bug, and is not carried out."""
    slave = Slave().ready()
    order = slave.made(Ping())
    slave.shard.execute(order)
    other = Order(order.slave, order.sinc, order.term, order.number, DropPush(P1, ""), 1.0)
    with pytest.raises(LocalProtocolError, match="was Ping"):
        slave.shard.execute(other)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"term": 1}, StaleTerm),
        ({"sinc": 6}, StaleIncarnation),
        ({"slave": "t"}, RemoteProtocolError),
    ],
)
def test_orders_of_yesterday_change_nothing(change: dict[str, object], error: type[DipsError]) -> None:
    """An old term, another incarnation or another slave's order changes no state (guards invariant 5)."""
    slave = Slave().ready()
    slave.term = 2
    slave.stage(P1, 0.5)
    state = slave.state()
    fields = {"slave": "s", "sinc": 7, "term": 2, "number": 99, "body": DropPush(P1, ""), "deadline_s": 1.0}
    with pytest.raises(error):
        slave.shard.execute(Order(**{**fields, **change}))  # type: ignore[arg-type]
    assert slave.state() == state


def test_a_new_term_forgets_the_answers_of_the_old() -> None:
    """Numbers begin anew with a term, so an order of a new master is carried out under a number used before."""
    slave = Slave().ready()
    slave.shard.execute(Order("s", 7, 1, 5, Ping(), 1.0))
    slave.shard.execute(Order("s", 7, 2, 5, OpenPush(P1, (0,), 1.0), 1.0))
    assert slave.shard.versions.open_pushes == (P1,)
    assert slave.shard.term == 2


def test_answers_are_bounded_and_what_is_older_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the remembered answers an old number is stale: it is never carried out a second time."""
    monkeypatch.setattr(fences, "REMEMBERED", 3)
    slave = Slave().ready()
    first = slave.made(OpenPush(P1, (0,), 1.0))
    slave.shard.execute(first)
    slave.order(DropPush(P1, ""))
    for _ in range(3):
        slave.order(Ping())
    with pytest.raises(StaleTerm, match="older than the last"):
        slave.shard.execute(first)


def test_orders_of_a_round_that_is_over_are_stale() -> None:
    """Measure, Fold and Apply of an earlier round, or of a committed one, change nothing (guards invariant 5)."""
    slave = Slave().ready()
    slave.order(Commit(slave.prepare(P1, 3), (), 1.0))
    slave.stage(P2, 0.5)
    state = slave.state()
    for round_ in (2, 3):
        for body in (Measure(round_, P2, VersionId(1, 3)), Fold(round_, P2, 1.0), Apply(round_, V1, 1.0, 1.0, 0.0)):
            with pytest.raises(Stale, match="is over"):
                slave.order(body)
    assert slave.state() == state


def test_measure_against_another_version_is_refused() -> None:
    """Norms are taken against the θ that the master means, or not at all."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    with pytest.raises(StaleVersion, match="expected to measure against v0@r0, got v1@r1"):
        slave.order(Measure(1, P1, V1))


def test_illegal_orders_are_our_bug_and_change_nothing() -> None:
    """What the protocol never orders is refused without a change and without poison."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    slave.order(OpenPush(P2, (0,), 1.0))
    slave.order(Measure(1, P1, GENESIS))
    state = slave.state()
    illegal: list[tuple[OrderBody, type[DipsError]]] = [
        (Measure(1, P2, GENESIS), LocalProtocolError),  # still moving
        (Measure(1, P3, GENESIS), StalePush),
        (Fold(1, P2, 1.0), LocalProtocolError),
        (Apply(1, V1, 1.0, 1.0, 0.0), LocalProtocolError),  # nothing folded
        (Apply(1, VersionId(2, 1), 1.0, 1.0, 0.0), LocalProtocolError),
        (Persist(V1), LocalProtocolError),
        (Commit(V1, (), 1.0), StaleVersion),
        (OpenPull(PULL, V1, 1.0), StaleVersion),
        (Retire((GENESIS,)), LocalProtocolError),
    ]
    for body, error in illegal:
        with pytest.raises(error):
            slave.order(body)
    assert slave.state() == state


# ---- tombstones and slots --------------------------------------------------------------------------------------------


def test_a_late_open_push_finds_a_tombstone() -> None:
    """What was dropped, even before it came, or folded, is never opened again; a newer one is (guards invariant 11)."""
    slave = Slave().ready()
    slave.order(DropPush(P2, "its OpenPush is still on its way"))
    for push in (P1, P2):
        with pytest.raises(StalePush, match="at or below"):
            slave.order(OpenPush(push, (0,), 1.0))
    slave.fold(P3, 0.5)
    with pytest.raises(StalePush):
        slave.order(OpenPush(P3, (0,), 1.0))
    assert slave.shard.versions.open_pushes == ()
    slave.order(OpenPush(PushId("x", 2, 1), (0,), 1.0))
    assert slave.shard.versions.open_pushes == (PushId("x", 2, 1),)
    slave.order(ClosePull(PULL))
    with pytest.raises(StalePush):
        slave.order(OpenPull(PULL, GENESIS, 1.0))


def test_no_slot_is_busy_and_nothing_is_taken() -> None:
    """A push beyond the slots is told Busy; the order may be tried again under the same number."""
    slave = Slave(slots=1).ready()
    slave.order(OpenPush(P1, (0,), 1.0))
    order = slave.made(OpenPush(P2, (0,), 1.0))
    with pytest.raises(Busy):
        slave.shard.execute(order)
    slave.order(DropPush(P1, ""))
    assert slave.shard.execute(order) == Done()


def test_a_push_that_the_flow_does_not_take_leaves_no_slot() -> None:
    """If the flow refuses to open a push or pull, no slot and no pin remains."""
    slave = Slave().ready()
    slave.flow.broken = True
    for body in (OpenPush(P1, (0,), 1.0), OpenPull(PULL, GENESIS, 1.0)):
        with pytest.raises(RemoteProtocolError):
            slave.order(body)
    assert slave.shard.versions.open_pushes == ()
    assert slave.shard.versions.pins == {}


def test_an_open_push_is_opened_once_and_reported_again() -> None:
    """A new master's OpenPush of a push that lies here staged changes nothing, and the master hears of it again."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    slave.shard.take_reports()
    assert slave.order(OpenPush(P1, (0,), 1.0)) == Done()
    assert slave.shard.versions.open_pushes == (P1,)
    assert [r.push for r in slave.shard.take_reports()] == [P1]


def test_a_lossy_push_begins_as_its_base_and_no_flip_changes_that() -> None:
    """Its slot is θ of the base from the start, so the head may flip while it moves, and nobody waits for a pin."""
    slave = Slave(pinned=0).ready()
    assert slave.order(OpenPush(P2, (0,), 60.0, "int8", GENESIS)) == Done()
    assert slave.flow.codecs[P2] == "int8"
    version = slave.prepare(P1)
    slave.order(Commit(version, (), 60.0))
    assert slave.shard.versions.memory == version
    assert all((a == 1.0).all() for a in slave.flow.pushes[P2].values())
    assert slave.shard.versions.pins == {}


def test_a_lossy_push_on_a_version_that_is_not_held_is_refused_and_takes_nothing() -> None:
    """An OpenPush that a flip overtook finds its base gone: the master drops the push, the slave holds no slot."""
    slave = Slave().ready()
    before = slave.state()
    with pytest.raises(StaleVersion, match="v7@r9 is not held"):
        slave.order(OpenPush(P1, (0,), 60.0, "int8", VersionId(7, 9)))
    assert slave.state() == before


def test_an_open_push_keeps_its_codec() -> None:
    """A new master that grants the same push otherwise than the old one is refused: the slot holds another base."""
    slave = Slave().ready()
    slave.order(OpenPush(P1, (0,), 60.0, "int8", GENESIS))
    with pytest.raises(StalePush, match="is open as int8 on v0@r0, not fp32 on None"):
        slave.order(OpenPush(P1, (0,), 60.0))
    assert slave.order(OpenPush(P1, (0,), 60.0, "int8", GENESIS)) == Done()


def test_a_refused_push_frees_its_slot_and_is_told() -> None:
    """When the flow gives a push up, its slot is free, its tombstone set, and the master is to be told why."""
    slave = Slave().ready()
    slave.order(OpenPush(P1, (0,), 1.0))
    slave.shard.refused(P1, "ranges leave a gap")
    assert slave.shard.versions.open_pushes == ()
    assert [(r.push, r.reason) for r in slave.shard.take_reports()] == [(P1, "ranges leave a gap")]
    slave.shard.staged(P1, 28)
    slave.shard.refused(P1, "again")
    assert slave.shard.take_reports() == []


# ---- poison, abort, commit -------------------------------------------------------------------------------------------


def test_failure_4_a_swallowed_error() -> None:
    """After a kernel failed, every order of the round is refused but Abort; then the next round works."""
    slave = Slave().ready()
    slave.fold(P1, 0.5)
    slave.stage(P2, 0.25)
    slave.order(Measure(1, P2, GENESIS))
    del slave.shard.versions._acc.arrays[2]  # type: ignore[union-attr]  # the second layer fails, the first is folded
    with pytest.raises(LocalProtocolError, match="Fold of x/1#2 failed"):
        slave.order(Fold(1, P2, 1.0))
    for body in (Fold(1, P2, 1.0), Apply(1, V1, 1.0, 1.0, 0.0), Measure(1, P1, GENESIS)):
        with pytest.raises(LocalProtocolError, match="only Abort is legal"):
            slave.order(body)
    assert slave.shard.versions.open_pushes == ()
    assert slave.order(Abort(1, "poisoned")) == Done()
    assert slave.shard.poison is None
    assert slave.shard.versions.used_bytes == 2 * 28


def test_a_full_disk_is_found_before_anything_is_computed() -> None:
    """Apply reserves the snapshot's room first; without room it changes nothing and is legal again (why.md 21)."""
    slave = Slave().ready()
    slave.fold(P1, 0.5)
    before, slave.disk.full = slave.shard.versions.holders(), True
    with pytest.raises(FailedDisk, match=r"has no room for the snapshot of v1@r1.*no space left"):
        slave.order(Apply(1, V1, 1.0, 1.0, 0.0))
    assert slave.shard.versions.holders() == before
    assert slave.order(Apply(1, V1, 1.0, 1.0, 0.0, reserve=False)) == Prepared(V1)
    slave.order(Commit(V1, (), 1.0))
    assert slave.shard.versions.memory == V1


def test_a_failed_persist_leaves_what_is_prepared() -> None:
    """A disk that fails while it writes costs the snapshot; the master decides whether the version goes with it."""
    slave = Slave().ready()
    version = slave.prepare(persist=False)
    slave.disk.error = OSError(5, "Input/output error")
    with pytest.raises(FailedDisk, match=r"cannot write the snapshot of v1@r1.*Input/output"):
        slave.order(Persist(version))
    slave.order(Commit(version, (), 1.0))
    assert slave.order(Persist(version)) == Persisted(version, "digest of v1@r1")


def test_what_is_written_beside_is_not_taken_away() -> None:
    """While the served version's snapshot is being written, pushes go on; Apply and Load wait (protocol.md 2)."""
    slave = Slave().ready()
    first = slave.prepare(persist=False)
    slave.order(Commit(first, (), 1.0))
    order = slave.made(Persist(first))
    write = slave.shard.begin_persist(order)
    assert callable(write)
    slave.fold(P2, 0.25, round_=2)
    second = VersionId(2, 2)
    with pytest.raises(Busy, match=r"Apply of v2@r2 waits: the snapshot of v1@r1 is being written"):
        slave.order(Apply(2, second, 1.0, 1.0, 0.0))
    assert slave.shard.follow(LoadVersion(GENESIS)) is False
    assert "Load of v0@r0 waits" in slave.shard.reason
    answer = slave.shard.end_persist(order, write())
    assert answer == Persisted(first, "digest of v1@r1")
    assert (slave.shard.begin_persist(order), slave.disk.writes) == (answer, 1)
    assert slave.order(Apply(2, second, 1.0, 1.0, 0.0)) == Prepared(second)


def test_a_snapshot_that_failed_beside_holds_nobody_up() -> None:
    """After a writer that failed the next Apply is legal, and a later Persist is a new one."""
    slave = Slave().ready()
    first = slave.prepare(persist=False)
    slave.order(Commit(first, (), 1.0))
    slave.disk.error = OSError(28, "No space left on device")
    order = slave.made(Persist(first))
    write = slave.shard.begin_persist(order)
    assert callable(write)
    with pytest.raises(FailedDisk, match="No space left"):
        write()
    assert slave.shard.end_persist(order, None) is None
    assert slave.order(Persist(first)) == Persisted(first, "digest of v1@r1")
    slave.prepare(P2, 2)


def test_the_end_of_an_old_masters_writer_is_not_remembered() -> None:
    """Its number may be given again by the next master (invariant 5)."""
    slave = Slave().ready()
    first = slave.prepare(persist=False)
    slave.order(Commit(first, (), 1.0))
    order = slave.made(Persist(first))
    write = slave.shard.begin_persist(order)
    assert callable(write)
    slave.welcome(Hold(), term=2)
    slave.shard.end_persist(order, write())
    slave.term, slave.number = 2, order.number - 1
    assert slave.order(Ping()) == Done()


def test_room_is_given_back_with_the_round() -> None:
    """What was reserved for a version that never came to be is free again; for one that is served it waits."""
    slave = Slave().ready()
    version = slave.prepare(persist=False)
    assert slave.disk.reserved == {version: 2 * 4 * slave.shard.versions.numel}
    slave.order(Abort(1, "a slave was lost"))
    assert slave.disk.reserved == {}
    second = slave.prepare(P2, 2, persist=False)
    slave.order(Commit(second, (), 1.0))
    assert list(slave.disk.reserved) == [second]
    slave.prepare(P3, 3, persist=False)
    assert list(slave.disk.reserved) == [VersionId(2, 3)]


def test_abort_keeps_what_was_not_folded() -> None:
    """A staged and a moving push survive the round's end; they are measured anew in the next."""
    slave = Slave(slots=2).ready()
    slave.fold(P1, 0.5)
    slave.stage(P2, 0.25)
    slave.order(Measure(1, P2, GENESIS))
    slave.order(OpenPush(PushId("y", 1, 1), (0,), 1.0))
    slave.order(Abort(1, "skipped"))
    assert slave.shard.versions.open_pushes == (P2, PushId("y", 1, 1))
    with pytest.raises(LocalProtocolError, match="was not measured in round 2"):
        slave.order(Fold(2, P2, 1.0))
    slave.order(Measure(2, P2, GENESIS))
    assert slave.order(Fold(2, P2, 1.0)) == Folded(7 * 0.75**2)


def test_a_later_round_presumes_the_earlier_aborted() -> None:
    """If the Abort got lost, the first order of the next round drops what the earlier one had folded (invariant 4)."""
    slave = Slave().ready()
    slave.fold(P1, 0.5, round_=1)
    slave.fold(P2, 0.25, round_=2)
    slave.order(Apply(2, VersionId(1, 2), 1.0, 1.0, 0.0))
    np.testing.assert_array_equal(slave.shard.versions.theta(VersionId(1, 2))[2], [0.25])


def test_a_slave_in_doubt_enters_no_round() -> None:
    """With a prepared version neither committed nor aborted, no other round begins; it is kept (why.md 1)."""
    slave = Slave().ready()
    version = slave.prepare()
    slave.stage(P2, 0.5)
    with pytest.raises(LocalProtocolError, match="neither committed nor aborted"):
        slave.order(Measure(2, P2, GENESIS))
    assert slave.shard.versions.prepared == version


def test_abort_of_a_committed_round_is_an_assertion() -> None:
    """A round with a row is never aborted; a late Abort of an earlier round changes nothing."""
    slave = Slave().ready()
    slave.order(Commit(slave.prepare(P1, 2), (), 1.0))
    with pytest.raises(LocalProtocolError, match="committed as v1@r2"):
        slave.order(Abort(2, ""))
    slave.fold(P2, 0.5, round_=3)
    slave.order(Abort(1, "late"))
    assert slave.shard.versions.folded


def test_commit_of_a_version_already_served_is_harmless() -> None:
    """A Commit that is sent again under a new number opens what is missing and changes nothing else."""
    slave = Slave().ready()
    version = slave.prepare()
    slave.order(Commit(version, (PULL,), 1.0))
    assert slave.order(Commit(version, (PULL, PullId("y", 1, 1)), 1.0)) == Done()
    assert sorted(slave.flow.pulls) == [PULL, PullId("y", 1, 1)]


def test_apply_waits_for_a_reader() -> None:
    """Busy for Apply poisons nothing: the same order succeeds when the old reader is done."""
    slave = Slave(slots=1, pinned=0).ready()
    slave.order(OpenPull(PULL, GENESIS, 60.0))
    slave.order(Commit(slave.prepare(P1, 1), (), 1.0))
    slave.fold(P2, 0.25, round_=2)
    slave.order(OpenPush(P3, (0,), 60.0))
    order = slave.made(Apply(2, VersionId(2, 2), 1.0, 1.0, 0.0))
    with pytest.raises(Busy):
        slave.shard.execute(order)
    assert slave.shard.poison is None
    slave.shard.released(PULL, "done")
    assert slave.shard.execute(order) == Prepared(VersionId(2, 2))


def test_apply_moves_slow_readers_to_the_snapshot_file() -> None:
    """A version too many in memory gives its bank up to θ′: its readers read the same bytes from its file (why.md 19).

    The bank is free when the flow says that nothing of it is in flight, not before (guards invariant 11).
    """
    slave = Slave(slots=1, pinned=0).ready()
    slave.order(Commit(slave.prepare(P1, 1), (), 1.0))
    slave.order(OpenPull(PULL, V1, 60.0))
    held = {i: a.tobytes() for i, a in slave.flow.pulls[PULL].items()}
    slave.order(Commit(slave.prepare(P2, 2), (), 1.0))
    assert slave.flow.moving == [PULL]
    assert {i: a.tobytes() for i, a in slave.flow.pulls[PULL].items()} == held
    slave.fold(P3, 0.25, round_=3)
    order = slave.made(Apply(3, VersionId(3, 3), 1.0, 1.0, 0.0))
    slave.order(OpenPush(PushId("y", 1, 1), (0,), 60.0))
    with pytest.raises(Busy, match="older θ v1@r1"):
        slave.shard.execute(order)
    slave.shard.moved(PULL)
    assert slave.shard.execute(order) == Prepared(VersionId(3, 3))
    assert slave.shard.versions.pins == {PULL: V1}
    assert slave.flow.moving == [PULL]


def test_reorder_reaches_a_push_that_moves_and_nothing_else() -> None:
    """Legal any time; a push that is staged, dropped or unknown has nothing to be ordered."""
    slave = Slave().ready()
    slave.order(OpenPush(P1, (0,), 60.0))
    assert slave.order(Reorder(P1, (3,))) == Done()
    assert slave.order(Reorder(P1, (1,))) == Done()
    assert slave.order(Reorder(P2, (2,))) == Done()
    assert slave.flow.places == {P1: (1,)}
    slave.shard.staged(P1, 28)
    slave.order(Reorder(P1, (7,)))
    assert slave.flow.places == {P1: (1,)}


def test_one_older_version_stays_in_memory() -> None:
    """With one pinned, the oldest of two older versions is moved and the newer one keeps its bank."""
    slave = Slave(pinned=1).ready()
    slave.order(Commit(slave.prepare(P1, 1), (PULL,), 1.0))
    slave.order(Commit(slave.prepare(P2, 2), (PullId("y", 1, 1),), 1.0))
    assert slave.flow.moving == []
    slave.order(Commit(slave.prepare(P3, 3), (), 1.0))
    assert slave.flow.moving == [PULL]
    assert slave.shard.versions.older == (VersionId(2, 2),)


def test_a_version_without_a_file_keeps_its_bank_and_the_next_one_moves() -> None:
    """v0@r0 was never written, so its reader stays; the younger version is moved in its place."""
    slave = Slave(pinned=1).ready()
    slave.order(OpenPull(PullId("z", 1, 1), GENESIS, 60.0))
    slave.order(Commit(slave.prepare(P1, 1), (PULL,), 1.0))
    slave.order(Commit(slave.prepare(P2, 2), (), 1.0))
    assert slave.flow.moving == [PULL]
    slave.shard.moved(PULL)
    assert slave.shard.versions.pins == {PULL: V1, PullId("z", 1, 1): GENESIS}


def test_a_late_reader_of_an_older_version_is_served_from_its_file() -> None:
    """An OpenPull that a flip overtook costs no bank; a version that is prepared and not committed is never served."""
    slave = Slave().ready()
    slave.order(Commit(slave.prepare(P1, 1), (), 1.0))
    slave.order(Commit(slave.prepare(P2, 2), (), 1.0))
    used = slave.shard.versions.used_bytes
    slave.order(OpenPull(PULL, V1, 60.0))
    assert slave.shard.versions.used_bytes == used
    assert slave.shard.versions.pins == {PULL: V1}
    prepared = slave.prepare(P3, 3)
    with pytest.raises(StaleVersion):
        slave.order(OpenPull(PullId("y", 1, 1), prepared, 60.0))
    slave.shard.released(PULL, "done")
    assert slave.shard.versions.pins == {}


# ---- pulls and healing -----------------------------------------------------------------------------------------------


def test_a_pin_ends_when_the_flow_says_released() -> None:
    """ClosePull alone unpins nothing: libzmq may still read (guards invariant 11, why.md 8)."""
    slave = Slave().ready()
    slave.order(OpenPull(PULL, GENESIS, 60.0))
    slave.order(ClosePull(PULL))
    assert slave.shard.versions.pins == {PULL: GENESIS}
    slave.shard.released(PULL, "closed")
    assert slave.shard.versions.pins == {}
    with pytest.raises(StalePush):
        slave.order(OpenPull(PULL, GENESIS, 60.0))


def test_heal_drops_what_the_master_does_not_list() -> None:
    """Only what an order up to as_of opened is dropped; what a later order opened stays (why.md 13)."""
    slave = Slave(slots=2).ready()
    slave.stage(P1, 0.5)
    slave.order(OpenPull(PULL, GENESIS, 60.0))
    as_of = slave.number
    slave.order(OpenPush(PushId("y", 1, 1), (0,), 1.0))
    assert slave.shard.heal(SlaveHeartbeatAnswer(1, 10.0, False, as_of, (P1,), (PULL,))) == []
    assert slave.shard.heal(SlaveHeartbeatAnswer(1, 10.0, True, as_of, (), ())) == []
    assert slave.shard.heal(SlaveHeartbeatAnswer(1, 10.0, False, as_of, (), ())) == ["x/1#1", "x/1^1"]
    assert slave.shard.versions.open_pushes == (PushId("y", 1, 1),)
    assert slave.flow.closing == [PULL]
    with pytest.raises(StalePush):
        slave.order(OpenPush(P1, (0,), 1.0))


def test_heal_by_a_new_master_drops_what_the_old_one_opened() -> None:
    """A new term knows none of the old term's transfers unless it lists them; an old term's answer is ignored."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    slave.welcome(Hold(), term=2)
    assert slave.shard.heal(SlaveHeartbeatAnswer(1, 10.0, False, 99, (), ())) == []
    assert slave.shard.heal(SlaveHeartbeatAnswer(2, 10.0, False, 0, (), ())) == ["x/1#1"]


# ---- registration ----------------------------------------------------------------------------------------------------


def test_registration_says_what_is_held() -> None:
    """A slave in doubt names memory, prepared and its snapshots, so that the master can decide by its row."""
    slave = Slave().ready()
    version = slave.prepare()
    said = slave.shard.registration(3, "nonce", "run", "h:1", ("h:2",))
    assert (said.memory, said.prepared, said.complete) == (GENESIS, version, (version,))
    assert (said.req, said.slave, said.term_seen, said.slots, said.reason) == (3, "s", 1, 2, "")


@pytest.mark.parametrize(
    ("order", "memory"), [(CommitVersion(V1), V1), (LoadVersion(V1), V1), (AbortVersion(V1), GENESIS)]
)
def test_a_slave_in_doubt_is_told(order: CommitVersion | LoadVersion | AbortVersion, memory: VersionId) -> None:
    """Commit flips to what was prepared, Abort drops it; either way nothing is prepared afterwards."""
    slave = Slave().ready()
    slave.prepare()
    assert slave.shard.follow(order) is False
    assert (slave.shard.versions.memory, slave.shard.versions.prepared) == (memory, None)
    assert slave.shard.reason == ""


def test_a_restarted_slave_loads_the_head_from_disk() -> None:
    """A new process has nothing until it is told; then it holds the bytes that were persisted (guards 3 and 7)."""
    old = Slave().ready()
    version = old.prepare()
    old.order(Commit(version, (), 1.0))
    new = Slave(disk=old.disk)
    new.welcome(LoadVersion(version))
    with pytest.raises(StaleVersion):
        new.order(OpenPush(P1, (0,), 1.0))
    new.shard.follow(LoadVersion(version))
    for read in (Versions.theta, Versions.momentum):
        for layer in (0, 2):
            assert (
                read(new.shard.versions, version)[layer].tobytes() == read(old.shard.versions, version)[layer].tobytes()
            )


def test_a_load_that_fails_is_told_with_the_next_register() -> None:
    """A corrupt snapshot leaves what was held; the reason names the order, and a success clears it."""
    slave = Slave().ready()
    slave.disk.error = CorruptSnapshot("v4@r9/model.safetensors: expected xxh3-128 ..")
    assert slave.shard.follow(LoadVersion(VersionId(4, 9))) is False
    assert slave.shard.reason.startswith("LoadVersion v4@r9: v4@r9/model.safetensors")
    assert slave.shard.versions.memory == GENESIS
    assert slave.shard.follow(RegisterLater(1.0, "not now")) is False
    assert slave.shard.reason
    assert slave.shard.follow(Hold()) is True
    assert slave.shard.reason == ""


def test_a_rollback_drops_pushes_and_closes_pulls() -> None:
    """Loading another version drops the round, every push and every pull; a reader keeps its bytes until released."""
    slave = Slave().ready()
    first = slave.prepare(P1, 1)
    slave.order(Commit(first, (), 1.0))
    second = slave.prepare(P2, 2)
    slave.order(Commit(second, (PULL,), 1.0))
    slave.stage(P3, 0.5)
    source = slave.flow.pulls[PULL]
    copy = source[0].copy()
    slave.shard.follow(LoadVersion(first))
    assert slave.shard.versions.memory == first
    assert slave.shard.versions.open_pushes == ()
    assert slave.flow.closing == [PULL]
    np.testing.assert_array_equal(source[0], copy)
    slave.shard.released(PULL, "closed")
    assert slave.shard.versions.used_bytes == 2 * 28


def test_another_incarnation_restarts_the_flow() -> None:
    """A changed incarnation drops all transfers and serves streams of the new one; the same one changes nothing."""
    slave = Slave().ready()
    slave.stage(P1, 0.5)
    slave.welcome(Hold())
    assert slave.shard.versions.open_pushes == (P1,)
    slave.welcome(Hold(), sinc=8)
    assert slave.flow.lives == [7, 8]
    assert slave.shard.versions.open_pushes == ()


def test_an_answer_of_an_old_master_is_refused() -> None:
    """Registered of a term below the highest seen changes nothing."""
    slave = Slave().ready()
    slave.welcome(Hold(), term=5)
    with pytest.raises(StaleTerm):
        slave.welcome(Hold(), term=4, sinc=9)
    assert (slave.shard.term, slave.shard.sinc) == (5, 7)
