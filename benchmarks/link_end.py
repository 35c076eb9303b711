"""One end of a shaped link, as a process in its network namespace, driven by lines on its standard input.

python -m benchmarks.link_end slave IP LANES MIB [KEY]   says its lanes' addresses; then [push | pull | end, N];
                                                         with the rank's KEY: encrypted, and says its own one as well
python -m benchmarks.link_end rank ADDRESSES MIB     [push | pull, N], answered with the seconds that it took

The slave's end is the data flow of a `dips-slave` without its control server: plain text leaves loopback only here.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from benchmarks.line_program import print_answer, read_requests
from dips.client.rank import transfer
from dips.client.rank.transfer import Piece, TransferIdentity
from dips.ids import GENESIS, PullId, PushId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.slave.ports import FlowEvent, PushOver, Released, Staged
from dips.transport import seal

RUN, SLAVE, CLUSTER, SINC = "links", "s0", "west", 1
LAYERS, WAIT_S, STALL_S = 4, 120.0, 30.0


def manifest(mib: int) -> Manifest:
    """LAYERS layers of the same size."""
    numel = mib * (1 << 18) // LAYERS
    return Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (numel,)),)) for i in range(LAYERS)))


class LinkEvents:
    """Waits for what the flow reports."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def on_event(self, event: FlowEvent) -> None:
        if isinstance(event, PushOver):
            print(f"refused: {event.reason}", file=sys.stderr, flush=True)
        elif isinstance(event, Staged | Released):
            self._over.set()

    def wait(self) -> None:
        if not self._over.wait(WAIT_S):
            raise TimeoutError(f"nothing was staged or released for {WAIT_S} s")
        self._over.clear()


def slave(model: Manifest, ip: str, lanes: int = 1, *keys: str) -> None:
    """Serve one push or pull after the other."""
    layers, events = tuple(range(len(model.layers))), LinkEvents()
    key = seal.new_keys() if keys else None
    flow = ZmqFlow(RUN, SLAVE, (f"{ip}:0",) * lanes, 1 << 20, 256 << 20, 4, STALL_S, key=key)
    flow.set_layers(model, layers)
    flow.start(SINC, events.on_event)
    source = {i: np.full(layer.numel, 1.5, np.float32) for i, layer in enumerate(model.layers)}
    slot = {i: np.ones_like(array) for i, array in source.items()}
    print_answer(f"{','.join(flow.lane_addresses())} {flow.public_key}".strip())
    last = ""
    for word, number in read_requests():
        push, pull = PushId(CLUSTER, 1, number), PullId(CLUSTER, 1, number)
        if word == "push":
            flow.open_push(push, (0,), slot, WAIT_S, keys=keys)
        elif word == "pull":
            flow.open_pull(pull, GENESIS, source, keys=keys)
        elif last == "push":
            events.wait()
            flow.drop_push(push)
        else:
            flow.close_pull(pull)
            events.wait()
        last = word
        print_answer("ok")
    if flow.refused_frames:
        print(f"refused frames: {dict(flow.refused_frames)}", file=sys.stderr)
    flow.close()


def rank(addresses: str, mib: int) -> None:
    """Push or pull everything, as often as told."""
    model = manifest(mib)
    pieces = [Piece(i, 0, 0, x.numel, np.ones(x.numel, np.float32)) for i, x in enumerate(model.layers)]
    there = SlaveAddress(SLAVE, SINC, tuple(addresses.split(",")), tuple(range(LAYERS)))
    grant = Grant(GENESIS, (there,), WAIT_S)
    print_answer("ok")
    for word, number in read_requests():
        begun = time.perf_counter()
        getattr(transfer, f"{word}_pieces")(grant, TransferIdentity(RUN, CLUSTER, 1, number, 0), pieces)
        print_answer(time.perf_counter() - begun)


if __name__ == "__main__":
    if sys.argv[1] == "slave":
        slave(manifest(int(sys.argv[4])), sys.argv[2], int(sys.argv[3]), *sys.argv[5:])
    else:
        rank(sys.argv[2], int(sys.argv[3]))
