"""One judgement for all who show a run: what is heard stands beside what is known, and each peer has its word."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, isnan, nan
from typing import Any

import pytest

from dips.ids import PushId, VersionId
from dips.protocol.enums import ClusterState, DurabilityState, Severity, SlaveState
from dips.protocol.heartbeats import OrderWait, Transfer, WorkProgress
from dips.protocol.view import (
    ClusterView,
    DurabilityView,
    JournalView,
    LeaseView,
    LedgerMirrorView,
    MirrorView,
    RollbackView,
    RunView,
    SlaveView,
    StandbyView,
    TrackView,
    VersionProcessView,
)
from dips.view.judging import Heartbeats, judge_run, narrow_view, read_view, spell_view
from tests.unit.view.views import CLUSTER, HEARTBEAT_S, SLAVE, make_cluster, make_run, make_slave


def test_heartbeats_stand_beside_the_view() -> None:
    """A peer's state and cause come from the Coordinator, the rest from its heartbeat, with its age."""
    view = RunView(
        clusters={"a": ClusterView(ClusterState.TRAINING, tokens_lost=7)}, slaves={"s": SlaveView(SlaveState.READY)}
    )
    told = replace(SLAVE, transfers=(Transfer("a", 1, 3, True, 5, 9),), waits=(OrderWait(7, "Persist", 31.0),))
    heard: Heartbeats = {("cluster", "a"): (replace(CLUSTER, tokens_lost=5), 10.0), ("slave", "s"): (told, 11.0)}
    judged = judge_run(view, heard, 12.0, HEARTBEAT_S)
    cluster, slave = judged.clusters["a"], judged.slaves["s"]
    assert (cluster.word, cluster.heard_s, cluster.loss) == ("training", 2.0, 2.5)
    assert cluster.tokens_lost == 12, "what earlier incarnations lost and what the present one did"
    assert (slave.heard_s, slave.heartbeat) == (1.0, told)


def test_a_peer_without_a_heartbeat_and_a_heartbeat_without_a_peer() -> None:
    """A cluster and a slave of one name are two."""
    view = RunView(clusters={"s": ClusterView(ClusterState.GONE)})
    judged = judge_run(view, {("slave", "s"): (SLAVE, 1.0)}, 2.0, HEARTBEAT_S)
    assert judged.clusters["s"].heartbeat is None and judged.slaves == {}


def test_a_view_travels_as_json() -> None:
    """And comes back as it was; a number that is not finite is null, and not a number again."""
    staged = replace(SLAVE, staged=(PushId("a", 1, 3),), memory=VersionId(1, 1))
    view = make_run(
        {"a": make_cluster(loss=nan, remarks={"crash": "crashing"}, differs={"loss": "high"}, norm=inf)},
        {"s": replace(make_slave(mirror=MirrorView(behind_versions=2)), heartbeat=staged)},
    )
    told = json.loads(spell_view(view))
    assert told["clusters"]["a"]["heartbeat"]["loss"] is None and told["clusters"]["a"]["norm"] is None
    read = read_view(told)
    heartbeat = read.clusters["a"].heartbeat
    assert heartbeat is not None and isnan(heartbeat.loss)
    assert read.slaves == view.slaves and read.concerns == view.concerns
    assert json.loads(spell_view(read)) == told


