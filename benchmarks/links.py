"""Push and pull over shaped links against the line's rate: 100 Mbit/s, 1 Gbit/s, and 100 Mbit/s with 20 ms each way.

A slave's data flow in one network namespace, a rank in another, every check on. The time is that of the rank's
transfer, as in benchmarks.transport; that the slave lets go of it afterwards is not in it. Bytes are parameters and
count once; the line carries frames, TCP, IP and (veth) Ethernet headers besides: 4.4 % of it in packets of 1500 bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.cast import TURNS, Cast
from benchmarks.harness import Bench, Seconds, main
from benchmarks.line_program import open_programs
from benchmarks.namespaces import missing, wire
from dips.transport.intake import CONCURRENT_STREAMS

LEAST_NEAR, LEAST_FAR = 0.95, 0.9


@dataclass(frozen=True, slots=True)
class LinkRow:
    """What is measured; `mib` is some seconds of it: TCP needs the first half second for itself."""

    mbit: int
    delay_ms: float
    mib: int
    lanes: int = 1

    def __str__(self) -> str:
        far = f" and {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.mbit} Mbit/s{far}, {self.lanes} lane{'s' if self.lanes > 1 else ''}"


LINES = (LinkRow(100, 0, 24), LinkRow(1000, 0, 256), LinkRow(1000, 0, 256, lanes=2), LinkRow(100, 20, 64))


@contextmanager
def ends(line: LinkRow) -> Iterator[Callable[[str], Seconds]]:
    """Both processes on their link; what is yielded moves everything once and returns the seconds."""
    with wire(line.mbit, line.delay_ms) as (near, far), open_programs() as start:
        cast = Cast(slaves=1, ranks=1, layers=4, numel=line.mib << 18)
        words = (far.ip, str(CONCURRENT_STREAMS), str(line.lanes), "plain")
        slave = start(far, "link_end", "slave", str(cast), "0", *words)
        rank = start(near, "link_end", "rank", str(cast), "west", "0")
        numbers = itertools.count(1)

        def move(kind: str) -> Seconds:
            moved = ("west", next(numbers))
            slave.ask_program(kind, moved, [0], [rank.first])
            seconds, _ = rank.ask_program(kind, moved[1], [slave.first], TURNS)
            slave.ask_program("end", moved)
            return Seconds(seconds)

        yield move


def measure(bench: Bench) -> None:
    """Every line, both directions."""
    bench.skip_if(missing())
    for line in LINES:
        bench.say(f"{line.mib} MiB over {line}, {bench.runs} runs")
        with ends(line) as move:
            took = bench.together({"push": lambda: move("push"), "pull": lambda: move("pull")})
        for kind, seconds in took.items():
            least = LEAST_FAR if line.delay_ms or line.mbit < 1000 else LEAST_NEAR
            rate = line.mib * (1 << 20) / seconds
            bench.row(f"{kind}, {line}", rate, "B/s", against="line rate", of=line.mbit * 1e6 / 8, least=least)
    bench.note(
        "the limit is the line: its packets carry 1448 of 1514 bytes (0.956) without delay, 0.994 through the TUN"
    )


if __name__ == "__main__":
    main("links", __doc__, measure)
