"""The common part of pushes and pulls: the ranks' progress and rate."""

from __future__ import annotations

from dips.client.agent.phases import SyncPhase
from dips.client.agent.state import AgentState
from dips.client.ipc.messages import Answer, Halt, Noted, TransferProgress
from dips.ids import PullId, PushId


def begin_transfer(s: AgentState) -> None:
    """Reset the counters before the ranks move bytes."""
    s.sync.moved, s.sync.halt = (0, 0), ""
    s.sync.moved_at, s.sync.moving_s = s.now, 0.0


def record_moved(s: AgentState, nbytes: int, total: int, idle_s: float = 0.0) -> None:
    """Record the bytes moved over all ranks; `idle_s` is the time before this report in which none moved."""
    sync = s.sync
    if s.settings.fragments == 1 or nbytes > sync.moved[0]:  # between two fragments the link is idle, not slow
        sync.moving_s += max(0.0, s.now - sync.moved_at - max(0.0, idle_s))
    sync.moved, sync.moved_at = (nbytes, total), s.now
    sync.bytes_per_s = nbytes / max(sync.moving_s, 1e-3)


def on_transfer_progress(s: AgentState, message: TransferProgress) -> Answer:
    """Record the progress; halt a transfer that the master has dropped or that belongs to another incarnation."""
    if s.sync.ordered != moving_transfer(s):
        return Halt(f"{s.sync.ordered} is over")
    record_moved(s, message.nbytes, message.total, message.idle_s)
    return Halt(s.sync.halt) if s.sync.halt else Noted()


def moving_transfer(s: AgentState) -> PushId | PullId | None:
    """Return the push or pull that the ranks are moving now, or None."""
    if s.sync.phase is SyncPhase.PUSHING:
        return s.push_id
    return s.pull_id if s.sync.phase is SyncPhase.PULLING else None


def halt_dropped(s: AgentState, live: tuple[PushId | None, PullId | None]) -> None:
    """Halt a transfer that was moving at the last heartbeat and that the master no longer lists."""
    moving = moving_transfer(s)
    if moving is not None and moving == s.sync.moving_at_heartbeat and moving not in live:
        s.sync.halt = f"the master has dropped {moving}"


def fragment_interval(s: AgentState) -> int:
    """Return the inner steps between two fragments; 0: all move at once, or the pace is not known yet.

    The fragments of a push take half of the time between two pushes, those of its pull the other half, so that there
    are as many rounds as without fragments.
    """
    fragments = s.settings.fragments
    return s.pace.round_steps // (2 * fragments) if fragments > 1 else 0


def push_idle_s(s: AgentState) -> float:
    """Return the least time for which a push is open without moving: overlapping ranks ask, freeze and ask again.

    Rather too short than too long: no window waits for a push that is due after the window's end.
    """
    if not s.settings.overlap:
        return 0.0
    look, interval = s.pace.steps_until_ask, fragment_interval(s)
    between = (s.settings.fragments - 1) * (interval - look)  # one question per fragment counts as moving
    return (look + max(look, between)) * s.pace.step_s