@pytest.mark.parametrize(
    ("cluster", "word", "severity"),
    [
        (make_cluster(), "training", Severity.GOOD),
        (make_cluster("gone", "left"), "left", Severity.PLAIN),
        (make_cluster("gone", "ended"), "left", Severity.PLAIN),
        (make_cluster("gone", "silent"), "gone", Severity.ATTENTION),
        (make_cluster("gone", "gave_up"), "gone", Severity.ATTENTION),
        (make_cluster("gone", "silent", reads=True), "left", Severity.PLAIN),
        (make_cluster(heard_s=4.0), "training", Severity.GOOD),
        (make_cluster(heard_s=4.1), "silent", Severity.ATTENTION),
        (make_cluster(cause="follows"), "following", Severity.GOOD),
        (make_cluster(quarantined=True), "quarantined", Severity.ATTENTION),
        (make_cluster("idle", "stalled"), "idle", Severity.ATTENTION),
        (make_cluster("idle", "stalled", trainer="starting"), "starting", Severity.PLAIN),
        (make_cluster("idle", "stalled", trainer="dead"), "stopped", Severity.ATTENTION),
        (make_cluster("idle", trainer="dead", remarks={"crash": "1 of 3"}), "crashing", Severity.ATTENTION),
        (
            make_cluster("idle", trainer="dead", remarks={"crash": "1 of 3", "gated": "x"}),
            "crashing",
            Severity.ATTENTION,
        ),
        (make_cluster("idle", trainer="dead", remarks={"gated": "1 of 3"}), "stopped", Severity.ATTENTION),
        (make_cluster(gated="norm 9 above 3"), "training", Severity.ATTENTION),
    ],
)
def test_a_cluster_has_a_word(cluster: ClusterView, word: str, severity: Severity) -> None:
    judged = make_run({"west": cluster}).clusters["west"]
    assert (judged.word, judged.severity) == (word, severity)


@pytest.mark.parametrize(
    ("slave", "word", "severity"),
    [
        (make_slave(), "ready", Severity.GOOD),
        (make_slave("lost", "silent"), "lost", Severity.BROKEN),
        (make_slave("restoring", "loads"), "restoring", Severity.ATTENTION),
        (make_slave(heard_s=None, since_s=9.0), "silent", Severity.ATTENTION),
        (make_slave(disk_free=4, disk_total=100), "ready", Severity.ATTENTION),
        (make_slave(disk_free=5, disk_total=100), "ready", Severity.GOOD),
        (make_slave(mirror=MirrorView(failing=True, reason="full")), "ready", Severity.ATTENTION),
    ],
)
def test_a_slave_has_a_word(slave: SlaveView, word: str, severity: Severity) -> None:
    judged = make_run(slaves={"ps0": slave}).slaves["ps0"]
    assert (judged.word, judged.severity) == (word, severity)


def test_silence_is_counted_from_the_last_heartbeat() -> None:
    """Or from when it came, or this master's start, for a slave of which it has heard nothing."""
    late, unheard = make_slave(heard_s=9.0), replace(make_slave(heard_s=None, since_s=200.0), heartbeat=None)
    came, new = replace(unheard, since_s=5.0), replace(unheard, since_s=2.0)
    slaves = make_run(slaves={"late": late, "unheard": unheard, "came": came, "new": new}).slaves
    assert {name: s.why for name, s in slaves.items()} == {
        "late": "no heartbeat for 9 s; it was ready",
        "unheard": "no heartbeat for 100 s; it was ready",
        "came": "no heartbeat for 5 s; it was ready",
        "new": "",
    }


def test_a_slave_that_restores_says_how_far_it_is() -> None:
    """Bytes, rate and an estimate, beside the reason: for `dips status` and the page alike."""
    work = WorkProgress("reads v4@r9", 7_000_000_000, 28_500_000_000, 100e6)
    slave = make_slave("restoring", "loads", "loads v4@r9", work=work)
    why = make_run(slaves={"ps0": slave}).slaves["ps0"].why
    assert why == "loads v4@r9; reads v4@r9: 7.00 of 28.50 GB at 100 MB/s, 215 s left"
    stuck = replace(work, bytes_per_s=0.0)
    assert make_run(slaves={"ps0": make_slave("lost", "silent", work=stuck)}).slaves["ps0"].why == "serves v3@r3"
    assert stuck.describe_progress() == "reads v4@r9: 7.00 of 28.50 GB at 0 MB/s, nothing moves"


def test_a_plain_cause_needs_no_sentence() -> None:
    """What the word says is not said twice; what it does not say is."""
    run = make_run({"a": make_cluster("pushing", "pushes", "pushing"), "b": make_cluster("training", "skipped", "x")})
    assert (run.clusters["a"].why, run.clusters["b"].why) == ("", "x")
    assert make_run(slaves={"s": make_slave()}).slaves["s"].why == ""


