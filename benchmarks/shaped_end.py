"""The two ends of a push as they are: a slave's data flow and a rank, each a process in its network namespace.

python -m benchmarks.shaped_end slave CAST NUMBER IP CONCURRENT_STREAMS LANES SECRET     says [addresses, public key]
    ["open", push, places]   a slot for it, its ranks asked by their places;  ["places", push, places]: asked anew
    ["end", push]            once it is staged: its processor time since "open"
python -m benchmarks.shaped_end rank CAST CLUSTER RANK
    ["push", number, slaves, rule]   → [seconds, processor time]; slaves as [addresses, public key]; the rule is the
    slaves' alone: a rank answers whoever asks

CAST as in cast.py; SECRET is "encrypted" or "plain". Plain text leaves loopback only here.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np

from benchmarks.cast import CHUNK_BYTES, RUN, SINC, WAIT_S, Cast
from benchmarks.line_program import print_answer, processor_s, read_requests
from dips.client.rank import transfer
from dips.client.rank.transfer import TransferIdentity
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.slave.flow import ZmqFlow
from dips.slave.ports import FlowEvent, PushOver, Staged
from dips.transport import seal

TRANSIT_BYTES, STALL_S = 256 << 20, 30.0


class ShapedEvents:
    """Waits for what the flow reports."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._staged: set[PushId] = set()

    def on_event(self, event: FlowEvent) -> None:
        if isinstance(event, PushOver):
            print(f"refused: {event.reason}", file=sys.stderr, flush=True)
        elif isinstance(event, Staged):
            with self._changed:
                self._staged.add(event.push)
                self._changed.notify_all()

    def wait(self, push: PushId) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: push in self._staged, WAIT_S):
                raise TimeoutError(f"{push} was not staged within {WAIT_S:g} s")


def slave(cast: Cast, number: int, ip: str, concurrent_streams: int, lanes: int, secret: str) -> None:
    """Serve pushes; several may be open at once."""
    key, layers = seal.new_keys() if secret == "encrypted" else None, cast.held_by(number)
    flow = ZmqFlow(
        RUN, f"s{number}", (f"{ip}:0",) * lanes, CHUNK_BYTES, TRANSIT_BYTES, concurrent_streams, STALL_S, key=key
    )
    flow.set_layers(cast.manifest, layers)
    events = ShapedEvents()
    flow.start(SINC, events.on_event)
    free: list[dict[int, np.ndarray[Any, np.dtype[np.float32]]]] = []
    slots = dict[PushId, dict[int, np.ndarray[Any, np.dtype[np.float32]]]]()
    begun = dict[PushId, float]()
    print_answer([flow.lane_addresses(), flow.public_key])
    for word, (cluster, seq), *more in read_requests():
        push = PushId(cluster, 1, seq)
        if word == "open":
            begun[push] = processor_s()
            size = cast.numel // cast.layers
            slots[push] = free.pop() if free else {i: np.ones(size, np.float32) for i in layers}
            flow.open_push(push, tuple(more[0]), slots[push], WAIT_S, cast.codec, tuple(more[1]))
            print_answer("open")
        elif word == "places":
            flow.reorder_push(push, tuple(more[0]))
            print_answer("places")
        else:
            events.wait(push)
            flow.drop_push(push)
            free.append(slots.pop(push))
            print_answer([processor_s() - begun[push]])
    flow.close()


def rank(cast: Cast, cluster: str, number: int) -> None:
    """Push everything, as often as told."""
    pieces = cast.pieces(number, 1e-3)
    keys = seal.new_keys()
    print_answer(keys.public)
    for _, seq, slaves, _ in read_requests():
        there = tuple(
            SlaveAddress(f"s{i}", SINC, tuple(lanes), cast.held_by(i), key) for i, (lanes, key) in enumerate(slaves)
        )
        grant = Grant(VersionId(seq, seq), there, WAIT_S, cast.codec, GENESIS)
        begun, used = time.perf_counter(), processor_s()
        transfer.push_pieces(grant, TransferIdentity(RUN, cluster, 1, seq, number, keys), pieces)
        print_answer([time.perf_counter() - begun, processor_s() - used])


if __name__ == "__main__":
    role, words = sys.argv[1], sys.argv[3:]
    if role == "slave":
        slave(Cast.parse(sys.argv[2]), int(words[0]), words[1], int(words[2]), int(words[3]), words[4])
    else:
        rank(Cast.parse(sys.argv[2]), words[0], int(words[1]))
