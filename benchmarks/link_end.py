"""The two ends of a link as they are: a slave's data flow and a rank, each a process in its network namespace.

python -m benchmarks.link_end slave CAST NUMBER IP CONCURRENT_STREAMS LANES SECRET     says [addresses, public key]
    ["push", push, places, keys]   a slot for it, its ranks asked by their places;  ["places", push, places]: asked anew
    ["pull", pull, places, keys]   a model to pull, by any places
    ["end", push or pull]          once it is staged, or let go of: its processor time since it was opened
python -m benchmarks.link_end rank CAST CLUSTER RANK                                   says its public key
    ["push" or "pull", number, slaves, rule]   → [seconds, processor time]; slaves as [addresses, public key]; the rule
    is the slaves' alone: a rank answers whoever asks

CAST as in cast.py; `keys` are the ranks'; SECRET is "encrypted" or "plain". Plain text leaves loopback only here.
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
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.slave.flow import ZmqFlow
from dips.slave.ports import FlowEvent, PushOver, Released, Staged
from dips.transport import seal

TRANSIT_BYTES, STALL_S = 256 << 20, 30.0


class LinkEvents:
    """Waits for what the flow reports."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._over: set[PushId | PullId] = set()

    def on_event(self, event: FlowEvent) -> None:
        if isinstance(event, PushOver):
            print(f"refused: {event.reason}", file=sys.stderr, flush=True)
        elif isinstance(event, Staged | Released):
            with self._changed:
                self._over.add(event.push if isinstance(event, Staged) else event.pull)
                self._changed.notify_all()

    def wait(self, moved: PushId | PullId) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: moved in self._over, WAIT_S):
                raise TimeoutError(f"{moved} was not staged or released within {WAIT_S:g} s")


def slave(cast: Cast, number: int, ip: str, concurrent_streams: int, lanes: int, secret: str) -> None:
    """Serve pushes and pulls; several may be open at once."""
    key, layers = seal.new_keys() if secret == "encrypted" else None, cast.held_by(number)
    flow = ZmqFlow(
        RUN, f"s{number}", (f"{ip}:0",) * lanes, CHUNK_BYTES, TRANSIT_BYTES, concurrent_streams, STALL_S, key=key
    )
    flow.set_layers(cast.manifest, layers)
    events, size = LinkEvents(), cast.numel // cast.layers
    flow.start(SINC, events.on_event)
    free: list[dict[int, np.ndarray[Any, np.dtype[np.float32]]]] = []
    slots = dict[PushId, dict[int, np.ndarray[Any, np.dtype[np.float32]]]]()
    source = dict[int, np.ndarray[Any, np.dtype[np.float32]]]()
    begun = dict[str, float]()  # by cluster: each has one transfer at a time
    print_answer([flow.lane_addresses(), flow.public_key])
    for word, (cluster, seq), *more in read_requests():
        push, pull = PushId(cluster, 1, seq), PullId(cluster, 1, seq)
        if word == "push":
            begun[cluster] = processor_s()
            slots[push] = free.pop() if free else {i: np.ones(size, np.float32) for i in layers}
            flow.open_push(push, tuple(more[0]), slots[push], WAIT_S, cast.codec, tuple(more[1]))
            print_answer("open")
        elif word == "pull":
            begun[cluster] = processor_s()
            source = source or {i: np.ones(size, np.float32) for i in layers}
            flow.open_pull(pull, VersionId(seq, seq), source, keys=tuple(more[1]))
            print_answer("open")
        elif word == "places":
            flow.reorder_push(push, tuple(more[0]))
            print_answer("places")
        elif push in slots:
            events.wait(push)
            flow.drop_push(push)
            free.append(slots.pop(push))
            print_answer([processor_s() - begun[cluster]])
        else:
            flow.close_pull(pull)
            events.wait(pull)
            print_answer([processor_s() - begun[cluster]])
    if flow.refused_frames:
        print(f"refused frames: {dict(flow.refused_frames)}", file=sys.stderr)
    flow.close()


def rank(cast: Cast, cluster: str, number: int) -> None:
    """Push or pull everything, as often as told."""
    pieces = cast.pieces(number, 1e-3)
    keys = seal.new_keys()
    print_answer(keys.public)
    for word, seq, slaves, _ in read_requests():
        there = tuple(
            SlaveAddress(f"s{i}", SINC, tuple(lanes), cast.held_by(i), key) for i, (lanes, key) in enumerate(slaves)
        )
        grant = Grant(VersionId(seq, seq), there, WAIT_S, cast.codec, GENESIS)
        begun, used = time.perf_counter(), processor_s()
        getattr(transfer, f"{word}_pieces")(grant, TransferIdentity(RUN, cluster, 1, seq, number, keys), pieces)
        print_answer([time.perf_counter() - begun, processor_s() - used])


if __name__ == "__main__":
    role, words = sys.argv[1], sys.argv[3:]
    if role == "slave":
        slave(Cast.parse(sys.argv[2]), int(words[0]), words[1], int(words[2]), int(words[3]), words[4])
    else:
        rank(Cast.parse(sys.argv[2]), words[0], int(words[1]))
