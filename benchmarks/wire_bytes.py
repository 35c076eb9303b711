"""One round of one cluster through a slave's real data flow, and every byte that its connection carries, both ways.

A push (HELLO to DONE), fold, apply, flip and a pull from the version before; TCP's payload is counted in between, so
frames, messages and handshakes are in it. One rank, one lane, one slave, in this process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from dips.client.rank.feedback import Feedback
from dips.client.rank.transfer import TransferIdentity, pull_pieces, push_pieces
from dips.codecs import PULL_CODECS, Codec
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import kernels
from dips.outer.kernel_pool import KernelPool
from dips.outer.pool import Arrays
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.slave.ports import FlowEvent, PushOver, Staged
from dips.wire.chunks import Piece

RUN, SLAVE, CLUSTER = "bytes", "s0", "west"
WAIT_S = 60.0
READ_BYTES = 1 << 18
FIRST, SECOND = VersionId(1, 1), VersionId(2, 2)


class ByteCounter:
    """A TCP port before another one; `nbytes` is all that it has passed on."""

    def __init__(self, behind: str) -> None:
        host, port = behind.rsplit(":", 1)
        self._behind, self._lock, self.nbytes = (host, int(port)), threading.Lock(), 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._door.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(self._behind)
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(a, b), daemon=True).start()

    def _pass_on(self, a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while got := a.recv(READ_BYTES):
                b.sendall(got)
                with self._lock:
                    self.nbytes += len(got)
        with suppress(OSError):
            b.shutdown(socket.SHUT_WR)


class StagedEvents:
    """Waits for a push to be whole."""

    def __init__(self) -> None:
        self.staged = threading.Event()

    def on_event(self, event: FlowEvent) -> None:
        if isinstance(event, PushOver):
            raise RuntimeError(f"{event.push}: {event.reason}")
        if isinstance(event, Staged):
            self.staged.set()


class CountedRounds:
    """A cluster of one rank and its slave."""

    def __init__(self, flow: ZmqFlow, door: ByteCounter, numel: int, codec: Codec, pull_codec: Codec) -> None:
        self._flow, self._door, self._codec = flow, door, codec
        self._events = StagedEvents()
        manifest = Manifest((Layer("model", (Parameter("model.w", (numel,)),)),))
        flow.set_layers(manifest, (0,))
        flow.start(1, self._events.on_event)
        self.versions = Versions(KernelPool(kernels), 1, 1, pull_codec)
        self.versions.allocate_banks({0: numel})
        _begin(*self.versions.begin_load(GENESIS))
        self.versions.end_load(filled=True)
        self.host = np.zeros(numel, np.float32)
        self._pieces = [Piece(0, 0, 0, numel, self.host)]
        self._feedback = Feedback(self._pieces)
        self._seq = 0

    def pull(self, version: VersionId) -> int:
        """Bring a version; return the bytes that it took."""
        self._seq, before = self._seq + 1, self._door.nbytes
        pull, held = PullId(CLUSTER, 1, self._seq), self._feedback.restore_base()
        source = self.versions.held.pin_version(pull, version)
        self._flow.open_pull(pull, version, source, self.versions.pin_updates(pull, version))
        pull_pieces(self._grant(version), self._name(), self._pieces, held=held)
        self._flow.close_pull(pull)
        self.versions.unpin_version(pull)
        assert self.host.tobytes() == self.versions.theta(version)[0].tobytes(), "it is not the version"
        self._feedback.set_base(version)
        return self._door.nbytes - before

    def push(self, version: VersionId, base: VersionId) -> int:
        """Push some change of `base`, and make `version` of it; return the bytes that the push took."""
        self._seq, before = self._seq + 1, self._door.nbytes
        push = PushId(CLUSTER, 1, self._seq)
        self.host += 1e-3 * np.random.default_rng(self._seq).standard_normal(self.host.size, np.float32)
        self._feedback.freeze_push(self._seq, self._codec)
        slot = self.versions.open_slot(push, base if self._codec.lossy else None)
        self._events.staged.clear()
        self._flow.open_push(push, (0,), slot, WAIT_S, self._codec)
        push_pieces(self._grant(base, self._codec), self._name(), self._pieces, encode=self._feedback.encode_chunk)
        assert self._events.staged.wait(WAIT_S), "the push was not staged"
        self._flow.drop_push(push)
        self.versions.fold_push(push, 1.0)
        self.versions.prepare_version(version, nesterov_step(1.0, 0.7, 0.8))
        self.versions.flip_version(version)
        return self._door.nbytes - before

    def _grant(self, version: VersionId, codec: Codec = Codec.FP32) -> Grant:
        there = (SlaveAddress(SLAVE, 1, (self._door.address,), (0,)),)
        return Grant(version, there, WAIT_S, codec, version if codec.lossy else None)

    def _name(self) -> TransferIdentity:
        return TransferIdentity(RUN, CLUSTER, 1, self._seq, 0)


def _begin(theta: Arrays, momentum: Arrays) -> None:
    theta[0][:] = np.random.default_rng(1).standard_normal(theta[0].size, np.float32)
    momentum[0].fill(0)


@contextmanager
def _rounds(codec: Codec, pull_codec: Codec, numel: int) -> Iterator[CountedRounds]:
    flow = ZmqFlow(RUN, SLAVE, ("127.0.0.1:0",), 1 << 20, 64 << 20, 2, WAIT_S)
    door = ByteCounter(flow.lane_addresses()[0])
    try:
        yield CountedRounds(flow, door, numel, codec, pull_codec)
    finally:
        flow.close()
        door.close()


def bytes_of_round(codec: Codec, pull_codec: Codec, numel: int) -> tuple[float, float]:
    """Bytes per parameter of a push and of the pull after it, when the cluster holds the version before."""
    with _rounds(codec, pull_codec, numel) as rounds:
        rounds.pull(GENESIS)
        rounds.push(FIRST, GENESIS)
        rounds.pull(FIRST)
        pushed = rounds.push(SECOND, FIRST)
        return pushed / numel, rounds.pull(SECOND) / numel


if __name__ == "__main__":
    for codec in Codec:
        pull = codec if codec in PULL_CODECS else Codec.INT8
        print(codec, pull, bytes_of_round(codec, pull, 4 << 20))
