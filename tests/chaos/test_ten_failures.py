"""Ten failures of other systems (each test is named for one), as they would meet this one: those that need processes.

tests/unit/test_ten_failures.py says where each of the ten is.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from dips.slave.export import export_snapshot
from tests.chaos import disks, predict
from tests.chaos.deployment import EVER, LEASE_S, SEEN_S, Deployment
from tests.chaos.wires import Loop
from tests.integration.cluster_harness import ROOT

DEPLOYMENT = {"ranges": False}  # who waits for data ranges cannot train on by itself
WILD = ("1e6", "nan", "inf")


def test_failure_1_fresh_weights_become_the_truth(deployment: Deployment, tmp_path: Path) -> None:
    """A slave with an empty disk, and agents with fresh weights, after the whole room was dark: θ is not theirs."""
    directory = deployment.directory / "ps1"
    deployment.retired()  # before that a slave with nothing offers v0@r0, and the run would begin anew
    for name in deployment.clusters:
        deployment.kill_agent(name)
    for name in ("master", *deployment.slaves):
        deployment.process(name).kill()
    head, since = deployment.head(), time.time()
    disks.copy(directory, tmp_path / "right")
    disks.put_back(_empty(tmp_path), directory)
    deployment.start_servers()
    for name in deployment.clusters:
        deployment.cluster(name)
    deployment.wait_for_status(lambda s: "ps1" in s["round"]["reason"], SEEN_S, "the master says who is missing")
    time.sleep(LEASE_S)  # nobody may help himself
    assert deployment.head() == head
    assert not [
        m
        for name in deployment.clusters
        for m in deployment.marks(deployment.timeline(name), "pull_end")
        if m["at"] > since
    ]
    deployment.process("ps1").kill()
    disks.put_back(tmp_path / "right", directory)
    deployment.start_slave("ps1")
    assert deployment.progress(2, by=deployment.clusters) > head


def test_failure_2_bulk_starves_heartbeats(deployment: Deployment) -> None:
    """Each piece of the data flow takes 0.6 s, each way: a transfer outlasts a lease, and nobody is judged dead.

    With certificates 0.4 s: an encrypted connection takes five round trips, and a stall is twelve seconds here.
    """
    since, skipped = time.time(), len(deployment.skipped())
    for lane in deployment.lanes.values():
        lane.delay(0.4 if deployment.certificates else 0.6)
    deployment.seen_after(deployment.timeline("east"), "push_end", since=since + 2 * LEASE_S, ok=True)
    moved = deployment.marks(deployment.timeline("east"), "push_end")[-1]["at"]
    begun = max(m["at"] for m in deployment.marks(deployment.timeline("east"), "push_begin") if m["at"] < moved)
    for lane in deployment.lanes.values():
        lane.delay(0.0)
    assert moved - begun > LEASE_S, "the transfer was too quick to show anything"
    for kind in ("cluster_gone", "slave_lost"):
        assert not [m for m in deployment.marks(deployment.master_timeline, kind) if m["at"] > since]
    assert len(deployment.skipped()) == skipped


def test_failure_3_lost_acknowledgement_lost_run(deployment: Deployment) -> None:
    """The servers hold the whole push and the answer is lost, then the next one, too: it counts once, and soon."""
    since, calls = time.time(), deployment.to_master["east"].calls
    first, second = calls.lose_answer("FinishPush"), calls.lose_answer("AwaitRound")
    first.caught()
    second.caught()
    outcome = deployment.seen_after(deployment.timeline("east"), "outcome", since=since)
    assert outcome["outcome"] == "accepted"
    folds = [f.push for r in deployment.history() for f in r.folds if f.push.cluster == "east"]
    assert len(folds) == len(set(folds))
    assert outcome["at"] - since < 25  # a question on a link that went silent ends after 30


def test_failure_5_a_poisoned_detector(tmp_path: Path, loop: Loop) -> None:
    """The first push of a run is 10^6-fold, which is gated, then NaN, then Inf, which never travel: no trace in θ.

    Who pushes what is not finite is quarantined then, until an operator readmits it.
    """
    with Deployment(
        tmp_path, loop, clusters=("east", "west", "north"), shared={"penalty": {"gates": ["dips"]}}
    ) as deployment:
        deployment.start_servers()
        deployment.cluster("north", words=("--wild", ",".join(WILD)))
        assert "hard cap" in deployment.seen_after(deployment.master_timeline, "push_gated")["reason"]
        kept_back = [deployment.seen_after(deployment.master_timeline, "cluster_diverged", n) for n in (1, 2)]
        assert [mark["in_a_row"] for mark in kept_back] == ["2", "3"]
        assert deployment.head().version == 0
        deployment.until(lambda: _readmit(deployment, "north"), SEEN_S, "north is quarantined, and readmitted")
        deployment.cluster("east")
        deployment.cluster("west")
        deployment.progress(4, by=deployment.clusters, within_s=90)
        deployment.check()


def _readmit(deployment: Deployment, cluster: str) -> bool:
    """Type `dips cluster readmit`; return whether there was a quarantine to lift."""
    words = ("cluster", "readmit", cluster, "--config", str(deployment.file))
    command = [sys.executable, "-c", "from dips.cli import main; main()", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or "is not quarantined" in done.stdout, done.stdout + done.stderr
    return done.returncode == 0


def test_failure_7_joining_while_busy(deployment: Deployment) -> None:
    """While a round is being applied, or a donor dies in mid-transfer: a joiner reads a version that stands."""
    place = "east-joining"
    trap = deployment.orders["ps0"].calls.trap("apply")
    trap.caught()
    deployment.end_agent("east")
    deployment.cluster("east", place=place)
    first = deployment.seen_after(deployment.timeline(place), "pull_end", installed=True)
    trap.release()
    deployment.progress(2, by=deployment.clusters)
    assert first["version"] in {str(r.parent) for r in deployment.history() if r.parent}
    deployment.lanes["ps1"].hold()
    begun = len(deployment.marks(deployment.timeline(place), "pull_begin"))
    deployment.kill_rank("east")
    deployment.until(
        lambda: len(deployment.marks(deployment.timeline(place), "pull_begin")) > begun, SEEN_S, "a pull meets the cut"
    )
    deployment.process("ps1").kill()
    deployment.lanes["ps1"].heal()
    deployment.start_slave("ps1")
    deployment.progress(2, by=deployment.clusters)
    deployment.end_agent("east")
    deployment.cluster("east")


def test_failure_8_the_coordinator_dies(deployment: Deployment) -> None:
    """There is no master for some steps: clusters train on by themselves; the next one finds everybody."""
    deployment.progress(1, by=deployment.clusters)  # all have parameters to train on: who has none waits for the master
    pids = {name: deployment.process(name).pid for name in (*deployment.clusters, *deployment.slaves)}
    deployment.process("master").kill()
    steps = {name: len(deployment._written(name, "steps")) for name in deployment.clusters}
    for name in deployment.clusters:
        deployment.until(
            lambda name=name: len(deployment._written(name, "steps")) > steps[name] + 4,
            SEEN_S,
            f"{name} trains on by itself",
        )
    deployment.start_master()
    deployment.progress(2, by=deployment.clusters)
    assert pids == {name: deployment.process(name).pid for name in pids}


def test_failure_9_pieces_of_different_steps_in_one_checkpoint(deployment: Deployment, tmp_path: Path) -> None:
    """Exported again and again while versions are made, also while a slave dies at its half: one version, whole."""
    trap = deployment.orders["ps1"].calls.trap("persist", skip=3)
    out, exported = tmp_path / "model.safetensors", set()
    for _ in range(30):
        version = export_snapshot([deployment.directory / name for name in deployment.slaves], None, out)
        numbers = {float(x) for tensor in load_file(out).values() for x in tensor.reshape(-1)}
        assert len(numbers) == 1, f"pieces of {len(numbers)} versions in {version}"
        exported.add((str(version), numbers.pop()))
    trap.caught()
    deployment.process("ps1").kill()  # ps0 has written the next version, ps1 has not
    trap.release(forward=False)
    version = export_snapshot([deployment.directory / name for name in deployment.slaves], None, out)
    numbers = {float(x) for tensor in load_file(out).values() for x in tensor.reshape(-1)}
    exported.add((str(version), numbers.pop()))
    assert not numbers
    deployment.start_slave("ps1")
    deployment.progress(1)
    with deployment.ledger() as ledger:
        predict.check_numbers(exported, predict.predict(ledger.read_history(EVER)), "export")


def test_failure_10_memory_that_creeps(deployment: Deployment) -> None:
    """Forty rounds with ranks dying in mid-push: slots and pins are given back, no process grows."""
    names = ("master", *deployment.slaves)
    deployment.progress(10)
    before = {name: psutil.Process(deployment.process(name).pid).memory_info().rss for name in names}
    for _ in range(10):
        deployment.kill_rank("east")
        deployment.progress(4)
    after = {name: psutil.Process(deployment.process(name).pid).memory_info().rss for name in names}
    grown = {name: (after[name] - before[name]) >> 20 for name in names}
    assert max(grown.values()) <= 8, f"MiB in 40 rounds: {grown}"
    status = deployment.wait_for_status(
        lambda s: all(s["slaves"][n]["heartbeat"] for n in deployment.slaves), SEEN_S, "slaves heartbeat"
    )
    assert all(s["heartbeat"]["pool_used"] <= s["heartbeat"]["pool_limit"] for s in status["slaves"].values())


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"
