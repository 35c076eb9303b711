"""The agent as a process: it keeps its trainer alive, speaks for it, cleans up after it, and ends as it should."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dips.client.rank import joining
from dips.commands.status import ask_status
from dips.telemetry import timeline
from dips.transport.endpoints import master_peer
from tests.integration import cluster_harness as harness
from tests.integration.train_constant import tensors
from tests.traces import check_chrome, check_otlp
from tests.waiting import is_alive, until

HERE = Path(__file__).parent
TINY = str(HERE / "train_tiny.py")
VERSIONS, PACE = 5, 20  # rounds of half a second: who is killed at the second is so well before the last


def run_of(directory: Path, versions: int) -> harness.Run:
    return harness.Run(directory, tensors(), shared={"penalty": {"gates": []}, "stop": {"versions": versions}})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with run_of(tmp_path, VERSIONS) as run:
        yield run


def marks(run: Any, cluster: str, kind: str) -> list[dict[str, Any]]:
    path = run.timeline(cluster)
    return [line for line in timeline.read_marks(path) if line["kind"] == kind] if path.exists() else []


@pytest.mark.timeout(120)
def test_a_killed_trainer_comes_back_in_the_same_incarnation(run: Any, tmp_path: Path) -> None:
    """SIGKILL of the trainer: the agent keeps the lease and starts it anew; it pulls the head, and tokens add up."""
    run.start_servers()
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=PACE, max_restarts=1)
    run.until(lambda: len(run.versions()) >= 2, 60, "two versions")
    os.kill(marks(run, "west", "trainer_start")[0]["pid"], signal.SIGKILL)
    before = len(run.versions())
    run.wait(west, 60)
    lives = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("incarnation")]
    assert lives[0] == "incarnation v0@r0" and len(lives) == 2 and lives[1] != "incarnation v0@r0"
    rounds = run.versions()
    assert len(rounds) == VERSIONS > before
    assert {fold.push.inc for r in rounds for fold in r.folds} == {1}
    lost = marks(run, "west", "trainer_gone")[-1]["tokens_lost"]
    assert marks(run, "west", "inner")[-1]["tokens"] == sum(r.tokens for r in rounds) + lost


@pytest.mark.timeout(120)
def test_a_trace_shows_a_push_on_all_machines(tmp_path: Path) -> None:
    """`dips trace` of real timelines: both formats keep their rules, and one push passes through every process."""
    with run_of(tmp_path, 3) as run:
        run.start_servers()
        run.wait(run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")]), 60)
    push = str(run.versions()[1].folds[0].push)
    directories = [str(tmp_path / name) for name in ("master", "ps0", "ps1", "west")]
    command = [sys.executable, "-m", "dips.cli", "trace", *directories]
    subprocess.run([*command, "--out", str(tmp_path / "all.json")], check=True, cwd=harness.ROOT)
    otlp = ["--out", str(tmp_path / "otlp.json"), "--format", "otlp", "--push", push]
    subprocess.run([*command, *otlp], check=True, cwd=harness.ROOT)
    events = check_chrome((tmp_path / "all.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown = {processes[e["pid"]] for e in events if e["ph"] == "X" and e["args"]["subject"] == push}
    assert shown == {"master", "slave ps0", "slave ps1", "cluster west"}
    (of_push,) = {s["traceId"] for s in check_otlp((tmp_path / "otlp.json").read_text()) if s["name"] == f"push {push}"}
    spans = [s for s in check_otlp((tmp_path / "otlp.json").read_text()) if s["traceId"] == of_push]
    assert {(s["resource"]["service.instance.id"], s["name"]) for s in spans} >= {
        ("master", f"push {push}"), ("ps0", f"push {push}"), ("ps1", f"push {push}"), ("west", "push"),
        ("west", "to ps0"), ("west", "to ps1"), ("ps0", "Fold"), ("west", "pull"),
    }  # fmt: skip


@pytest.mark.timeout(120)
def test_a_wrong_model_is_refused_with_its_first_differences(run: Any, tmp_path: Path) -> None:
    """Agent and trainer end with exit code 78, and what the trainer prints names the parameters."""
    run.start_master()
    wrong = run.start_cluster("wrong", [sys.executable, TINY, "wrong", str(tmp_path / "out")], max_restarts=5)
    run.wait(wrong, 60, code=78)
    raised = [line for line in wrong.log.read_text().splitlines() if line.startswith("dips.errors.DifferentModel")]
    assert len(raised) == 1, wrong.tail()
    assert "head.bias: expected shape (1,), got (2,); head.weight: expected shape (1, 3), got (2, 3)" in raised[0]
    assert len(marks(run, "wrong", "trainer_start")) == 1


@pytest.mark.timeout(120)
def test_a_master_that_is_late_is_waited_for(tmp_path: Path) -> None:
    """An unreachable master is asked again and again, visibly; when it is there the cluster joins."""
    with run_of(tmp_path, 2) as run:
        run.start_slaves()
        west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")])
        run.until(lambda: "asks the master again" in west.log.read_text(), 60, "the agent says that it waits")
        run.start_master()
        run.wait(west, 60)
        assert len(run.versions()) == 2


@pytest.mark.timeout(120)
def test_a_restarted_master_finds_its_cluster(run: Any, tmp_path: Path) -> None:
    """SIGKILL of the master: the cluster goes on in the same incarnation under the next term."""
    master = run.start_master()
    run.start_slaves()
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=PACE)
    run.until(lambda: len(run.versions()) >= 2, 60, "two versions")
    master.kill()
    run.start_master()
    run.wait(west, 90)
    assert len(run.versions()) == VERSIONS
    assert (tmp_path / "out").read_text().count("incarnation") == 1


@pytest.mark.timeout(120)
def test_every_data_range_is_trained_once(tmp_path: Path) -> None:
    """Two clusters walk 8 ranges: together they get each one exactly once, and the ledger knows those trained."""
    shared = {"penalty": {"gates": []}, "data": {"ranges": 8}}
    with harness.Run(tmp_path, tensors(), shared=shared) as run:
        run.start_servers()
        names = ["east", "west"]
        clusters = [
            run.start_cluster(n, [sys.executable, TINY, "ranges", str(tmp_path / f"{n}.out")], steps=1) for n in names
        ]
        for cluster in clusters:
            run.wait(cluster, 90)
        given = [line for n in names for line in (tmp_path / f"{n}.out").read_text().splitlines() if "range" in line]
        assert sorted(given) == sorted(f"range {i}" for i in range(8))
        trained = [r for round_ in run.versions() for fold in round_.folds for r in fold.ranges]
        assert len(trained) == len(set(trained)) >= 4


ORPHAN = str(HERE / "train_orphan.py")


@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_ranks_whose_agent_and_torchrun_were_killed_end_by_themselves(run: Any, tmp_path: Path) -> None:
    """Agent and torchrun die at once, nobody is left to tell the ranks, and they are unresponsive to SIGTERM: they
    end.
    """
    run.start_servers()
    west = run.start_cluster("west", [*harness.TORCHRUN, "2", ORPHAN, str(tmp_path / "out")])
    run.until(lambda: (tmp_path / "out").exists() and len(pids(tmp_path)) == 2, 90, "both ranks have joined")
    torchrun = marks(run, "west", "trainer_start")[0]["pid"]
    os.kill(torchrun, signal.SIGSTOP)  # it cannot learn that its agent died, and so not end its workers
    west.kill()
    run.until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), joining.GRACE_S + 20, "the ranks ended")
    os.kill(torchrun, signal.SIGKILL)
    assert west.log.read_text().count("is gone: this rank ends") == 2


def pids(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "out").read_text().split()]


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[Any]:
    """One that does not end while a test looks at it."""
    with harness.Run(tmp_path, tensors(), shared={"penalty": {"gates": []}}) as run:
        run.start_servers()
        yield run


@pytest.fixture
def quick_run(tmp_path: Path) -> Iterator[Any]:
    """One whose trainers hang after 15 s: 60 heartbeats."""
    with harness.Run(tmp_path, tensors(), shared={"penalty": {"gates": []}, "heartbeat_s": 0.25}) as run:
        run.start_servers()
        yield run


@pytest.mark.timeout(120)
def test_a_second_agent_of_the_same_name_takes_over(long_run: Any, tmp_path: Path) -> None:
    """Two directories, --take-over: the first agent is fenced, ends its trainer and exits 75; the second goes on."""
    run = long_run
    first = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "a")], steps=PACE, max_restarts=5)
    run.until(lambda: run.versions(), 60, "a version")
    trainer = marks(run, "west", "trainer_start")[0]["pid"]
    file = tmp_path / "again.yaml"
    file.write_text((tmp_path / "west.yaml").read_text().replace("directory: west", "directory: again"))
    script = [sys.executable, TINY, "steps", str(tmp_path / "b")]
    second = run._start("again", [*harness.daemon("client"), "--config", str(file), "--take-over", "--", *script])
    run.until(lambda: first.code is not None, 60, "the first ends")
    assert first.code == 75, first.tail()
    assert not psutil.pid_exists(trainer)
    assert "fenced by a newer incarnation" in first.log.read_text()
    at = len(run.versions())
    run.until(lambda: len(run.versions()) >= at + 2, 60, "versions of the second")  # one may hold the first's push
    assert second.code is None
    incs = [fold.push.inc for r in run.versions() for fold in r.folds]
    assert incs == sorted(incs) and set(incs) == {1, 2}


@pytest.mark.timeout(120)
def test_a_cluster_that_leaves_says_what_it_had_not_settled(long_run: Any, tmp_path: Path) -> None:
    """SIGTERM to the agent: tokens that no version holds are reported as lost at once, not when a lease runs out."""
    run = long_run
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "a")], steps=60)
    run.until(lambda: len(run.versions()) >= 1, 60, "a version")
    folded = sum(fold.tokens for row in run.versions() for fold in row.folds)
    run.until(lambda: marks(run, "west", "inner")[-1]["tokens"] > folded, 60, "steps of the next push")
    west.terminate()
    consumed = marks(run, "west", "inner")[-1]["tokens"]
    with run.ledger() as ledger:
        tokens = ledger.read_tokens()["west"]
        assert ledger.read_state().clusters[0].ended
    assert tokens["accepted"] + tokens["gated"] + tokens["lost"] == consumed
    assert tokens["lost"] > 0


@pytest.mark.timeout(120)
def test_a_hung_trainer_and_a_dead_one_are_told_apart(quick_run: Any, tmp_path: Path) -> None:
    """SIGSTOP: idle, "hangs"; SIGKILL: idle, "died", until it is back; SIGKILL of the agent: gone, "silent"."""
    run = quick_run
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "a")], steps=1000, max_restarts=1)
    run.until(lambda: (tmp_path / "a").exists(), 60, "it trains")
    pid = marks(run, "west", "trainer_start")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    hangs = ("idle", "its trainer hangs: no inner step seen for 15 s")
    until(lambda: seen(run) == hangs, "it hangs", 60, pause_s=0.5)  # each look asks the master
    os.kill(pid, signal.SIGCONT)
    run.until(lambda: seen(run) == ("training", "training"), 30, "it trains again")
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: "its trainer died" in seen(run)[1], 30, "it died")
    west.kill()
    run.until(lambda: seen(run)[0] == "gone" and seen(run)[1].startswith("silent for"), 30, "it is gone")


def seen(run: Any) -> tuple[str, str]:
    """West's state and its reason, as the master tells them."""
    west = asyncio.run(ask_status(master_peer(run.address, None)))["clusters"]["west"]
    return west["state"], west["reason"]


