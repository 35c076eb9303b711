"""Ten failures of other systems (each test is named for one), as they would meet this one: those that need processes.

tests/unit/test_ten_failures.py says where each of the ten is.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from dips.slave.export import export_snapshot
from tests.chaos import disks, predict
from tests.chaos.house import EVER, LEASE_S, SEEN_S, Deployment
from tests.chaos.wires import Loop

HOUSE = {"ranges": False}  # who waits for data ranges cannot train on by itself
WILD = ("1e6", "nan", "inf")


def test_failure_1_fresh_weights_become_the_truth(house: Deployment, tmp_path: Path) -> None:
    """A slave with an empty disk, and agents with fresh weights, after the whole room was dark: θ is not theirs."""
    directory = house.directory / "ps1"
    house.retired()  # before that a slave with nothing offers v0@r0, and the run would begin anew
    for name in house.clusters:
        house.kill_agent(name)
    for name in ("master", *house.slaves):
        house.process(name).kill()
    head, since = house.head(), time.time()
    disks.copy(directory, tmp_path / "right")
    disks.put_back(_empty(tmp_path), directory)
    house.start_master()
    house.start_slaves()
    for name in house.clusters:
        house.cluster(name)
    house.wait_for_status(lambda s: "ps1" in s["round"]["reason"], SEEN_S, "the master says who is missing")
    time.sleep(LEASE_S)  # nobody may help himself
    assert house.head() == head
    assert not [m for name in house.clusters for m in house.marks(house.timeline(name), "pull_end") if m["at"] > since]
    house.process("ps1").kill()
    disks.put_back(tmp_path / "right", directory)
    house.start_slave("ps1")
    assert house.progress(2, by=house.clusters) > head


def test_failure_2_bulk_starves_heartbeats(house: Deployment) -> None:
    """Each piece of the data flow takes 0.6 s, each way: a transfer outlasts a lease, and nobody is judged dead."""
    since, skipped = time.time(), len(house.skipped())
    for lane in house.lanes.values():
        lane.delay(0.6)
    house.seen_after(house.timeline("east"), "push_end", since=since + 2 * LEASE_S, ok=True)
    moved = house.marks(house.timeline("east"), "push_end")[-1]["at"]
    begun = max(m["at"] for m in house.marks(house.timeline("east"), "push_begin") if m["at"] < moved)
    for lane in house.lanes.values():
        lane.delay(0.0)
    assert moved - begun > LEASE_S, "the transfer was too quick to show anything"
    for kind in ("cluster_gone", "slave_lost"):
        assert not [m for m in house.marks(house.master_timeline, kind) if m["at"] > since]
    assert len(house.skipped()) == skipped


def test_failure_3_lost_acknowledgement_lost_run(house: Deployment) -> None:
    """The servers hold the whole push and the answer is lost, then the next one, too: it counts once, and soon."""
    since, calls = time.time(), house.to_master["east"].calls
    first, second = calls.lose_answer("FinishPush"), calls.lose_answer("AwaitRound")
    first.caught()
    second.caught()
    outcome = house.seen_after(house.timeline("east"), "outcome", since=since)
    assert outcome["outcome"] == "accepted"
    folds = [f.push for r in house.history() for f in r.folds if f.push.cluster == "east"]
    assert len(folds) == len(set(folds))
    assert outcome["at"] - since < 25  # a question on a link that went silent ends after 30


def test_failure_5_a_poisoned_detector(tmp_path: Path, loop: Loop) -> None:
    """The first push of a run is 10^6-fold, then NaN, then Inf: gated each, without a trace in θ or statistics."""
    with Deployment(tmp_path, loop, clusters=("east", "west", "north"), shared={"penalty": {"rule": "dips"}}) as house:
        house.start_master()
        house.start_slaves()
        house.cluster("north", words=("--wild", ",".join(WILD)))
        gated = [house.seen_after(house.master_timeline, "push_gated", n + 1) for n in range(len(WILD))]
        assert "hard cap" in gated[0]["reason"] and all("not finite" in g["reason"] for g in gated[1:])
        assert house.head().version == 0
        house.cluster("east")
        house.cluster("west")
        house.progress(4, by=house.clusters, within_s=90)
        house.check()


def test_failure_7_joining_while_busy(house: Deployment) -> None:
    """While a round is being applied, or a donor dies in mid-transfer: a joiner reads a version that stands."""
    place = "east-joining"
    trap = house.orders["ps0"].calls.trap("apply")
    trap.caught()
    house.end_agent("east")
    house.cluster("east", place=place)
    first = house.seen_after(house.timeline(place), "pull_end", installed=True)
    trap.release()
    house.progress(2, by=house.clusters)
    assert first["version"] in {str(r.parent) for r in house.history() if r.parent}
    house.lanes["ps1"].hold()
    begun = len(house.marks(house.timeline(place), "pull_begin"))
    house.kill_rank("east")
    house.until(lambda: len(house.marks(house.timeline(place), "pull_begin")) > begun, SEEN_S, "a pull meets the cut")
    house.process("ps1").kill()
    house.lanes["ps1"].heal()
    house.start_slave("ps1")
    house.progress(2, by=house.clusters)
    house.end_agent("east")
    house.cluster("east")


def test_failure_8_the_coordinator_dies(house: Deployment) -> None:
    """There is no master for some steps: clusters train on by themselves; the next one finds everybody."""
    house.progress(1, by=house.clusters)  # all have parameters to train on: who has none waits for the master
    pids = {name: house.process(name).pid for name in (*house.clusters, *house.slaves)}
    house.process("master").kill()
    steps = {name: len(house._written(name, "steps")) for name in house.clusters}
    for name in house.clusters:
        house.until(
            lambda name=name: len(house._written(name, "steps")) > steps[name] + 4,
            SEEN_S,
            f"{name} trains on by itself",
        )
    house.start_master()
    house.progress(2, by=house.clusters)
    assert pids == {name: house.process(name).pid for name in pids}


def test_failure_9_pieces_of_different_steps_in_one_checkpoint(house: Deployment, tmp_path: Path) -> None:
    """Exported again and again while versions are made, also while a slave dies at its half: one version, whole."""
    trap = house.orders["ps1"].calls.trap("persist", skip=3)
    out, exported = tmp_path / "model.safetensors", set()
    for _ in range(30):
        version = export_snapshot([house.directory / name for name in house.slaves], None, out)
        numbers = {float(x) for tensor in load_file(out).values() for x in tensor.reshape(-1)}
        assert len(numbers) == 1, f"pieces of {len(numbers)} versions in {version}"
        exported.add((str(version), numbers.pop()))
    trap.caught()
    house.process("ps1").kill()  # ps0 has written the next version, ps1 has not
    trap.release(forward=False)
    version = export_snapshot([house.directory / name for name in house.slaves], None, out)
    numbers = {float(x) for tensor in load_file(out).values() for x in tensor.reshape(-1)}
    exported.add((str(version), numbers.pop()))
    assert not numbers
    house.start_slave("ps1")
    house.progress(1)
    with house.ledger() as ledger:
        predict.check_numbers(exported, predict.predict(ledger.read_history(EVER)), "export")


def test_failure_10_memory_that_creeps(house: Deployment) -> None:
    """Forty rounds with ranks dying in mid-push: slots and pins are given back, no process grows."""
    names = ("master", *house.slaves)
    house.progress(10)
    before = {name: psutil.Process(house.process(name).pid).memory_info().rss for name in names}
    for _ in range(10):
        house.kill_rank("east")
        house.progress(4)
    after = {name: psutil.Process(house.process(name).pid).memory_info().rss for name in names}
    grown = {name: (after[name] - before[name]) >> 20 for name in names}
    assert max(grown.values()) <= 8, f"MiB in 40 rounds: {grown}"
    status = house.wait_for_status(
        lambda s: all("pool_used" in s["slaves"][n] for n in house.slaves), SEEN_S, "slaves heartbeat"
    )
    assert all(s["pool_used"] <= s["pool_limit"] for s in status["slaves"].values())


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"
