"""Answers to requests for a slot: admitted, or refused with a place in the queue (admission.py) and a time to ask
again.
"""

from __future__ import annotations

from statistics import median

from dips.protocol.admission import SlotAnswer, SlotAsk
from dips.protocol.effects import Refused
from dips.protocol.entities import Cluster
from dips.protocol.enums import ClusterCause
from dips.protocol.events import PushRequested
from dips.protocol.run_state import RunState

LEAST_RETRY_S = 0.2  # a complete push is still to be measured and folded before its slot is free
RETRY_SHARE = 0.1  # of a push's time: how often the first in the queue asks while a slot is about to be free


def refuse_slot(run: RunState, cluster: Cluster, event: PushRequested) -> Refused | None:
    """Return Refused with the cluster's place in the queue; None if it may take a slot."""
    missing, slots = run.why_missing(), run.roster.slots
    free = 0 if missing else slots - len(run.transfers.pushes)
    longest = run.options.timing.busy_retry_s
    if run.penalty.penalty_row(cluster.name).quarantined or cluster.name in run.quarantined:
        run.slot_queue.leave_queue(cluster.name)
        if free > run.slot_queue.count_waiting(run.now):
            return None
        return Refused(longest, f"waits for {missing}" if missing else "quarantined: it pushes while no other waits")
    ask = SlotAsk(cluster.name, event.tokens, event.step_s, run.moving_s(cluster) + event.idle_s)
    answer = run.slot_queue.request_slot(ask, free, longest, run.options.timing.transfer_s, run.now)
    if answer.admitted:
        return None
    if missing:
        return Refused(longest, f"waits for {missing}", answer.ahead + 1, answer.waiting)
    reason = _explain_wait(run, answer, slots)
    run.set_cluster_state(cluster, cluster.state, ClusterCause.AWAITS_SLOT, reason)
    return Refused(_retry_s(run, answer, slots), reason, answer.ahead + 1, answer.waiting)


def _retry_s(run: RunState, answer: SlotAnswer, slots: int) -> float:
    """Return when to ask again: the first in the queue when an open push is due, and often once one is late."""
    longest = run.options.timing.busy_retry_s
    soonest = min(_free_in_s(run), default=longest) if answer.ahead < slots else longest
    return min(longest, max(LEAST_RETRY_S, soonest))


def _free_in_s(run: RunState) -> list[float]:
    """Return, for each open push with known bandwidth, when its slot should be free or when to look again."""
    found = list[float]()
    for push in run.transfers.pushes.values():
        moving_s = run.moving_s(run.clusters[push.id.cluster])
        if push.due and moving_s:
            late = push.committed or push.due <= run.now
            found.append(RETRY_SHARE * moving_s if late else push.due - run.now)
    return found


def _explain_wait(run: RunState, answer: SlotAnswer, slots: int) -> str:
    text = f"waits for a slot: {_ordinal(answer.ahead + 1)} of {answer.waiting}"
    times = [s for p in run.transfers.pushes.values() if (s := run.moving_s(run.clusters[p.id.cluster]))]
    if not times:
        return text
    frees = sorted([0.0] * max(0, slots - len(run.transfers.pushes)) + _free_in_s(run))
    about_s = frees[min(answer.ahead % slots, len(frees) - 1)] if frees else 0.0
    return f"{text}, about {max(1.0, about_s + answer.ahead // slots * median(times)):.0f} s"


def _ordinal(n: int) -> str:
    ending = "th" if n // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
