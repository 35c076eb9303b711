"""The one rank of a cluster without training: a whole model in host memory, pushed to and pulled from a lone slave."""

from __future__ import annotations

import itertools
import time

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Seconds
from benchmarks.lone_slave import LoneSlave
from dips.client.rank import transfer
from dips.client.rank.transfer import Piece
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import ClosePull, DropPush

CUT_ITEMS = 1024  # elements between the borders of one first pull and of the next


class BenchRank:
    """Speaks for every layer of the slave; `pushed` stays as it is, `pulled` is filled by each pull."""

    def __init__(self, slave: LoneSlave) -> None:
        self._slave = slave
        self.pushed = np.random.default_rng(0).standard_normal(slave.manifest.numel, np.float32)
        self.pulled = np.ones_like(self.pushed)
        self._cuts = itertools.count(CUT_ITEMS, CUT_ITEMS)

    def _pieces(self, numbers: npt.NDArray[np.float32], cut: int = 0) -> list[Piece]:
        """One piece for each layer, or two with the border at element `cut`."""
        size = self._slave.manifest.layers[0].numel
        spans = [(0, cut), (cut, size)] if cut else [(0, size)]
        return [
            Piece(i, 0, begin, end - begin, numbers[i * size + begin : i * size + end])
            for i in range(numbers.size // size)
            for begin, end in spans
        ]

    def bring(self, name: PushId) -> Seconds:
        """Push everything into a slot that is opened for it; return the seconds of the transfer alone."""
        grant = self._slave.open_push(name)
        begun = time.perf_counter()
        transfer.push_pieces(grant, self._slave.base(name), self._pieces(self.pushed))
        took = Seconds(time.perf_counter() - begun)
        self._slave.await_staged(name)
        return took

    def push(self) -> Seconds:
        """Push everything and have the slot freed; return the seconds of the transfer alone."""
        name = self._slave.next_push()
        took = self.bring(name)
        self._slave.order(DropPush(name, "measured"))
        return took

    def pull(self, version: VersionId = GENESIS) -> Seconds:
        """Pull everything; return the seconds of the transfer alone. From the second on the slave knows checksums."""
        return self._pull(version, self._pieces(self.pulled))

    def pull_first(self, version: VersionId = GENESIS) -> Seconds:
        """Pull everything in chunks whose borders no pull has had: the slave makes each checksum, as for a first."""
        return self._pull(version, self._pieces(self.pulled, next(self._cuts)))

    def _pull(self, version: VersionId, pieces: list[Piece]) -> Seconds:
        name = self._slave.next_pull()
        grant = self._slave.open_pull(name, version)
        begun = time.perf_counter()
        transfer.pull_pieces(grant, self._slave.base(name), pieces)
        took = Seconds(time.perf_counter() - begun)
        self._slave.order(ClosePull(name))
        return took
