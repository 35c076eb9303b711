"""Makes judged views of a run, as a master shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dips.protocol.enums import (
    Activity,
    ClusterCause,
    ClusterState,
    OutcomeKind,
    RemarkSubject,
    SlaveCause,
    SlaveState,
    TrainerState,
)
from dips.protocol.heartbeats import ClusterHeartbeat, Remark, SlaveHeartbeat, Transfer
from dips.protocol.view import ClusterView, LastOutcome, MirrorView, RunView, SlaveView
from dips.view.judging import judge_run

HEARTBEAT_S = 2.0
VIEWS_OWN = {"inc", "sinc", "base"}  # though heartbeats have them, too
CLUSTER = ClusterHeartbeat("a", 1, TrainerState.TRAINING, Activity.INNER, 1, 640, 5, 0, 2.5, None, 0, 0, 25e6)
SLAVE = SlaveHeartbeat("s", 1, 1, None, (), (), 10, 20, 100, 50, 0.25, 0.5)


def make_cluster(
    state: str = "training",
    cause: str = "trains",
    reason: str = "training",
    *,
    trainer: str = "training",
    remarks: Mapping[str, str] = {},
    heard_s: float | None = 0.5,
    gated: str | None = None,
    **fields: Any,
) -> ClusterView:
    """`gated`: why its last push was. Other fields are its heartbeat's or the view's, by their names."""
    told = {name: fields.pop(name) for name in list(fields) if hasattr(CLUSTER, name) and name not in VIEWS_OWN}
    said = tuple(Remark(RemarkSubject(subject), text) for subject, text in remarks.items())
    heartbeat = replace(CLUSTER, trainer=TrainerState(trainer), remarks=said, **told)
    last = None if gated is None else LastOutcome(OutcomeKind.GATED, gated)
    return ClusterView(
        ClusterState(state), ClusterCause(cause), reason, heartbeat=heartbeat, heard_s=heard_s, last=last, **fields
    )


def make_slave(
    state: str = "ready",
    cause: str = "serves",
    reason: str = "serves v3@r3",
    *,
    heard_s: float | None = 0.5,
    mirror: MirrorView | None = None,
    transfers: tuple[Transfer, ...] = (),
    **fields: Any,
) -> SlaveView:
    told = {name: fields.pop(name) for name in list(fields) if hasattr(SLAVE, name) and name not in VIEWS_OWN}
    heartbeat = replace(SLAVE, transfers=transfers, **told)
    return SlaveView(
        SlaveState(state), SlaveCause(cause), reason, mirror=mirror, heartbeat=heartbeat, heard_s=heard_s, **fields
    )


def make_run(
    clusters: Mapping[str, ClusterView] | None = None, slaves: Mapping[str, SlaveView] | None = None, **fields: Any
) -> RunView:
    """A run in which one cluster trains and one slave serves, unless others are given."""
    told = {"run": "demo", "term": 1, "uptime_s": 100.0, "head": "v3@r3"} | fields
    clusters = {"west": make_cluster()} if clusters is None else clusters
    slaves = {"ps0": make_slave()} if slaves is None else slaves
    return judge_run(RunView(clusters=clusters, slaves=slaves, **told), {}, 0.0, HEARTBEAT_S)
