"""A shard between a data flow and a disk that record their calls; orders are given by their bodies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from dips.errors import (
    CorruptSnapshot,
    DipsError,
    RemoteProtocolError,
    Stale,
    UnreadSnapshot,
)
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import reference
from dips.outer.kernel_pool import PUSH_DIGESTS, KernelPool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from dips.protocol.effects import (
    Apply,
    Fold,
    Hold,
    KeepSeed,
    LoadVersion,
    Measure,
    OpenPull,
    OpenPush,
    Order,
    OrderBody,
    Persist,
    Registered,
    Retire,
)
from dips.protocol.events import Answer, Done, Prepared
from dips.protocol.heartbeats import Transfer
from dips.protocol.manifest import Manifest
from dips.slave.ports import Arrays, FlowEvent, SlaveIdentity, Staged
from dips.slave.shard import Followed, Shard
from dips.store.version import digest_of
from tests.loading import follow_load

WHO = SlaveIdentity("run", "s", "nonce", "h:1", ("h:2",), "m:1")
MANIFEST = Manifest.from_shapes([("a.0.w", (2, 3)), ("b.w", (4,)), ("c.w", (1,))])
P1, P2, P3 = (PushId("x", 1, seq) for seq in (1, 2, 3))
PULL = PullId("x", 1, 1)
V1 = VersionId(1, 1)


@dataclass
class RecordingFlow:
    """Records its calls; bytes appear when the test writes them into `pushes`."""

    pushes: dict[PushId, Arrays] = field(default_factory=dict)
    codecs: dict[PushId, str] = field(default_factory=dict)
    pulls: dict[PullId, Arrays] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=dict)
    closing: list[PullId] = field(default_factory=list)
    moving: list[PullId] = field(default_factory=list)
    places: dict[PushId, tuple[int, ...]] = field(default_factory=dict)
    lives: list[int] = field(default_factory=list)
    broken: bool = False

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        self.lives.append(sinc)

    def open_push(
        self, push: PushId, order: tuple[int, ...], buffers: Arrays, deadline_s: float, codec: str, keys: object = ()
    ) -> None:
        if self.broken:
            raise RemoteProtocolError("no")
        self.pushes[push], self.codecs[push] = buffers, codec

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        self.places[push] = places

    def drop_push(self, push: PushId) -> None:
        self.pushes.pop(push, None)

    def open_pull(
        self, pull: PullId, version: VersionId, source: Arrays, chain: object = (), keys: object = ()
    ) -> None:
        if self.broken:
            raise RemoteProtocolError("no")
        self.pulls[pull] = source

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        self.pulls[pull] = source
        self.moving.append(pull)

    def close_pull(self, pull: PullId) -> None:
        if self.pulls.pop(pull, None) is not None:
            self.closing.append(pull)

    def admit_probe(self, cluster: str, key: str) -> None:
        self.probes[cluster] = key

    def list_transfers(self) -> tuple[Transfer, ...]:
        return ()


@dataclass
class MemoryDisk:
    """Snapshots in a dictionary; `error` is raised by the next call that touches one."""

    kept: dict[VersionId, tuple[dict[int, bytes], dict[int, bytes]]] = field(default_factory=dict)
    error: Exception | None = None
    full: bool = False
    reserved: dict[VersionId, int] = field(default_factory=dict)
    writes: int = 0
    initial: Mapping[int, bytes] | None = field(default_factory=dict)  # None: it was not brought yet
    unread: set[VersionId] = field(default_factory=set)  # of `kept`

    def complete_versions(self, look_for: Collection[VersionId] = ()) -> tuple[VersionId, ...]:
        self._fail()
        self.unread -= set(look_for)
        return tuple(sorted(self.kept.keys() - self.unread))

    def unread_versions(self) -> tuple[VersionId, ...]:
        self._fail()
        return tuple(sorted(self.unread))

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        if self.full:
            raise OSError(28, "no space left on device")
        self.reserved[version] = nbytes

    def release_room(self, version: VersionId) -> None:
        self.reserved.pop(version, None)

    def write_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]) -> str:
        self._fail()
        self.writes += 1
        if not is_wanted():
            raise Stale(f"{version} is wanted no more")
        self.kept[version] = tuple({i: a.tobytes() for i, a in arrays.items()} for arrays in (theta, momentum))
        return f"digest of {version}"

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        self._fail()
        if version == GENESIS:
            for arrays, value in ((theta, 1.0), (momentum, 0.0)):
                for array in arrays.values():
                    array.fill(value)
            return
        for arrays, kept in zip((theta, momentum), self.kept[version], strict=True):
            for layer, array in arrays.items():
                array[:] = np.frombuffer(kept[layer], np.float32)

    def holds_initial(self) -> bool:
        return self.initial is not None

    def keep_initial(self, theta: Arrays) -> None:
        self._fail()
        self.initial = {i: a.tobytes() for i, a in theta.items()}

    def keep_model(self, version: VersionId, theta: Arrays, digests: tuple[str, ...]) -> tuple[str, VersionId | None]:
        newest = max(self.kept, default=None)
        found = [digest_of(array) for array in theta.values()]
        if found != list(digests):
            raise CorruptSnapshot(f"{version}: expected {digests}, got {found}")
        zeros = {i: np.zeros_like(a) for i, a in theta.items()}
        momentum = {i: np.frombuffer(raw, np.float32) for i, raw in self.kept[newest][1].items()} if newest else zeros
        return self.write_snapshot(version, theta, momentum, lambda: True), newest

    def map_theta(self, version: VersionId) -> Arrays | None:
        kept = self.kept.get(version) if version not in self.unread else None
        return {i: np.frombuffer(raw, np.float32) for i, raw in kept[0].items()} if kept else None

    def map_momentum(self, version: VersionId) -> tuple[Arrays, tuple[str, ...]] | None:
        kept = self.kept.get(version) if version not in self.unread else None
        if not kept:
            return None
        parts = [digest_of(np.frombuffer(part[i], np.float32)) for i in kept[0] for part in kept]
        return {i: np.frombuffer(raw, np.float32) for i, raw in kept[1].items()}, tuple(parts)

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        self._fail()
        for version in versions:
            self.kept.pop(version, None)

    def _fail(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def read_prepared(answer: Answer) -> VersionId:
    """The version that an Apply made, whose digest must be one that every message can carry."""
    assert isinstance(answer, Prepared) and 0 < answer.digest < PUSH_DIGESTS, answer
    return answer.version


def carry_out(shard: Shard, order: Order) -> Answer:
    """Have an order carried out; a snapshot is written, read or deleted here and now."""
    if not isinstance(order.body, Persist | Retire | KeepSeed):
        try:
            return shard.execute_order(order)
        except UnreadSnapshot:
            assert isinstance(order.body, OpenPull)
    begun = shard.begin_disk_order(order)
    if not callable(begun):
        return begun
    try:
        answer = begun()
    except DipsError as error:
        return shard.end_disk_order(order, error)
    return shard.end_disk_order(order, answer)


class ShardRig:
    """A shard with its flow and disk, and a master's hand: `order` numbers and sends."""

    def __init__(
        self,
        slots: int = 2,
        pinned: int = 1,
        disk: MemoryDisk | None = None,
        manifest: Manifest = MANIFEST,
    ) -> None:
        self._manifest = manifest
        self.flow, self.disk = RecordingFlow(), disk or MemoryDisk()
        versions = Versions(KernelPool(reference), slots, pinned)
        self.shard = Shard("s", versions, self.disk, self.flow)
        self.term, self.number = 1, 0

    def ready(self) -> ShardRig:
        self.welcome(LoadVersion(GENESIS))
        assert follow_load(self.shard, GENESIS) is Followed.DONE
        self.welcome(Hold())
        assert self.shard.follow_order(Hold()) is Followed.SERVES
        return self

    def welcome(self, order: object, sinc: int = 7, term: int | None = None) -> None:
        self.shard.on_registered(
            Registered(term or self.term, sinc, order, GENESIS, (0, 2), ("", ""), self._manifest.to_json())  # type: ignore[arg-type]
        )

    def made(self, body: OrderBody, term: int | None = None, sinc: int = 7) -> Order:
        self.number += 1
        return Order("s", sinc, term or self.term, self.number, body, 10.0)

    def order(self, body: OrderBody) -> Answer:
        return carry_out(self.shard, self.made(body))

    def stage(self, push: PushId, value: float) -> None:
        """Open a push, fill it, and say so."""
        assert self.order(OpenPush(push, 1, 60.0)) == Done()
        for array in self.flow.pushes[push].values():
            array.fill(value)
        self.shard.transfers.on_flow_event(Staged(push, 28))

    def fold(self, push: PushId, value: float, round_: int = 1, weight: float = 1.0) -> None:
        self.stage(push, value)
        assert self.shard.versions.served_version is not None
        self.order(Measure(round_, push, self.shard.versions.served_version))
        self.order(Fold(round_, push, weight))

    def prepare(self, push: PushId = P1, round_: int = 1, persist: bool = True) -> VersionId:
        """One push in, up to Persisted, or only to Prepared."""
        self.fold(push, 0.5, round_)
        assert self.shard.versions.served_version is not None
        version = VersionId(self.shard.versions.served_version.version + 1, round_)
        self.order(Apply(round_, version, nesterov_step(1.0, 1.0, 0.0)))
        if persist:
            self.order(Persist(version))
        return version

    def state(self) -> tuple[object, ...]:
        """Everything that an order could change."""
        v = self.shard.versions
        thetas = tuple(a.tobytes() for a in v.theta(v.served_version).values()) if v.served_version else ()
        held = (
            v.served_version,
            v.prepared,
            v.folded,
            v.open_pushes,
            tuple(v.held.pins.items()),
            tuple(v.bank_holders()),
        )
        seen = (self.shard.term, self.shard.sinc, self.shard.rounds.number, self.shard.rounds.poison)
        return (thetas, held, seen, tuple(self.flow.pushes), tuple(self.flow.pulls), tuple(self.disk.kept))
