"""The window in which a round takes commits: its length, the pushes that it waits for, and its end
(docs/rationale.md#24).

A window ends when its time is over, or earlier when no push is expected any more. With `timing.window: adaptive` its
time may grow to at most MOST_LENGTHS times its length, for clusters that are due soon, as long as the mean wait of all
pushes in it is no longer than a fixed window's for its first push.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from dips.protocol.entities import Cluster, Push, Round
from dips.protocol.enums import ROUND_MOVES, RoundState, WindowRule, check_move
from dips.protocol.records import RoundReserved
from dips.protocol.run_state import RunState

WINDOW_SHARE = 0.05  # of the median time between a cluster's pushes
IDLE_SHARE = 0.2  # of the time in which a push is open without moving: inner steps and fragments end at any time in it
LEAST_WINDOW_S = 1.0
LATE_SHARE = 0.1  # of a push's estimated time: waited for that much longer; a wrong estimate must not cost every round
MOST_LENGTHS = 4.0  # of its length, the most that an adaptive window may last: a round must end
SPREAD_SHARE = 0.5  # of a window: added to the time when a cluster is due by its last pushes


def window_s(run: RunState) -> float:
    """Return the length of a window: as configured, or a share of the clusters' own pace."""
    if run.options.timing.window_s is not None:
        return run.options.timing.window_s
    paces = [pace for c in run.clusters.values() if c.live for pace in c.paces]
    if not paces:
        return LEAST_WINDOW_S
    pace = median(paces)
    idle_s = max((push.idle_s for push in run.transfers.pushes.values()), default=0.0)
    return max(LEAST_WINDOW_S, WINDOW_SHARE * pace + IDLE_SHARE * min(idle_s, pace))


def can_open(run: RunState) -> bool:
    """Whether a push waits for a round, and every slave can take one."""
    free = run.round is None and run.flipping is None and not run.finished
    return free and bool(run.waiting) and not run.roster.missing


def open_window(run: RunState) -> None:
    """Begin a round; its number is reserved by a row before it is used."""
    number = run.next_round
    run.next_round += 1
    run.emit_record(RoundReserved(number, run.now))
    state = check_move(ROUND_MOVES, RoundState.IDLE, RoundState.COLLECTING, f"round {number}")
    lasts_s = window_s(run)
    run.round = Round(number, state, "window open", run.now, run.now + lasts_s, window_s=lasts_s)
    run.opened_at = run.now
    run.emit_note("round_opened", round=number, head=run.head, window_s=f"{lasts_s:.3f}")


def extend_open_window(run: RunState) -> None:
    """Extend the open window if it should be longer, after a push was granted or committed."""
    if run.round is not None and run.round.state is RoundState.COLLECTING:
        extend_window(run, run.round)


def extend_window(run: RunState, r: Round) -> None:
    """Extend an adaptive window; never to less than before, nor to more than MOST_LENGTHS."""
    if run.options.timing.window is WindowRule.ADAPTIVE:
        r.closes = max(r.closes, min(_adapt(run, r), r.opened + MOST_LENGTHS * r.window_s))


def _adapt(run: RunState, r: Round) -> float:
    """Return the arrival of the last due cluster for which the mean wait of all pushes is at most `window_s`."""
    latest = r.opened + MOST_LENGTHS * r.window_s
    arrivals = [push.committed_at for push in r.pushes]
    total, count, end = sum(arrivals), len(arrivals), r.closes
    for due in sorted(due for due in _predict_arrivals(run) if run.now < due <= latest):
        total, count = total + due, count + 1
        if due - total / count <= r.window_s:
            end = due + SPREAD_SHARE * r.window_s
    return end


def _predict_arrivals(run: RunState) -> Iterator[float]:
    """Iterate over the expected arrivals of pushes under way and of those of training clusters; -inf is unknown."""
    for push in run.transfers.uncommitted_pushes():
        if push.due and run.clusters[push.id.cluster].moving:
            yield push.due
    yield from run.next_pushes.at.values()


def explain_round(run: RunState, r: Round) -> str:
    """Describe what the round does and waits for, for people."""
    return f"{r.state}: {describe_round(run, r)}"


def describe_round(run: RunState, r: Round) -> str:
    """Describe the round beyond its state: the commits and the time left of an open window, else its reason."""
    if r.state is not RoundState.COLLECTING:
        return r.reason
    late = f", not before {run.head} is on every disk" if run.durability.late is not None else ""
    return f"{r.count} committed, closes in {max(0.0, r.closes - run.now):.1f} s{late}"


def is_over(run: RunState, r: Round) -> bool:
    """Whether the window's time is over, or no further push will come before its end."""
    if run.now >= r.closes:
        return True
    return run.next_pushes.first_at() > r.closes and not any(_find_expected(run, r))


def window_deadlines(run: RunState) -> Iterator[float]:
    """Iterate over the end of the window and the times when each awaited push will be late."""
    r = run.round
    if r is None or r.state is not RoundState.COLLECTING or r.current is not None:
        return
    if r.folded and run.durability.late is not None:
        return  # it ends when that version is on the disks, not by time
    yield r.closes
    for cluster, push in _find_expected(run, r):
        if push.due:
            yield _late_at(run, cluster, push)


def _find_expected(run: RunState, r: Round) -> Iterator[tuple[Cluster, Push]]:
    """Iterate over the pushes under way that will arrive before the window ends."""
    for push in run.transfers.uncommitted_pushes():
        cluster = run.clusters[push.id.cluster]
        if cluster.moving and _comes_in_time(run, cluster, push, r):
            yield cluster, push


def _comes_in_time(run: RunState, cluster: Cluster, push: Push, r: Round) -> bool:
    """Whether the window waits for the push: only if it is due in it, and not once it is late, so that a slow link
    delays few.
    """
    return not push.due or (push.due <= r.closes and run.now < _late_at(run, cluster, push))


def _late_at(run: RunState, cluster: Cluster, push: Push) -> float:
    return push.due + max(LEAST_WINDOW_S, LATE_SHARE * run.moving_s(cluster), push.idle_s)
