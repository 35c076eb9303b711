"""Devices of a planned pipeline come and go in a run: a new plan before the next launch, and nobody is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dips.telemetry import timeline
from tests.integration import cluster_harness as harness
from tests.integration import train_changing as script

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.real_commands, pytest.mark.timeout(600)]
SCRIPT = Path(script.__file__)
START = SCRIPT.with_name("start_on_hosts.py")
WITHIN_S = 60.0  # from the end of a launch to the next accepted push, beyond torchrun's own
PLAN = """
set -e
cd {directory}
{python} {start} {hosts} -m dips.cli profile --changed --name {{host}} \
  --factory train_changing:Whole --tokens {tokens} --batch 12
test plan.yaml -nt profile.yaml || {python} -m dips.cli plan cluster profile.yaml model.yaml --for pipeline -o plan.yaml
"""


class Changing(harness.Run):  # type: ignore[misc, name-defined]
    """A run with one cluster, on hosts that have a file each."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        tensors = {f"{name}.{key}": p.detach().numpy() for name, l in script.build() for key, p in l.named_parameters()}
        shared = {"outer": {"lr": 1.0, "momentum": 0.0, "step": "sgd"}, "penalty": {"gates": []}}
        super().__init__(directory, tensors, shared=shared)
        self.hosts, self.out = directory / "hosts", directory / "out"
        self.hosts.mkdir()

    def start_training(self) -> Any:
        words = {"directory": self.directory, "python": sys.executable, "start": START, "hosts": self.hosts}
        plan = f"export PYTHONPATH={harness.ROOT}:{SCRIPT.parent}\n" + PLAN.format(**words, tokens=script.LENGTH)
        command = [sys.executable, str(START), str(self.hosts), str(SCRIPT), str(self.out)]
        return self.start_cluster("west", command, steps=4, max_restarts=9, before_start=["sh", "-c", plan])

    def steps(self) -> list[dict[str, Any]]:
        """What rank 0 has written of each step."""
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def marks(self, *kinds: str) -> list[dict[str, Any]]:
        path = self.timeline("west")
        return [m for m in timeline.read_marks(path) if m["kind"] in kinds] if path.exists() else []

    def until_pushed_by(self, devices: list[str], after: int) -> None:
        """Wait for a step of these devices on a version that came of a push of theirs."""

        def trained() -> bool:
            since = [step for step in self.steps()[after:] if step["devices"] == devices]
            return len({step["version"] for step in since}) > 1

        self.until(trained, 200, f"an accepted push by {devices}")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Changing]:
    with Changing(tmp_path) as run:
        run.start_servers()
        yield run


def describe(run: Changing, since: float, what: str) -> float:
    """Print the course of a change; return the seconds from the end of the last launch to the first accepted push,
    beyond the start of torchrun with its ranks. (That of `dips profile`, which finds who is there, counts.)
    """
    kinds = ("trainer_end", "before_start", "before_start_end", "trainer_start", "trainer_attached", "push_end")
    marks = [m for m in run.marks(*kinds) if m["at"] > since]
    ended = next(m["at"] for m in marks if m["kind"] == "trainer_end")
    started = next(m["at"] for m in marks if m["kind"] == "trainer_start" and m["at"] > ended)
    attached = next(m["at"] for m in marks if m["kind"] == "trainer_attached" and m["at"] > started)
    pushed = next(m["at"] for m in marks if m["kind"] == "push_end" and m["at"] > attached)
    print(
        f"{what}: torchrun ended after {ended - since:.1f} s, who is there and a plan {started - ended:.1f} s, "
        f"torchrun until its ranks attach {attached - started:.1f} s, an accepted push {pushed - attached:.1f} s"
    )
    return float(pushed - ended - (attached - started))


def test_a_device_that_goes_and_one_that_comes_make_a_new_plan(run: Changing) -> None:
    """Two hosts train; one is killed, and the other goes on alone by a plan of its own, from the run's version and the
    optimizer's state of the checkpoint; another one comes, joins the rendezvous, and is in the next plan. Each time a
    push is accepted within WITHIN_S, and only the first launch measures.
    """
    for host in ("a", "b"):
        (run.hosts / host).touch()
    west = run.start_training()
    run.until_pushed_by(["a.0", "b.0"], 0)

    since, seen = run.steps()[-1]["at"], len(run.steps())
    (run.hosts / "b").unlink()
    run.until_pushed_by(["a.0"], seen)
    assert describe(run, since, "killed") < WITHIN_S

    since, seen = run.steps()[-1]["at"], len(run.steps())
    (run.hosts / "c").touch()
    run.until_pushed_by(["a.0", "c.0"], seen)
    assert describe(run, since, "added") < WITHIN_S

    west.terminate()
    log = west.log.read_text()
    assert log.count("everything is measured") == 1
    assert "b.0 (cpu) is gone. Nothing is measured" in log and "c.0 (cpu) came. Nothing is measured" in log
    steps = run.steps()
    assert [step["devices"] for step in steps if step["steps"] == 1] == [["a.0", "b.0"]], "the optimizer began once"
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert {fold.push.inc for r in run.versions() for fold in r.folds} == {1}
