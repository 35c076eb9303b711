"""Transfers of all ranks' pieces to or from all slaves, over data links with delays, breaks and losses.

A transfer is ranks × slaves streams. Its owner may end it, stop it, or lose ranks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from dips.ids import PullId, PushId
from dips.protocol.effects import Grant
from dips.protocol.manifest import Manifest
from dips.sim.data_links import DataLinks, Flows
from dips.sim.fiber import Gate
from dips.sim.heap import Heap
from dips.sim.streams import HeldVersion, Meter, Pulled, PullStream, PushStream, SimTransfer, Spell


class DataNetwork(DataLinks):
    """The data links, and the transfers on them."""

    def __init__(
        self,
        heap: Heap,
        rng: Random,
        flows: Flows,
        run: str,
        manifest: Manifest,
        slowness: Mapping[str, float],
        stall_s: float,
    ) -> None:
        super().__init__(heap, rng, flows, run, manifest, slowness, stall_s)
        self.meters: dict[str, list[Meter]] = {}  # transfers of each cluster, in order

    def begin_push(
        self,
        push: PushId,
        grant: Grant,
        spell: Spell,
        keys: tuple[str, ...],
        gate: Gate,
        fragments: int,
        done: Callable[[bool], None],
    ) -> SimTransfer:
        """Move all ranks' pieces to all slaves; `done` gets whether every stream received DONE."""
        moving = self._new_transfer(push.cluster, gate, fragments)
        ended: list[bool] = []

        def one_ended(ok: bool) -> None:
            ended.append(ok)
            if len(ended) == len(keys) * len(grant.slaves):
                moving.meter.ended = self.heap.now
                done(all(ended))

        wrong = self.rng.random() < self.links.refused_share
        for address in grant.slaves:
            for rank, key in enumerate(keys):
                stream = PushStream(self, moving, push, grant, address, rank, len(keys), key, spell, one_ended)
                if wrong and stream.pieces:  # one rank lists a piece twice
                    stream.pieces, wrong = stream.pieces + stream.pieces[:1], False
                stream.begin_epoch()
        return moving

    def begin_pull(
        self,
        pull: PullId,
        grant: Grant,
        keys: tuple[str, ...],
        gate: Gate,
        held: HeldVersion | None,
        fragments: int,
        done: Callable[[list[Pulled]], None],
    ) -> SimTransfer:
        """Send every rank its own pieces from all slaves; `done` gets the received data of each rank."""
        moving = self._new_transfer(pull.cluster, gate, fragments)
        landed = [Pulled(rank) for rank in range(len(keys))]
        left = [len(keys) * len(grant.slaves)]

        def one_ended() -> None:
            left[0] -= 1
            if left[0] == 0:
                moving.meter.ended = self.heap.now
                done(landed)

        for address in grant.slaves:
            for rank, key in enumerate(keys):
                PullStream(
                    self, moving, pull, grant, address, landed[rank], len(keys), key, one_ended, held
                ).begin_epoch()
        return moving

    def _new_transfer(self, cluster: str, gate: Gate, fragments: int) -> SimTransfer:
        meter = Meter(self.heap.now, 0, self.layout.nbytes)
        self.meters.setdefault(cluster, []).append(meter)
        return SimTransfer(cluster, meter, gate, fragments)
