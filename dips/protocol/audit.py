"""The audit: every request of an operator becomes a row of the ledger, with its outcome.

The shell passes the caller (the name in its certificate) and the wall-clock time. The row is emitted before the answer,
so no change is acknowledged that the ledger does not have. A repetition of a pending request that changes nothing makes
no row. Requests that change nothing share one budget of rows, requests that the shell denied another, so that neither
can fill the ledger nor displace the rows of real changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dips.dataclass import dataclass, replace
from dips.protocol import drain, extension, quarantine, rollback, seeding, tuning
from dips.protocol.audit_budget import AuditBudget
from dips.protocol.bounded_text import cut_text
from dips.protocol.effects import Effect, Failed, Pending, Refused, Reply, Result
from dips.protocol.events import (
    DrainAsked,
    ExtensionAsked,
    OperatorAsked,
    OperatorReported,
    OperatorRequest,
    QuarantineAsked,
    ReadmissionAsked,
    RollbackAsked,
    SeedAsked,
    TuningAsked,
)
from dips.protocol.records import OperatorActed
from dips.protocol.run_state import RunState
from dips.protocol.tunable import describe_changes


@dataclass(frozen=True, slots=True)
class AuditedRequest:
    """One kind of request: its handler, and the action and arguments for its row."""

    action: str
    handle: Callable[[RunState, Any], None]
    describe: Callable[[Any], str]


def _describe_targets(event: ExtensionAsked) -> str:
    return " ".join(f"{change.key}={change.value:.15g}" for change in event.changes)


def _describe_quarantine(event: QuarantineAsked) -> str:
    return f"{event.cluster} --reason {event.reason!r}"


REQUESTS: dict[type, AuditedRequest] = {
    ReadmissionAsked: AuditedRequest("readmit", quarantine.on_readmission_asked, lambda e: e.cluster),
    DrainAsked: AuditedRequest("drain", drain.on_drain_asked, lambda e: e.slave),
    ExtensionAsked: AuditedRequest("extend", extension.on_extension_asked, _describe_targets),
    TuningAsked: AuditedRequest("tune", tuning.on_tuning_asked, lambda e: describe_changes(e.changes)),
    QuarantineAsked: AuditedRequest(
        "quarantine", quarantine.on_quarantine_asked, lambda e: f"{e.cluster} --reason {e.reason!r}"
    ),
    RollbackAsked: AuditedRequest("rollback", rollback.on_rollback_asked, lambda e: str(e.version)),
    SeedAsked: AuditedRequest("seed", seeding.on_seed_asked, lambda e: f"process {e.seeder}"),
}


def on_operator_asked(run: RunState, event: OperatorAsked) -> None:
    """Legal any time; carries the request out and inserts its row before its answer."""
    begin = len(run.out)
    audited = REQUESTS[type(event.request)]
    audited.handle(run, replace(event.request, req=event.req))
    at, result = _find_reply(run.out, begin)
    changed = any(not isinstance(effect, Reply) for effect in run.out[begin:])
    if isinstance(result, Pending) and not changed:
        return  # a repetition: the first row has it
    said, refused = _describe_result(result)
    row = OperatorActed(event.caller, audited.action, audited.describe(event.request), said, refused, event.wall)
    if not row.arguments:
        return  # a request that names nothing only reads
    if (made := _make_row(run, row, None if changed else run.idle_rows)) is not None:
        run.out.insert(at, made)


def on_operator_reported(run: RunState, event: OperatorReported) -> None:
    """Record a call that the shell refused, or a change that the shell made by itself (an edited run file)."""
    row = OperatorActed(event.caller, event.action, event.arguments, event.outcome, event.refused, event.wall)
    if (made := _make_row(run, row, run.denied_rows if event.refused else None)) is not None:
        run.emit_record(made)


def _make_row(run: RunState, row: OperatorActed, budget: AuditBudget | None) -> OperatorActed | None:
    """Return the row with its texts cut to their limits; None if its budget has no room."""
    if budget is not None and not budget.take_row(run.now):
        return None
    passed_over = run.idle_rows.take_passed_over() + run.denied_rows.take_passed_over()
    caller, action, arguments, outcome = map(cut_text, (row.caller, row.action, row.arguments, row.outcome))
    return OperatorActed(caller, action, arguments, outcome, row.refused, row.wall, passed_over)


def _find_reply(out: list[Effect], begin: int) -> tuple[int, Result | None]:
    for at in range(begin, len(out)):
        effect = out[at]
        if isinstance(effect, Reply):
            return at, effect.result
    return len(out), None


def _describe_result(result: Result | None) -> tuple[str, bool]:
    """Return (outcome in words, whether it was refused)."""
    match result:
        case Refused() | Failed():
            return f"refused: {result.reason if isinstance(result, Refused) else result.message}", True
        case Pending():
            return f"begun: {result.reason}", False
        case _:
            return "done", False


def spell_request(request: OperatorRequest) -> tuple[str, str]:
    """Return (action, arguments) for the audit row of a request that was refused before it came to the Coordinator."""
    audited = REQUESTS[type(request)]
    return audited.action, cut_text(audited.describe(request))
