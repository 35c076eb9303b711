"""What the outer loop costs training: for how long it stands still in a round, without overlap and with it.

Four clusters, each behind a link of its own (`tc tbf`); the links' rate makes a round's wire time, bytes over line
rate of push and pull, 4 % of its inner time. All push at once, so there is a slot for each: with fewer, the later ones
wait for the former ones' wire time, as they should. The window is the default (5 % of the pace) and closes
when the last cluster is in. Training is timed_rank.py: standstill is wall time in the rank's calls of `step`, and what
its inner steps are slowed by beside a transfer; by cause it is what the agent tells Prometheus.

    none    stop, push, window, update, pull; held against the wire time
    full    train on meanwhile; held against the inner time. What is left are the freeze, the merge and looks

With --device cuda (or npu, xpu) there is one cluster, of one rank, whose inner steps are real ones on the accelerator.

Source: docs/architecture.md#speed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.accelerator import add_device, missing_device
from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.namespaces import missing, network
from benchmarks.record import shown
from benchmarks.timed_rank import Stretch, TimedPlan
from benchmarks.timed_run import TimedRun
from benchmarks.whole_run import SITE
from dips.protocol.manifest import BYTES_PER_PARAMETER

CLUSTERS = ("c0", "c1", "c2", "c3")
LAYERS, SLAVES = 8, 2
STEP_S = 0.5
WIRE_SHARE = 0.04
MOST_NONE, MOST_FULL = 1.10, 0.005  # of the wire time; of the inner time
MOST_IN_WORDS = {"none": "1.10 of the wire time", "full": "0.5 % of the inner time"}
WARM = 3
METRICS_PORT = 9464  # each agent has a host of its own
CAUSES = ("slot", "push", "window", "update", "pull")
WITHIN_S = 240.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one round."""

    parameters: int
    inner_steps: int
    rounds: int

    @property
    def inner_s(self) -> float:
        return self.inner_steps * STEP_S

    @property
    def wire_s(self) -> float:
        return WIRE_SHARE * self.inner_s

    @property
    def mbit(self) -> float:
        """Of a cluster's link: it moves a push and a pull in the wire time."""
        return round(2 * BYTES_PER_PARAMETER * self.parameters * 8 / self.wire_s / 1e6, 3)

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds of {self.inner_steps} inner steps of {STEP_S:g} s, links of {self.mbit:.4g} Mbit/s: "
            f"{self.wire_s:g} s of wire time in a round"
        )


# What costs a fixed time (fsync, messages) is large beside a wire time of seconds, and small beside one of minutes.
FULL_RUN = {"none": Setting(2_500_000, 150, 2), "full": Setting(2_500_000, 50, 2)}
QUICK_RUN = {"none": Setting(500_000, 10, 1), "full": Setting(500_000, 10, 1)}  # too short to promise anything


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run showed: the rounds of all clusters, and each rank's memory beyond the model."""

    rounds: list[Stretch]
    contributions: list[int]  # to each round
    host: list[int]
    device: list[int]

    def spent(self, cause: str) -> float:
        return mean(r.spent[cause] for r in self.rounds)


def measure(bench: Bench) -> None:
    """Without overlap, then with it."""
    device = bench.args.device
    bench.skip_if(missing() or missing_device(device))
    for overlap, setting in (QUICK_RUN if bench.quick else FULL_RUN).items():
        bench.say(f"overlap {overlap}: {setting}")
        bench.note(f"{overlap}: {len(CLUSTERS)} clusters of {setting.parameters:,} parameters; {setting}")
        seen = lived(setting, overlap, device)
        most = {"none": MOST_NONE * setting.wire_s, "full": MOST_FULL * setting.inner_s}
        _standstill(bench, overlap, seen, most[overlap])
        _memory(bench, overlap, seen, BYTES_PER_PARAMETER * setting.parameters)
        late_s = mean(r.late_s for r in seen.rounds)
        bench.note(f"{overlap}: clusters in a round: {', '.join(map(str, seen.contributions))}")
        bench.note(
            f"{overlap}: steps beside which nothing moved ended {shown(late_s, 's')} late in a round: the machine"
        )
    bench.note("means over all clusters and rounds; by cause as the agents tell Prometheus")
    bench.note("host memory: VmHWM above what the process had with its model, before the outer loop began")


def _standstill(bench: Bench, overlap: str, seen: Seen, most_s: float) -> None:
    stood = [r.standstill_s for r in seen.rounds]
    bench.row(
        f"standstill, {overlap}", mean(stood), "s",
        against=MOST_IN_WORDS[overlap], of=most_s, least=None if bench.quick else 1.0, less=True,
    )  # fmt: skip
    bench.row(f"  of the worst round, {overlap}", max(stood), "s")
    for cause in CAUSES if overlap == "none" else ():
        bench.row(f"  {cause}, {overlap}", seen.spent(cause), "s")
    unseen = mean(stood) - sum(map(seen.spent, CAUSES))
    bench.row(f"  seen by the ranks and not by the agents, {overlap}", unseen, "s")
    if overlap != "none":
        bench.row(f"  inner steps slowed, {overlap}", mean(r.slowed_s for r in seen.rounds), "s")
    bench.row(f"  the longest call of step, {overlap}", max(max(r.calls) for r in seen.rounds), "s")


def _memory(bench: Bench, overlap: str, seen: Seen, model_bytes: int) -> None:
    for kind, peaks in (("host", seen.host), ("device", seen.device)):
        if peaks:
            name, model = f"{kind} memory of a rank beyond the model, {overlap}", float(model_bytes)
            bench.row(name, float(max(peaks)), "B", against="the model", of=model)
        else:
            bench.note(f"{overlap}: {kind} memory: no {kind} here")


def lived(setting: Setting, overlap: str, device: str) -> Seen:
    """Let four clusters take part in so many rounds; on an accelerator one, which takes real inner steps."""
    clusters = CLUSTERS if device == "cpu" else CLUSTERS[:1]
    with (
        tempfile.TemporaryDirectory(prefix="dips-bench-") as made,
        network({SITE: None, **dict.fromkeys(clusters, setting.mbit)}) as hosts,
    ):
        plans = {
            name: TimedPlan(
                len(clusters), LAYERS, setting.parameters // LAYERS, STEP_S, warm=WARM, stretches=setting.rounds,
                metrics=f"{hosts[name].ip}:{METRICS_PORT}", device=device,
            )
            for name in clusters
        }  # fmt: skip
        keys = {"pace": {"steps": setting.inner_steps}, "overlap": overlap}
        manifest = equal_layers(setting.parameters, LAYERS)
        with TimedRun(Path(made) / "run", manifest, plans, keys, slaves=SLAVES, hosts=hosts) as run:
            run.finish(WITHIN_S)
            rounds = [one for name in clusters for one in run.stretches(name)]
            contributions = run.contributions()[WARM:][: setting.rounds]
            beyond = [run.beyond(name) for name in clusters]
    used = {of: [n for b in beyond if (n := b[of]) is not None] for of in ("host", "device")}
    return Seen(rounds, contributions, **used)


if __name__ == "__main__":
    main("overhead", __doc__, measure, add_device)
