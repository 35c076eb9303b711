"""The status merges what the Coordinator knows with what the newest heartbeats reported."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan

from dips.ids import PushId, VersionId
from dips.master.status import build_status, to_json
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.heartbeats import ClusterHeartbeat, OrderWait, SlaveHeartbeat, Transfer

CLUSTER = ClusterHeartbeat(
    "a", 1, TrainerState.TRAINING, Activity.INNER, 1, 640, 100, 0, 2.5, VersionId(1, 1), 0, 0, 1e6
)
SLAVE = SlaveHeartbeat(
    "s", 2, 1, VersionId(1, 1), (PushId("a", 1, 3),), (Transfer("a", 1, 3, True, 5, 9),), 10, 20, 1, 2, 0.1, 0.2,
    waits=(OrderWait(7, "Persist", 31.0),),
)  # fmt: skip


def test_heartbeats_stand_beside_the_view() -> None:
    """A peer's state and reason come from the Coordinator; steps, loss, bytes and the heartbeat's age from its
    heartbeat.
    """
    view = {"term": 3, "clusters": {"a": {"state": "training"}}, "slaves": {"s": {"state": "ready", "slots": 2}}}
    merged = build_status(view, {("cluster", "a"): (CLUSTER, 10.0), ("slave", "s"): (SLAVE, 11.0)}, 12.0)
    assert merged["term"] == 3
    cluster, slave = merged["clusters"]["a"], merged["slaves"]["s"]
    assert (cluster["state"], cluster["inner_steps"], cluster["loss"], cluster["heard_s"]) == (
        "training",
        640,
        2.5,
        2.0,
    )
    assert (slave["slots"], slave["pool_limit"], slave["heard_s"], slave["staged"]) == (2, 20, 1.0, ["a/1#3"])
    assert slave["transfers"][0]["nbytes"] == 5
    assert json.loads(to_json(merged))["slaves"]["s"]["waits"] == [{"number": 7, "kind": "Persist", "for_s": 31.0}]
    assert view["clusters"] == {"a": {"state": "training"}}  # the view is not written into


def test_tokens_lost_add_up_over_incarnations() -> None:
    """What earlier incarnations lost is the Coordinator's to tell, what the present one lost its heartbeat's."""
    view = {"clusters": {"a": {"tokens_lost": 7}}}
    merged = build_status(view, {("cluster", "a"): (replace(CLUSTER, tokens_lost=5), 0.0)}, 1.0)
    assert merged["clusters"]["a"]["tokens_lost"] == 12


def test_a_peer_without_a_heartbeat_and_a_heartbeat_without_a_peer() -> None:
    """A known peer without a heartbeat shows its view alone; a cluster and a slave of one name are two."""
    view = {"clusters": {"s": {"state": "gone"}}, "slaves": {}}
    merged = build_status(view, {("slave", "s"): (SLAVE, 1.0)}, 2.0)
    assert merged["clusters"] == {"s": {"state": "gone"}} and merged["slaves"] == {}


def test_json_is_json() -> None:
    """NaN and infinity, which JSON does not know, become null."""
    assert json.loads(to_json({"loss": nan, "norms": [inf, 1.0], "n": 1, "ok": True})) == {
        "loss": None,
        "norms": [None, 1.0],
        "n": 1,
        "ok": True,
    }