# ---- without a master: the agent and its processes -----------------------------------------------------------------


def agent(run: Any, code: str, **options: Any) -> Any:
    return run.start_cluster("west", [sys.executable, "-c", code], **options)


def test_the_trainers_exit_code_is_the_agents(run: Any) -> None:
    """A trainer that fails too often ends the agent with its own code; one that ends well ends it well."""
    run.wait(agent(run, "raise SystemExit(9)", max_restarts=1), 30, code=9)
    assert len(marks(run, "west", "trainer_start")) == 2
    run.wait(agent(run, "pass"), 30)


BEFORE = """
echo "$DIPS_ATTEMPT" >> {told}
if test "$DIPS_ATTEMPT" = 1; then echo "error: c.0 is missing" >&2; echo "plug it in" >&2; exit 3; fi
"""


def test_a_command_runs_before_each_start_of_the_trainer(run: Any, tmp_path: Path) -> None:
    """It fails, and the trainer is not started; it succeeds, and it is; it crashes, and the command runs before the
    next start, too. Each failure is told with its exit code and its error.
    """
    told = tmp_path / "told"
    before = ["sh", "-c", BEFORE.format(told=told)]
    writes = f"import os; print('trainer', file=open({str(told)!r}, 'a'))"
    crashes = f"{writes}; raise SystemExit(9 * (os.environ['DIPS_ATTEMPT'] < '3'))"
    run.wait(agent(run, crashes, max_restarts=5, before_start=before), 30)
    assert told.read_text().split() == ["1", "2", "trainer", "3", "trainer"]
    assert [mark["code"] for mark in marks(run, "west", "before_start_end")] == [3, 0, 0]
    remarks = [mark["text"] for mark in marks(run, "west", "remark")]
    assert "crashing, 1 of 5, exit 3, last line: before_start: error: c.0 is missing" in remarks


