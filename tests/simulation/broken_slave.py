"""Rules of the slaves, broken from outside: each function returns what stands where (sabotage.py)."""

from __future__ import annotations

from typing import Any

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Apply, Fold, Order, Registered
from dips.protocol.events import Answer, Folded
from dips.sim.disk import SimDisk
from dips.sim.flow import OpenedPush, SimFlow
from dips.slave import moving
from dips.slave.fences import Fences
from dips.slave.ports import Arrays
from dips.slave.shard import Shard

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


def flip_on_prepared() -> list[Patch]:
    honest = Shard._apply

    def apply(self: Shard, order: Apply, opened: tuple[int, int]) -> Answer:
        answer = honest(self, order, opened)
        self._flip(order.version)
        return answer

    return [(Shard, "_apply", apply)]


def refold_on_retry() -> list[Patch]:
    honest_admit, honest_fold = Fences.admit, Shard._fold
    kept: dict[tuple[int, PushId], Any] = {}

    def admit(self: Fences, order: Order) -> Answer | None:
        remembered = honest_admit(self, order)
        return None if isinstance(order.body, Fold) else remembered

    def fold(self: Shard, order: Fold, opened: tuple[int, int]) -> Answer:
        key = (id(self), order.push)
        if key not in kept:
            arrays = self.versions._open[order.push].arrays if order.push in self.versions._open else {}
            kept[key] = {layer: a.copy() for layer, a in arrays.items()}
            return honest_fold(self, order, opened)
        acc, memory = self.versions._acc, self.versions.memory
        if acc is None or memory is None:
            return honest_fold(self, order, opened)
        theta = self.versions.theta(memory)
        for layer, theta_j in kept[key].items():
            acc.arrays[layer] += order.weight * (theta[layer] - theta_j)
        return Folded(1.0)

    return [(Fences, "admit", admit), (Shard, "_fold", fold)]


def unpin_at_send() -> list[Patch]:
    honest = SimFlow.open_pull

    def open_pull(self: SimFlow, pull: PullId, version: VersionId, source: Arrays, deadline_s: float) -> None:
        honest(self, pull, version, source, deadline_s)
        self._later(0.0, f"{pull} is sent", lambda: self._said().released(pull, "sent"))

    return [(SimFlow, "open_pull", open_pull)]


def free_at_move() -> list[Patch]:
    honest = SimFlow.move_pull

    def move_pull(self: SimFlow, pull: PullId, source: Arrays) -> None:
        honest(self, pull, source)
        self._later(0.0, f"{pull} moves", lambda: self._said().moved(pull))

    return [(SimFlow, "move_pull", move_pull)]


def keep_local() -> list[Patch]:
    honest = SimDisk.write

    def write(self: SimDisk, version: VersionId, theta: Arrays, momentum: Arrays) -> str:
        self.delete(self.complete())
        return honest(self, version, theta, momentum)

    return [(SimDisk, "write", write)]


def accept_old_stream() -> list[Patch]:
    def drop_push(self: SimFlow, push: PushId) -> None:
        """What was opened stays open to late chunks."""

    def admits(self: SimFlow, opened: OpenedPush, rank: int, sinc: int, epoch: int, number: int) -> bool:
        return True

    return [(SimFlow, "drop_push", drop_push), (SimFlow, "admits", admits)]


def offers_without_ledger() -> list[Patch]:
    honest = Shard.welcome

    def welcome(self: Shard, registered: Registered) -> None:
        honest(self, registered)
        complete = self._disk.complete()
        if self.versions.memory is None and complete:
            newest = max(complete)
            self.versions.load(newest, lambda theta, momentum: self._disk.read(newest, theta, momentum))

    return [(Shard, "welcome", welcome)]


def leak_slot() -> list[Patch]:
    def refuse_closed(closed: moving.Closed, transfer: PushId | PullId) -> None:
        """No tombstone."""

    def heal(self: moving.Moving, live_pushes: Any, live_pulls: Any, as_of: moving.Opened) -> list[str]:
        return []

    return [(moving, "_refuse_closed", refuse_closed), (moving.Moving, "heal", heal)]
