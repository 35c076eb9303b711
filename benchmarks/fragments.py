"""Fragments over a link of 100 Mbit/s: the rate that the link must bear, with and without.

A rank with a model of 16 equal layers pushes it, and pulls and merges it, beside inner steps; the slave's data flow is
in another network namespace. What the rank's device sends (push) or receives (pull) is sampled. The peak rate is that
of the busiest window as long as the whole transfer takes without fragments: what a link must have to spare if every
transfer is to be over in that time. Within a fragment bytes flow as fast as the link takes them; more fragments are
shorter ones. Bytes are those on the line, all headers counted.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.fragment_end import CAST, STEP_S
from benchmarks.harness import Bench, main
from benchmarks.line_program import open_programs
from benchmarks.namespaces import missing, wire
from dips.transport.intake import CONCURRENT_STREAMS

MBIT, FRAGMENTS = 100, 4
APART = 1.1  # times the window: from one fragment's begin to the next one's
LEAST = 0.9  # of the peak divided by the fragments
LEAST_BYTES = 0.99  # a round's bytes without fragments over those with

Samples = Sequence[tuple[float, int]]
Move = Callable[[str, int, int], Samples]


@contextmanager
def ends() -> Iterator[Move]:
    """Both processes on their link; what is yielded moves everything once."""
    with wire(MBIT) as (near, far), open_programs() as start:
        words = (far.ip, str(CONCURRENT_STREAMS), "1", "plain")
        slave = start(far, "link_end", "slave", str(CAST), "0", *words)
        ((address,), _) = slave.first
        rank = start(near, "fragment_end", address)
        numbers = itertools.count(1)

        def move(kind: str, fragments: int, interval: int) -> Samples:
            moved = ("west", next(numbers))
            slave.ask_program(kind, moved, [0], [])
            samples = rank.ask_program(kind, moved[1], fragments, interval)
            slave.ask_program("end", moved)
            return [(t, nbytes) for t, nbytes in samples]

        yield move


def peak_rate(samples: Samples, window_s: float) -> float:
    """Bytes a second in the busiest window."""
    times = [t for t, _ in samples]
    last = len(samples) - 1
    return max((samples[min(last, bisect_left(times, t + window_s))][1] - nbytes) / window_s for t, nbytes in samples)


def busy_s(samples: Samples) -> float:
    """From the first byte to the last of a transfer without fragments."""
    total = samples[-1][1]
    moving = [t for t, nbytes in samples if 0.005 * total < nbytes < 0.995 * total]
    return moving[-1] - moving[0]


def measure(bench: Bench) -> None:
    """Both directions, in turn."""
    bench.skip_if(missing())
    with ends() as move:
        move("push", 1, 0)  # what is kept for merges is there from now on
        found = {kind: measure_kind(bench, move, kind) for kind in ("push", "pull")}
    for kind, (window_s, peaks, nbytes) in found.items():
        one, many = peaks
        bench.note(f"{kind}: peak rates are over {window_s:.2f} s, as long as one without fragments takes")
        bench.row(f"peak rate, {kind}", one, "B/s", against="line rate", of=MBIT * 1e6 / 8)
        name = f"peak rate, {kind}, {FRAGMENTS} fragments"
        bench.row(name, many, "B/s", against=f"without / {FRAGMENTS}", of=one / FRAGMENTS, least=LEAST, less=True)
        name = f"bytes of a {kind}, {FRAGMENTS} fragments"
        bench.row(name, nbytes[1], "B", against="without", of=nbytes[0], least=LEAST_BYTES, less=True)


def measure_kind(bench: Bench, move: Move, kind: str) -> tuple[float, list[float], list[float]]:
    """The window, and medians of peak rates and bytes: without fragments, and with."""
    bench.say(f"{kind}: without fragments and with {FRAGMENTS}, {bench.runs} runs")
    whole, cut = list[Samples](), list[Samples]()
    for _ in range(bench.runs):
        whole.append(move(kind, 1, 0))
        interval = max(1, round(APART * busy_s(whole[-1]) / STEP_S))
        cut.append(move(kind, FRAGMENTS, interval))
    window_s = statistics.median(map(busy_s, whole))
    peaks = [statistics.median(peak_rate(samples, window_s) for samples in taken) for taken in (whole, cut)]
    nbytes = [statistics.median(samples[-1][1] for samples in taken) for taken in (whole, cut)]
    return window_s, peaks, nbytes


if __name__ == "__main__":
    main("fragments", __doc__, measure)