def test_sigterm_ends_what_runs_before_the_trainer(run: Any) -> None:
    """With all its processes, and the agent after it; no trainer is started."""
    west = agent(run, "pass", before_start=["sh", "-c", "sleep 600 & wait"], max_restarts=5)
    run.until(lambda: marks(run, "west", "before_start"), 30, "the command runs")
    pid = marks(run, "west", "before_start")[0]["pid"]
    run.until(lambda: psutil.Process(pid).children(), 30, "it has a process")
    (child,) = psutil.Process(pid).children()
    assert west.terminate() == 128 + signal.SIGTERM
    assert not psutil.pid_exists(pid) and not psutil.pid_exists(child.pid)
    assert not marks(run, "west", "trainer_start")


def test_a_command_before_the_start_must_exist_and_have_a_trainer(run: Any) -> None:
    """Exit 78 before anything is joined, naming file and key."""
    run.wait(missing := agent(run, "pass", before_start=["pyhton", "plan.py"]), 30, code=78)
    assert "west.yaml: before_start: 'pyhton' is not found" in missing.log.read_text()
    run.wait(alone := run.start_cluster("east", [], agent="127.0.0.1:0", before_start=["true"]), 30, code=78)
    assert "before_start: expected a training command that it precedes" in alone.log.read_text()


