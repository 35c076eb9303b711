"""The one rank of a cluster without training: a whole model in host memory, pushed to and pulled from a lone slave."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Seconds
from benchmarks.lone_slave import LoneSlave
from dips.client import transfer
from dips.client.transfer import Piece
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import ClosePull, DropPush


class Rank:
    """Speaks for every layer of the slave; `pushed` stays as it is, `pulled` is filled by each pull."""

    def __init__(self, slave: LoneSlave) -> None:
        self._slave = slave
        self.pushed = np.random.default_rng(0).standard_normal(slave.manifest.numel, np.float32)
        self.pulled = np.ones_like(self.pushed)

    def _pieces(self, numbers: npt.NDArray[np.float32]) -> list[Piece]:
        size = self._slave.manifest.layers[0].numel
        return [Piece(i, 0, 0, size, numbers[i * size : (i + 1) * size]) for i in range(numbers.size // size)]

    def bring(self, name: PushId) -> Seconds:
        """Push everything into a slot that is opened for it; return the seconds of the transfer alone."""
        grant = self._slave.open_push(name)
        begun = time.perf_counter()
        transfer.push(grant, self._slave.base(name), self._pieces(self.pushed))
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
        """Pull everything; return the seconds of the transfer alone."""
        name = self._slave.next_pull()
        grant = self._slave.open_pull(name, version)
        begun = time.perf_counter()
        transfer.pull(grant, self._slave.base(name), self._pieces(self.pulled))
        took = Seconds(time.perf_counter() - begun)
        self._slave.order(ClosePull(name))
        return took
