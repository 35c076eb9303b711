"""The machine that decides: events in, effects out (design.md section 5). One owner, no clock, no socket, no thread.

Legal moves are in moves.py, the state in world.py, what each event means in slaves.py, clusters.py, pushes.py, pulls.py
and round.py. This file only brings them together: which event goes where, what follows when all slaves have answered an
order, and when to look again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from dips.errors import Corrupt
from dips.ids import PullId, PushId
from dips.protocol import asking, clusters, drain, durability, pulls, pushes, readmit, round, slaves, view
from dips.protocol.effects import Effect, Progress
from dips.protocol.events import (
    BandwidthMeasured,
    Blind,
    ClusterJoined,
    ClusterLeft,
    ClusterSilent,
    TokensReported,
    DrainAsked,
    Event,
    OrderAnswered,
    OrderFailed,
    PullFinished,
    PullRequested,
    PushAborted,
    PushFinished,
    PushRefused,
    PushRequested,
    PushStaged,
    RangesRequested,
    ReadmissionAsked,
    RoundAwaited,
    SlaveRegistered,
    SlaveSilent,
    Ticked,
    TrainerChanged,
)
from dips.protocol.manifest import Manifest
from dips.protocol.moves import SlaveState
from dips.protocol.options import Options
from dips.protocol.alignment import WindowTiming
from dips.protocol.records import LedgerState
from dips.protocol.world import Chorus, World

Continue = Callable[[World, Chorus], None]


def _nothing_follows(w: World, chorus: Chorus) -> None:
    """The order was an end in itself."""


def _push_opened(w: World, chorus: Chorus) -> None:
    pushes.opened(w, chorus)
    asking.reorder(w)


# What follows when every slave has answered an order of this kind.
CONTINUE: dict[str, Continue] = {
    "open_push": _push_opened,
    "open_pull": pulls.opened,
    "measure": round.measured,
    "fold": round.folded,
    "apply": round.applied,
    "persist": round.persisted,
    "persist_late": durability.persisted_late,
    "commit": round.flipped,
    "ping": slaves.heard,
    "done": _nothing_follows,
}


def _order_answered(w: World, event: OrderAnswered) -> None:
    chorus = slaves.answered(w, event)
    if chorus is not None:
        CONTINUE[chorus.kind](w, chorus)


def _cluster_silent(w: World, event: ClusterSilent) -> None:
    if w.standing(event.cluster, event.inc) == "live":
        reason = f"silent for {event.silent_s:.1f} s"
        clusters.end(w, w.clusters[event.cluster], reason, event.tokens_consumed, event.tokens_lost)


def _cluster_told(w: World, event: TokensReported) -> None:
    cluster = w.clusters.get(event.cluster)
    if cluster is not None and cluster.inc == event.inc:
        cluster.consumed, cluster.lost = event.tokens_consumed, event.tokens_lost


def _cluster_left(w: World, event: ClusterLeft) -> None:
    clusters.left(w, event.req, event.cluster, event.inc, event.tokens_consumed)


def _blind(w: World, event: Blind) -> None:
    """Nobody was looking: every deadline moves by the gap (why.md 12)."""
    w.started += event.gap_s
    w.durability.again_at += event.gap_s
    if w.round is not None:
        w.round.closes += event.gap_s
    for cluster in w.clusters.values():
        for transfer in (cluster.push, cluster.pull):
            if transfer is not None:
                transfer.deadline += event.gap_s
        if cluster.requested_at is not None:
            cluster.requested_at += event.gap_s
    w.note("blind", gap_s=f"{event.gap_s:.3f}")


def _ticked(w: World, event: Ticked) -> None:
    """Time has passed; what that means is decided after every event."""


HANDLERS: dict[type[Event], Callable[[World, Any], None]] = {
    SlaveRegistered: slaves.registered,
    SlaveSilent: slaves.silent,
    OrderAnswered: _order_answered,
    OrderFailed: slaves.failed,
    PushStaged: pushes.staged,
    PushRefused: pushes.refused,
    ClusterJoined: clusters.joined,
    ClusterLeft: _cluster_left,
    ClusterSilent: _cluster_silent,
    TokensReported: _cluster_told,
    TrainerChanged: clusters.trainer_changed,
    BandwidthMeasured: clusters.bandwidth_measured,
    RangesRequested: clusters.ranges_requested,
    PushRequested: pushes.requested,
    PushFinished: pushes.finished,
    PushAborted: pushes.aborted,
    RoundAwaited: pushes.awaited,
    PullRequested: pulls.requested,
    PullFinished: pulls.finished,
    ReadmissionAsked: readmit.asked,
    DrainAsked: drain.asked,
    Blind: _blind,
    Ticked: _ticked,
}


class Coordinator:
    """All decisions of a master, from one ledger state on. `now` is the master's monotonic clock, in seconds."""

    def __init__(self, state: LedgerState, manifest: Manifest, options: Options, now: float) -> None:
        self._world = World(state, manifest, options, now)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        w = self._world
        w.now, w.out = now, []
        HANDLERS[type(event)](w, event)
        if not isinstance(event, Blind):
            pushes.expire(w)
            pulls.expire(w)
            round.finish_if_due(w)
            durability.persist_if_due(w)
            round.advance(w)
            drain.settle(w)
            slaves.clean(w)
        return w.out

    @classmethod
    def restored(cls, state: object) -> Coordinator:
        """Be what `state` was taken of (codec.read of its text); raise Corrupt if it is no state."""
        if not isinstance(state, World):
            raise Corrupt(f"expected the state of a Coordinator, got {type(state).__name__}")
        made = cls.__new__(cls)
        made._world = state
        return made

    def state(self) -> object:
        """Everything that it knows, to be spelled by codec.py before the next step."""
        return self._world

    def next_deadline(self) -> float:
        """When to send Ticked if nothing happens before; inf if nothing is due."""
        w = self._world
        due = [push.deadline for push in w.uncommitted()] + [pull.deadline for pull in w.open_pulls()]
        if w.options.stop.wall_s and not w.finished and w.round is None:
            due.append(w.started + w.options.stop.wall_s)
        return min((*due, *round.due_at(w), *durability.due_at(w)), default=inf)

    # ---- read-only, for the runtime ----

    @property
    def term(self) -> int:
        return self._world.term

    def progress(self) -> Progress:
        return self._world.progress()

    def cluster_standing(self, cluster: str, inc: int) -> tuple[str, PushId | None, PullId | None]:
        """("live" | "gone" | "fenced", its open push, its open pull): what a beat is answered."""
        w = self._world
        standing = w.standing(cluster, inc)
        if cluster in w.clusters and not w.proven:
            return "live", None, None  # an old ledger may not know this life: see World.unproven
        if standing != "live":
            return standing, None, None
        found = w.clusters[cluster]
        return standing, found.push.id if found.push else None, found.pull.id if found.pull else None

    def slave_live(self, slave: str, sinc: int) -> tuple[bool, int, tuple[PushId, ...], tuple[PullId, ...]]:
        """(must it register?, number of the last order that this list knows, live pushes, live pulls)."""
        w = self._world
        known = w.slaves.get(slave)
        register = known is None or known.sinc != sinc or known.state not in (SlaveState.READY, SlaveState.DRAINING)
        pushes_live = tuple(p.id for p in w.open_pushes())
        return register, w.last_number, pushes_live, tuple(p.id for p in w.open_pulls())

    def window_timing(self) -> WindowTiming:
        """When windows open, and what a push takes: for those who push together (pace.py)."""
        w = self._world
        return WindowTiming(w.opened_at, min((s.slots for s in w.ready_slaves()), default=0), w.model_bytes)

    def view(self, now: float) -> dict[str, Any]:
        """The status as plain data: every state with its reason."""
        return view.view(self._world, now)
