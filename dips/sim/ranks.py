"""The state of a simulated trainer's ranks: θ in shards, the last installed version, and the error feedback of lossy
pushes.

The content that a push must leave in the slaves' slots is computed here from the ranks' state, not from the transferred
bytes: the invariants compare the two.
"""

from __future__ import annotations

import numpy as np

from dips.client.ipc.messages import PullNow, PushNow
from dips.client.rank.feedback import Feedback
from dips.ids import VersionId
from dips.sim.pieces import pieces_of
from dips.sim.pull_stream import HeldVersion, Pulled
from dips.slave.ports import F32
from dips.transport.shares import Piece
from dips.wire import bodies
from dips.wire.chunks import LayerLayout, Range, split_chunks
from dips.wire.frame import Buffer

Arrays = dict[int, F32]  # flat layers by number


class SimRanks:
    """The model as held by `ranks` processes together."""

    def __init__(self, layout: LayerLayout, ranks: int, chunk_bytes: int, lossy: bool, updates: bool = False) -> None:
        self.layout, self.sizes, self.ranks = layout, layout.numel, ranks
        self._pieces = [pieces_of(layout, self.sizes, rank, ranks) for rank in range(ranks)]
        self._updates, self._chunk_bytes = updates, chunk_bytes
        self.theta: Arrays = {}
        self.held: list[VersionId | None] = [None] * ranks  # the version that each rank installed last
        self.base: VersionId | None = None  # the version that all of them installed last
        self.received: Arrays = {}  # θ of `base` as it was pulled
        self._pushed: Arrays = {}  # θ as the last push froze it
        self._host: Arrays = {layer: np.zeros(n, np.float32) for layer, n in self.sizes.items()}
        self._feedback = [self._feedback_of(rank) for rank in range(ranks)] if lossy else []

    def on_verdict(self, verdict: PushNow | PullNow) -> None:
        """Settle the error feedback of the last push, before a transfer."""
        for feedback in self._feedback:
            feedback.settle_last_push(verdict.inc, verdict.accepted)

    def freeze_push(self, theta: Arrays, verdict: PushNow) -> tuple[dict[tuple[int, Range], Buffer], Arrays]:
        """Return every chunk's body by (rank, chunk), and the content of the slots when all have arrived.

        `theta` is the pushed model: the ranks' own, unless a fault is simulated.
        """
        self._pushed = {layer: a.copy() for layer, a in self.theta.items()}
        grant = verdict.grant
        codec = grant.codec
        for layer, a in theta.items():
            self._host[layer][:] = a
        self.on_verdict(verdict)
        for feedback in self._feedback:
            assert not codec.lossy or feedback.has_base(grant.base), f"{self.base} is not {grant.base}"
            feedback.freeze_push(verdict.seq, codec)
        start = self.received if codec.lossy else {layer: np.zeros_like(a) for layer, a in theta.items()}
        content = {layer: a.copy() for layer, a in start.items()}
        sent: dict[tuple[int, Range], Buffer] = {}
        for rank, chunk in self._list_chunks():
            where = slice(*self.layout.place_range(chunk))
            values = self._host[chunk.layer][where]
            body: Buffer = bodies.encode(codec, values) if not codec.lossy else b""
            if self._feedback:
                body = self._feedback[rank].encode_chunk(chunk, values.view(np.uint8).data)
            sent[rank, chunk] = bytes(body)
            bodies.put(codec, body, content[chunk.layer][where])
        return sent, content

    def install_pull(self, landed: list[Pulled], version: VersionId, merge: bool) -> bool:
        """Copy the pulled pieces on every rank that the all-reduce allows; return True if any did.

        `merge`: keep the training since the push was frozen: θ ← θ_version + (θ − θ_pushed).
        """
        allowed = self.agree_on_version(landed)
        if allowed and not self.theta:
            self.theta = {layer: np.zeros(size, np.float32) for layer, size in self.sizes.items()}
        for pulled in allowed:
            for layer, where, values in pulled.pieces:
                self._host[layer][where] = values
                theta = self.theta[layer][where]
                theta[:] = values + (theta - self._pushed[layer][where]) if merge else values
            self.held[pulled.rank] = pulled.versions[0] if pulled.versions else version
        if len(allowed) == self.ranks:
            self.base = version
            self.received = {layer: a.copy() for layer, a in self._host.items()}
            for feedback in self._feedback:
                feedback.set_base(version)
        return bool(allowed)

    def held_version(self) -> HeldVersion | None:
        """Return the version to which a pull's updates may be added, held by all ranks; None if there is none."""
        return HeldVersion(self.base, self.received) if self._updates and self.base is not None else None

    def is_finite(self) -> bool:
        """Return whether the model is finite; one that is not is never pushed, except by a fault that the gate must
        detect.
        """
        return all(bool(np.isfinite(a).all()) for a in self.theta.values())

    def may_merge(self) -> bool:
        """Return whether the training since the push was frozen is finite on all ranks."""
        return all(bool(np.isfinite(a - self._pushed[layer]).all()) for layer, a in self.theta.items())

    @staticmethod
    def agree_on_version(landed: list[Pulled]) -> list[Pulled]:
        """Return the ranks that copy, by the all-reduce (MIN) of (version, whole): all or none."""
        versions = {v for pulled in landed for v in pulled.versions}
        return landed if len(versions) == 1 and all(pulled.whole for pulled in landed) else []

    def _list_chunks(self) -> list[tuple[int, Range]]:
        """Return every chunk that slaves will ask for, by rank."""
        return [
            (rank, chunk) for rank, held in enumerate(self._pieces) for chunk in split_chunks(held, self._chunk_bytes)
        ]

    def _feedback_of(self, rank: int) -> Feedback:
        place = self.layout.place_range
        return Feedback([Piece(*p, self._host[p.layer][slice(*place(p))]) for p in self._pieces[rank]])