def test_sigterm_ends_trainer_and_agent(run: Any) -> None:
    """SIGTERM is handed on; the agent ends when the trainer has, with its code."""
    west = agent(run, "import time; print('up', flush=True); time.sleep(600)")
    run.until(lambda: "up" in west.log.read_text() and marks(run, "west", "trainer_start"), 30, "the trainer runs")
    pid = marks(run, "west", "trainer_start")[0]["pid"]
    assert west.terminate() == 128 + signal.SIGTERM
    assert not psutil.pid_exists(pid)


SPAWN = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('worker', p.pid, flush=True)\n"
    "time.sleep(600)"
)


def worker_of(west: Any) -> int:
    return next((int(line.split()[1]) for line in west.log.read_text().splitlines() if line.startswith("worker")), 0)


def test_workers_of_a_trainer_that_was_killed_are_killed(run: Any) -> None:
    """torchrun's workers live in sessions of their own; when it is killed hard, nothing of it stays."""
    west = agent(run, SPAWN)
    run.until(lambda: worker_of(west), 30, "the trainer has a worker")
    os.killpg(marks(run, "west", "trainer_start")[0]["pid"], signal.SIGKILL)
    run.wait(west, 30, code=128 + signal.SIGKILL)
    assert not psutil.pid_exists(worker_of(west))
    assert marks(run, "west", "trainer_end")[0]["killed"] == 1


def test_a_trainer_does_not_outlive_its_agent(run: Any) -> None:
    """SIGKILL of the agent: the kernel tells the trainer."""
    west = agent(run, "import time; print('up', flush=True); time.sleep(600)")
    run.until(lambda: "up" in west.log.read_text() and marks(run, "west", "trainer_start"), 30, "the trainer runs")
    pid = marks(run, "west", "trainer_start")[0]["pid"]
    west.kill()
    run.until(lambda: not is_alive(pid), 10, "the trainer ended")


def test_a_second_agent_in_the_same_directory_is_refused(run: Any) -> None:
    """Two agents of one cluster would fence each other for ever: exit 78, naming the directory and the first's pid."""
    west = agent(run, "import time; print('up', flush=True); time.sleep(600)")
    run.until(lambda: "up" in west.log.read_text(), 30, "the trainer runs")
    second = subprocess.run(
        [*harness.daemon("client"), "--config", str(run.directory / "west.yaml"), "--", "true"],
        cwd=harness.ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert second.returncode == 78
    assert f"in use by another agent (pid {west.pid})" in second.stderr
    assert west.code is None


def test_an_agent_without_a_command_must_be_found_by_somebody(run: Any) -> None:
    """Nobody could reach it, so it is a word that was forgotten."""
    agent = run.start_cluster("west", [])
    run.wait(agent, 30, code=78)
    assert "no training command" in agent.log.read_text()
