"""Changes of the run's targets (`dips set`): its stop values and epochs, which are in no digest.

The ledger keeps each change, so every later master has it; clusters learn it from the answers to their heartbeats, from
which `outer.progress` is computed. A finished run goes on: the same row takes back its end.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

from dips.errors import ConfigError
from dips.protocol.effects import Extended, Failed, Refused
from dips.protocol.events import ExtensionAsked
from dips.protocol.options import Targets
from dips.protocol.records import RunExtended
from dips.protocol.run_state import RunState
from dips.protocol.settlement import find_end

KEYS = tuple(field.name for field in fields(Targets))
FRACTIONS = frozenset({"wall_s"})  # the other keys are whole numbers


def on_extension_asked(run: RunState, event: ExtensionAsked) -> None:
    """Legal any time; a repetition changes nothing and is answered with the present targets."""
    if run.refuse_unproven(event.req):
        return
    try:
        targets = _change_targets(run.targets, event)
    except ConfigError as error:
        run.reply_to(event.req, Failed(ConfigError, str(error)))
        return
    if targets == run.targets and not run.finished:
        run.reply_to(event.req, Extended(targets, None))
    elif refusal := _find_refusal(run, targets):
        run.reply_to(event.req, Refused(0.0, refusal))
    else:
        _extend_run(run, targets, event.req)


def _extend_run(run: RunState, targets: Targets, req: int) -> None:
    resumed, run.finished = run.finished, None
    run.targets = targets
    run.ranges.add_epochs(targets.epochs)
    run.emit_record(RunExtended(targets, resumed, run.now))
    run.emit_note("run_extended", **asdict(targets), resumed=resumed or "no")
    run.reply_to(req, Extended(targets, resumed))


def _change_targets(present: Targets, event: ExtensionAsked) -> Targets:
    """Return the changed targets; raise ConfigError on an unknown key or an impossible value."""
    for change in event.changes:
        if change.key not in KEYS:
            raise ConfigError(f"expected one of {', '.join(KEYS)}, got {change.key!r:.80}")
        if change.key not in FRACTIONS and change.value != int(change.value):
            raise ConfigError(f"{change.key}: expected a whole number, got {change.value:g}")
        value: Any = change.value if change.key in FRACTIONS else int(change.value)
        present = replace(present, **{change.key: value})
    return present


def _find_refusal(run: RunState, targets: Targets) -> str:
    """Return why these cannot be the run's targets; empty if they can."""
    if run.targets.tokens and not targets.tokens:
        return "tokens: 0 would put outer.progress, and learning rates with it, back to their beginning"
    if targets.epochs < run.targets.epochs:
        return f"epochs: expected at least the present {run.targets.epochs}, got {targets.epochs}"
    if targets.epochs > run.targets.epochs and not run.ranges.per_epoch:
        return "epochs: this run leases no data (shared.data.ranges is 0): clusters bring their own"
    end = find_end(run, targets)
    so_far = f"{run.tokens_accepted:,} tokens and {run.head.version:,} outer steps so far"
    return f"then the run would end at once: {end} ({so_far}); name a larger target" if end else ""
