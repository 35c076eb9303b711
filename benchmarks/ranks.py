"""What an outer step costs in the ranks themselves: an install, a merge, their memory, and `step` when nothing is due.

One cluster of two ranks under torchrun, FSDP2, `overlap: full`, with a master, a slave and an agent on loopback, all
real processes. Its rounds end in merges. Then, with nothing else going on, what lies in host memory is merged and
installed in turn, timed from the call in the transfer's own code to its return, on the slower of the two ranks. Peak
host memory is VmHWM above what was resident before OuterLoop was made, beside the sum that it printed. The cost of
`step` is that of the calls in which nothing is asked or moved: in processor time, since on two cores other processes of
the run preempt the rank, and as a mean, since one call in many sends what the others have held back.

With --device cuda (or npu, xpu) the model lies on the accelerators. A single one is shared by the ranks, each of which
is then a host of its own (accelerator.py): their copies meet on its bus.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accelerator import add_device, missing_device
from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.record import shown
from benchmarks.whole_run import WholeRun

RANKS, LAYERS, ROUNDS = 2, 16, 5
PARAMETERS = (1_000_000_000, 250_000_000, 100_000_000)  # the most that fits, unless --parameters says
QUICK_PARAMETERS = 20_000_000
NEEDED_BYTES = 46  # of memory for each parameter: 24 of the slave, 12 of the ranks, 8 to make the run, page cache
MOST_MERGE, MOST_MEMORY, MOST_STEP_S = 1.3, 1.05, 20e-6
WITHIN_S = 360.0


class RanksRun(WholeRun):
    """One cluster of several ranks that train by ranks_rank.py."""

    def __init__(self, directory: Path, parameters: int, device: str) -> None:
        self._plan = {"parameters": parameters, "layers": LAYERS, "rounds": ROUNDS, "device": device}
        super().__init__(directory, equal_layers(parameters, LAYERS), clusters=1, slaves=1, versions=0, slots=1)

    def _keys(self, name: str) -> dict[str, Any]:
        return {"pace": {"steps": 200}, "overlap": "full"}

    def _words(self, name: str) -> list[str]:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [*torchrun, "-m", "benchmarks.ranks_rank", str(self.meeting), json.dumps(self._plan)]

    def found(self) -> list[dict[str, Any]]:
        """What each rank wrote."""
        return [json.loads((self.meeting / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def fitting_parameters() -> int:
    """The most of PARAMETERS for which the machine has the memory now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return next((n for n in PARAMETERS if n * NEEDED_BYTES < free), PARAMETERS[-1])


def measure(bench: Bench) -> None:
    """One run."""
    device = bench.args.device
    bench.skip_if(missing_device(device))
    parameters = bench.args.parameters or (QUICK_PARAMETERS if bench.quick else fitting_parameters())
    parameters -= parameters % (LAYERS * RANKS)
    bench.say(f"{parameters:,} parameters over {RANKS} ranks on {device}, {ROUNDS} rounds")
    with (
        tempfile.TemporaryDirectory(prefix="dips-bench-") as made,
        RanksRun(Path(made) / "run", parameters, device) as run,
    ):
        run.finish(WITHIN_S)
        found = run.found()
    shared = missing_device(device, RANKS) and ", shared by them"
    bench.note(f"{parameters:,} parameters, FSDP2 over {RANKS} ranks, device {device}{shared}")
    _times(bench, found, parameters)
    _memory(bench, found)
    _steps(bench, found)


def _times(bench: Bench, found: list[dict[str, Any]], parameters: int) -> None:
    took = {
        what: median(max(one) for one in zip(*(rank[what] for rank in found), strict=True))
        for what in ("install", "merge", "freeze", "keep", "subtract")
    }
    bench.row("install", took["install"], "s")
    bench.row(
        "merge", took["merge"], "s", against="1.3 installs", of=MOST_MERGE * took["install"], least=1.0, less=True
    )
    bench.row("beside training, before it: subtraction", took["subtract"], "s", against="install", of=took["install"])
    bench.row("freeze", took["freeze"], "s")
    bench.row("keep", took["keep"], "s")
    bench.note(f"a merge of 10⁹ parameters on a rank would take {shown(took['merge'] * RANKS * 1e9 / parameters, 's')}")


def _memory(bench: Bench, found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        bench.row(
            f"peak host memory, rank {number}", float(rank["peak"]), "B",
            against="1.05 of the printed sum", of=MOST_MEMORY * rank["sum"], less=True,
            least=1.0 if rank["device"] is None else None,  # the sum is without a driver's memory
        )  # fmt: skip
        if rank["device"] is not None:
            bench.row(f"device memory beyond the model, rank {number}", float(rank["device"]), "B")


def _steps(bench: Bench, found: list[dict[str, Any]]) -> None:
    bench.row(
        "control messages of a step: what rank 0 spends beyond rank 1, which sends none",
        found[0]["step_mean"] - found[1]["step_mean"], "s", against="promised", of=MOST_STEP_S, least=1.0, less=True,
    )  # fmt: skip
    for number, rank in enumerate(found):
        bench.row(f"step, nothing due, processor time, rank {number}", rank["step_mean"], "s")
        bench.row(f"likewise, by the clock, rank {number}", rank["step_wall"], "s")
    calls, median_s = found[0]["steps"], found[0]["step"]
    bench.note(f"step: the mean of {calls} calls that ask the agent nothing; their median {shown(median_s, 's')}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--parameters", type=int, help="of the model; by default as many as memory allows")


if __name__ == "__main__":
    main("ranks", __doc__, measure, _arguments)
