"""Which θ a push is measured against and folded from: `outer.anchor`.

The present one, or with `base` that which its cluster had pulled. Slaves keep older versions only where memory that
they have anyway is free (versions.py), so each says in its answer to Measure whether it held the one that was asked
for. Where only some did, the push is measured again, against the present θ: no push has two anchors, and what was
decided so stays so. A base that is no ancestor of θ is not asked for.
"""

from __future__ import annotations

from dips.ids import VersionId
from dips.protocol.entities import Fanout, Push
from dips.protocol.enums import AnchorRule
from dips.protocol.events import Measured
from dips.protocol.roster import name_some
from dips.protocol.run_state import RunState


def choose_anchor(run: RunState, push: Push) -> VersionId | None:
    """The older version that a push should be measured against; None: the head."""
    push.anchor = None
    if run.options.outer.anchor is not AnchorRule.BASE or push.why_unanchored or push.base == run.head:
        return None
    if not run.is_ancestor(push.base):
        _give_up(run, push, "which is no ancestor of it")
        return None
    push.anchor = push.base
    return push.anchor


def settle_anchor(run: RunState, push: Push, fanout: Fanout) -> bool:
    """Take note of what the slaves held; False: some did and some did not, so it must be measured again."""
    if push.anchor is None:
        return True
    lacking = [name for name, a in fanout.answers.items() if isinstance(a, Measured) and not a.anchored]
    if lacking:
        push.anchor = None
        _give_up(run, push, f"no longer held by {name_some(lacking)}")
    return len(lacking) in (0, len(fanout.answers))


def explain_anchor(push: Push) -> str:
    """For people; empty where there was nothing to choose."""
    return f"against its base {push.anchor}" if push.anchor is not None else push.why_unanchored


def _give_up(run: RunState, push: Push, reason: str) -> None:
    push.why_unanchored = f"against {run.head}, not its base {push.base}, {reason}"
    run.emit_note("push_unanchored", push=push.id, base=push.base, reason=reason)