@pytest.mark.parametrize(
    ("told", "concerns"),
    [
        ({}, []),
        ({"journal": JournalView(), "track": TrackView(("wandb",)), "on_version": VersionProcessView()}, []),
        ({"ledger_mirror": LedgerMirrorView(), "lease": LeaseView("a", True, 1.0)}, []),
        ({"lease": LeaseView("a", False, 1.0, failing=True)}, []),
        ({"journal": JournalView(writing=False)}, ["journal"]),
        ({"track": TrackView(("wandb",), True, "no wandb")}, ["track"]),
        ({"on_version": VersionProcessView(red=True)}, ["on_version"]),
        ({"ledger_mirror": LedgerMirrorView(red=True)}, ["mirror of the ledger"]),
        ({"lease": LeaseView("a", True, 1.0, failing=True)}, ["lease"]),
        (
            {"lease": LeaseView("a", True, 1.0, standbys=(StandbyView("b", True), StandbyView("c", False)))},
            ["standby c"],
        ),
        ({"pace_warning": "too short"}, ["pace"]),
        ({"untuned": ("outer.lr",)}, ["not tuned, though the ledger has it"]),
    ],
)
def test_what_asks_for_a_look(told: dict[str, Any], concerns: list[str]) -> None:
    """Each part of a run that fails, once; none of what it does not have."""
    assert [concern.who for concern in make_run(**told).concerns] == concerns


def test_who_asks_for_a_look_says_why() -> None:
    """A crash is told by what its agent remarks; a version's process with the version that it failed at, if any."""
    crashing = make_cluster("idle", trainer="dead", remarks={"crash": "1 of 3", "gated": "x"})
    first, second = (
        make_run({"west": crashing}, on_version=VersionProcessView(version=version, red=True, reason="exit 1"))
        for version in (None, "v1@r1")
    )
    assert [c.what for c in first.concerns] == ["crashing: 1 of 3; x", "none yet: exit 1"]
    assert second.concerns[1].what == "v1@r1: exit 1"


def test_peers_of_a_run_that_has_ended_ask_for_nothing() -> None:
    gone = {"west": make_cluster("gone", "silent")}, {"ps0": make_slave("lost", "silent")}
    assert [(c.severity, c.who) for c in make_run(*gone).concerns] == [
        (Severity.BROKEN, "ps0"), (Severity.ATTENTION, "west"),
    ]  # fmt: skip
    assert make_run(*gone, finished="v3@r3").concerns == ()


def test_a_part_that_fails_and_still_works_is_not_broken() -> None:
    """A slave that is silent and ready, and snapshots that lag behind: rounds go on."""
    run = make_run(
        slaves={"ps0": make_slave(heard_s=9.0)},
        durability=DurabilityView(state=DurabilityState.DEGRADED, reason="slow"),
    )
    assert [(c.severity, c.who) for c in run.concerns] == [
        (Severity.ATTENTION, "ps0"), (Severity.ATTENTION, "snapshots"),
    ]  # fmt: skip


def test_a_cluster_sees_itself_and_how_far_the_run_is() -> None:
    """Neither others, nor slaves, nor what operators do."""
    run = make_run({"a": make_cluster(), "b": make_cluster(heard_s=9.0)}, untuned=("outer.lr",))
    seen = narrow_view(run, "a")
    assert seen.clusters == {"a": run.clusters["a"]} and (seen.head, seen.slaves) == ("v3@r3", {})
    assert run.concerns and seen.concerns == () and seen.untuned == ()


def test_the_gravest_concern_comes_first() -> None:
    stopped = DurabilityView(state=DurabilityState.STOPPED, reason="disk full")
    run = make_run({"west": make_cluster(heard_s=9.0)}, durability=stopped, rollback=RollbackView(3, "waits"))
    assert [(c.severity, c.who) for c in run.concerns] == [
        (Severity.BROKEN, "snapshots"), (Severity.BROKEN, "rollback"), (Severity.ATTENTION, "west"),
    ]  # fmt: skip
