"""The agent's metrics of its cluster: dips_agent_…, read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client.core import Metric

from dips.client.agent.relay import Relay
from dips.client.agent.state import AgentState
from dips.telemetry.metrics import MetricRow, Status, Table, make_families

SELF = (
    MetricRow("dips_agent_incarnation", "inc", "Incarnations of this cluster so far, as its master counts."),
    MetricRow("dips_agent_attempts", "attempt", "Attempts of its training job since the agent started.", counter=True),
    MetricRow("dips_agent_training", "alive", "1 if a trainer is attached."),
    MetricRow("dips_agent_devices", "devices", "Ranks that hold a part of the model."),
    MetricRow("dips_agent_inner_steps", "inner_steps", "Inner steps since the agent started.", counter=True),
    MetricRow("dips_agent_tokens", "tokens", "Tokens trained since the agent started.", counter=True),
    MetricRow("dips_agent_loss", "loss", "Loss of the last inner step."),
    MetricRow("dips_agent_base_version", "base", "Outer steps of the version that it trains on."),
    MetricRow("dips_agent_progress", "progress", "Accepted tokens of the run over its target."),
    MetricRow("dips_agent_relayed_bytes", "relayed", "Passed on for ranks without a way out, both ways.", counter=True),
    MetricRow("dips_agent_relay_connections", "relay_open", "Connections of the relay."),
    MetricRow("dips_agent_relay_refused", "relay_refused", "Connections beyond the most that it serves.", counter=True),
    MetricRow("dips_agent_master_silent_seconds", "silent_s", "Since the master stopped to answer; 0 while it does."),
)
SPENT = (
    MetricRow("dips_agent_seconds", "seconds", "Time by what it went to; all but inner is standstill.", counter=True),
)
WAITED = (MetricRow("dips_agent_wait_seconds", "waited", "One standstill, by its cause.", histogram=True),)
FATE = (MetricRow("dips_agent_tokens_by_fate", "tokens", "Tokens of this incarnation, by what became of them."),)
PIPELINE = (
    MetricRow("dips_agent_pipeline_gear", "gear", "Pieces of each micro-batch of a planned pipeline."),
    MetricRow("dips_agent_pipeline_step_seconds", "step_s", "Of its last step."),
    MetricRow("dips_agent_pipeline_idle", "idle", "Share of its last step in which a device computed nothing."),
)
BY_STAGE = {  # by the field of PlayedStage: label of its keys, and metric
    "seconds": ("action", MetricRow("dips_agent_pipeline_action_seconds", "value", "Computed in its last step.")),
    "idle": ("cause", MetricRow("dips_agent_pipeline_idle_seconds", "value", "Waited in its last step.")),
    "peak_bytes": ("category", MetricRow("dips_agent_pipeline_peak_bytes", "value", "Most held in its last step.")),
}
CHANGES = (MetricRow("dips_agent_inside_changes", "changes", "Changes inside the cluster.", counter=True),)
MOVED = (MetricRow("dips_agent_moved_bytes", "nbytes", "Of pushes and pulls that were carried through.", counter=True),)

TABLES: tuple[Table, ...] = (
    (SELF, ()), (SPENT, ("cause",)), (WAITED, ("cause",)), (FATE, ("fate",)), (MOVED, ("direction",)),
    (PIPELINE, ()), *(((row,), ("stage", label)) for label, row in BY_STAGE.values()), (CHANGES, ("what",)),
)  # fmt: skip


def read_metrics(state: AgentState, now: float) -> dict[str, Any]:
    """Collect the numbers from the state; call it on the thread that owns the core."""
    trainer, member, tally, account = state.trainer, state.membership, state.tally, state.account
    silent_since = member.unreachable_since
    return {
        "inc": member.inc,
        "attempt": trainer.attempt,
        "alive": trainer.alive,
        "devices": trainer.pull_ranks,
        "inner_steps": trainer.inner_steps,
        "tokens": tally.tokens,
        "loss": trainer.loss if trainer.inner_steps else None,
        "base": trainer.base.version if trainer.base else None,
        "progress": state.fraction,
        "silent_s": 0.0 if silent_since is None else now - silent_since,
        "spent": tally.seconds_by_cause(now),
        "waits": tally.waits,
        "moved": dict(tally.moved),
        "pipeline": trainer.pipeline,
        "changes": dict(trainer.inside_changes),
        "fates": {
            "carried": account.carried.tokens,
            "frozen": account.frozen.tokens,
            "accepted": account.accepted,
            "gated": account.gated,
            "lost": account.lost,
        },
    }


def read_relay(relay: Relay | None) -> dict[str, Any]:
    """Return the relay's numbers; empty without a relay."""
    if relay is None:
        return {}
    return {"relayed": relay.passed_bytes, "relay_open": relay.open_connections, "relay_refused": relay.refused}


def collect(status: Status) -> Iterator[Metric]:
    """Convert the numbers of `read_metrics` into metric families."""
    yield from make_families(SELF, [((), status)], ())
    spent = [((cause,), {"seconds": seconds}) for cause, seconds in status["spent"].items()]
    yield from make_families(SPENT, spent, ("cause",))
    waits = [((cause,), {"waited": histogram}) for cause, histogram in status["waits"].items()]
    yield from make_families(WAITED, waits, ("cause",))
    fates = [((fate,), {"tokens": tokens}) for fate, tokens in status["fates"].items()]
    yield from make_families(FATE, fates, ("fate",))
    moved = [((direction,), {"nbytes": nbytes}) for direction, nbytes in status["moved"].items()]
    yield from make_families(MOVED, moved, ("direction",))
    played = status["pipeline"]
    yield from make_families(PIPELINE, [] if played is None else [((), played)], ())
    stages = enumerate(() if played is None else played.stages)
    held = [(str(number), asdict(stage)) for number, stage in stages]
    for name, (label, row) in BY_STAGE.items():
        values = [((number, key), {"value": value}) for number, of in held for key, value in of[name].items()]
        yield from make_families((row,), values, ("stage", label))
    changes = [((what,), {"changes": count}) for what, count in status["changes"].items()]
    yield from make_families(CHANGES, changes, ("what",))
