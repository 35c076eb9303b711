"""The state machine of a master: events in, effects out (docs/architecture.md#states). No clock, no socket, no thread.

Legal moves are in enums.py, the state in run_state.py and entities.py, handlers of events in slaves.py, clusters.py,
push_pull.py and round.py. This file holds the tables that bring them together: the handler of each event, the
continuation of each order that all slaves have answered, and the next deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dips.errors import Corrupt
from dips.ids import PullId, PushId, VersionId
from dips.protocol import (
    clusters,
    durability,
    events,
    operator,
    push_pull,
    rebalancing,
    round,
    seeding,
    slaves,
    transfers,
    view,
)
from dips.protocol.alignment import WindowTiming
from dips.protocol.effects import Effect, Progress
from dips.protocol.entities import Fanout
from dips.protocol.enums import ClusterStanding, FanoutKind, SlaveState
from dips.protocol.gates import find_gate
from dips.protocol.heartbeats import LiveTransfers
from dips.protocol.manifest import Manifest
from dips.protocol.options import Options
from dips.protocol.records import LedgerState
from dips.protocol.round import finish_if_time_is_over
from dips.protocol.rules import find_merge, find_step
from dips.protocol.run_state import RunState

Continuation = Callable[[RunState, Fanout], None]


def _nothing_follows(run: RunState, fanout: Fanout) -> None:
    """Do nothing: no step follows this order."""


def _on_push_opened(run: RunState, fanout: Fanout) -> None:
    if push_pull.on_push_opened(run, fanout):
        round.extend_open_window(run)
    transfers.reorder_pushes(run)


# The continuation of an order of each kind, once every slave has answered it.
CONTINUATIONS: dict[FanoutKind, Continuation] = {
    FanoutKind.OPEN_PUSH: _on_push_opened,
    FanoutKind.OPEN_PULL: push_pull.on_pull_opened,
    FanoutKind.MEASURE: round.on_push_measured,
    FanoutKind.FOLD: round.on_push_folded,
    FanoutKind.APPLY: round.on_version_applied,
    FanoutKind.PERSIST: round.on_version_persisted,
    FanoutKind.PERSIST_LATE: durability.on_late_snapshot_answered,
    FanoutKind.COMMIT: push_pull.on_slaves_flipped,
    FanoutKind.PING: slaves.on_ping_answered,
    FanoutKind.OPEN_SEED: seeding.on_seed_opened,
    FanoutKind.KEEP_SEED: seeding.on_seed_kept,
    FanoutKind.STANDALONE: _nothing_follows,
}


def _on_order_answered(run: RunState, event: events.OrderAnswered) -> None:
    fanout = slaves.take_answer(run, event)
    if fanout is not None:
        CONTINUATIONS[fanout.kind](run, fanout)


def _on_push_staged(run: RunState, event: events.PushStaged) -> None:
    if not seeding.take_staged(run, event):
        push_pull.on_push_staged(run, event)


def _on_push_refused(run: RunState, event: events.PushRefused) -> None:
    if not seeding.take_refused(run, event):
        push_pull.on_push_refused(run, event)


def _on_blind(run: RunState, event: events.Blind) -> None:
    """Shift every deadline by the time in which the master did not run (docs/rationale.md#12)."""
    run.started += event.gap_s
    run.slot_queue.shift_times(event.gap_s)
    run.durability.again_at += event.gap_s
    if run.round is not None:
        run.round.closes += event.gap_s
    run.transfers.shift_times(event.gap_s)
    if run.seed is not None:
        run.seed.deadline += event.gap_s
    if run.rebalance is not None:
        run.rebalance.deadline += event.gap_s
    for cluster in run.clusters.values():
        if cluster.requested_at is not None:
            cluster.requested_at += event.gap_s
            run.follow_cluster(cluster)
    run.emit_note("blind", gap_s=f"{event.gap_s:.3f}")


def _on_tick(run: RunState, event: events.Ticked) -> None:
    """Do nothing by itself: deadlines are checked after every event."""


HANDLERS: dict[type[events.Event], Callable[[RunState, Any], None]] = {
    events.SlaveRegistered: slaves.on_slave_registered,
    events.MirrorReported: durability.on_mirror_reported,
    events.SlaveSilent: slaves.on_slave_silent,
    events.OrderAnswered: _on_order_answered,
    events.OrderFailed: slaves.on_order_failed,
    events.PushStaged: _on_push_staged,
    events.PushRefused: _on_push_refused,
    events.ClusterJoined: clusters.on_cluster_joined,
    events.ClusterLeft: clusters.on_cluster_left,
    events.ClusterSilent: clusters.on_cluster_silent,
    events.TokensReported: clusters.on_tokens_reported,
    events.TrainerChanged: clusters.on_trainer_changed,
    events.BandwidthMeasured: clusters.on_bandwidth_measured,
    events.ProtocolTold: clusters.on_protocol_told,
    events.TransferAwaited: transfers.on_transfer_awaited,
    events.RangesRequested: clusters.on_ranges_requested,
    events.PushRequested: push_pull.on_push_requested,
    events.PushFinished: push_pull.on_push_finished,
    events.PushAborted: push_pull.on_push_aborted,
    events.RoundAwaited: push_pull.on_round_awaited,
    events.PullRequested: push_pull.on_pull_requested,
    events.PullFinished: push_pull.on_pull_finished,
    events.ProbeAsked: clusters.on_probe_asked,
    events.OperatorAsked: operator.on_operator_asked,
    events.OperatorReported: operator.on_operator_reported,
    events.ClusterExpelled: clusters.on_cluster_expelled,
    events.Blind: _on_blind,
    events.Ticked: _on_tick,
    **dict.fromkeys(operator.REQUESTS, operator.on_request_asked),
}


def _next_deadline(run: RunState) -> float:
    due = min(run.transfers.next_deadline(), durability.retry_deadline(run))
    if run.seed is not None:
        due = min(due, run.seed.deadline)
    if run.rebalance is not None:
        due = min(due, run.rebalance.deadline)
    if run.round is not None:
        return min(due, round.window_deadline(run, run.round))
    if run.targets.wall_s and not run.finished:
        return min(due, run.started + run.targets.wall_s)
    return due


class Coordinator:
    """All decisions of a master, beginning with the state of a ledger. `now` is the master's monotonic clock, in
    seconds.
    """

    def __init__(self, state: LedgerState, manifest: Manifest, options: Options, now: float) -> None:
        _load_plugins(options)
        self._run = RunState(state, manifest, options, now)
        self._due: float | None = None  # the next deadline, cached until the next step
        self._live: LiveTransfers | None = None  # one object for all slaves as long as nothing changes

    def step(self, event: events.Event, now: float) -> list[Effect]:
        """Process one event; return the effects to carry out, in order."""
        run = self._run
        run.now, run.out, self._due = now, [], None
        HANDLERS[type(event)](run, event)
        if type(event) is not events.Blind:
            push_pull.expire_pushes(run)
            push_pull.expire_pulls(run)
            finish_if_time_is_over(run)
            durability.persist_head_if_due(run)
            round.advance_round(run)
            if run.roster.draining:
                operator.settle_drains(run)
            if run.seed is not None:
                seeding.settle_seed(run)
            if run.rebalance is not None:
                rebalancing.settle_rebalance(run)
            if run.roster.garbage:
                slaves.delete_garbage(run)
        return run.out

    @classmethod
    def from_state(cls, state: object) -> Coordinator:
        """Return a Coordinator with the state that `capture_state` gave, as decoded by codec.py; raise Corrupt if it is
        none.
        """
        if not isinstance(state, RunState):
            raise Corrupt(f"expected the state of a Coordinator, got {type(state).__name__}")
        made = cls.__new__(cls)
        made._run, made._due, made._live = state, None, None
        return made

    def capture_state(self) -> object:
        """Return the whole state, not copied: it must be encoded (codec.py) before the next step."""
        return self._run

    def next_deadline(self) -> float:
        """Return when to send Ticked if no event comes before; inf if nothing is due."""
        if self._due is None:
            self._due = _next_deadline(self._run)
        return self._due

    # ---- read-only, for the runtime ----

    @property
    def term(self) -> int:
        return self._run.term

    @property
    def proven_term(self) -> int:
        """Return the term for clusters to follow; 0 until slaves have proven that the ledger is not an old copy."""
        return self._run.term if self._run.is_proven else 0

    @property
    def compute_s(self) -> float:
        """Return how long a slave may be silent in an order that computes, as an operator has last set it."""
        return self._run.options.timing.compute_s

    def progress(self) -> Progress:
        return self._run.read_progress()

    def head(self) -> VersionId:
        return self._run.head

    def cluster_standing(self, cluster: str, inc: int) -> tuple[ClusterStanding, PushId | None, PullId | None]:
        """Return (standing, open push, open pull) of an incarnation, for the answer to its heartbeat."""
        run = self._run
        standing = run.cluster_standing(cluster, inc)
        if standing is not ClusterStanding.LIVE:
            return standing, None, None
        found = run.clusters[cluster]
        return standing, found.push.id if found.push else None, found.pull.id if found.pull else None

    def slave_live(self, slave: str, sinc: int) -> tuple[bool, int, LiveTransfers]:
        """Return (whether the slave must register, number of the last order given, the live transfers), for heartbeat
        answers.
        """
        run = self._run
        known = run.slaves.get(slave)
        register = known is None or known.sinc != sinc or known.state not in (SlaveState.READY, SlaveState.DRAINING)
        return register, run.orders.last_number, self.live_transfers()

    def live_transfers(self) -> LiveTransfers:
        """Return all live transfers; the same object until they change."""
        book, seed, live = self._run.transfers, self._run.seed, self._live
        if live is None or live.number != book.number:
            pushes = (*book.pushes, *(() if seed is None else (seed.push,)))
            live = LiveTransfers(book.number, pushes, tuple(p.id for p in book.pulls.values()))
            self._live = live
        return live

    def mirror_wanted(self) -> tuple[VersionId, ...]:
        """Return the versions that slaves' mirrors should hold: see durability.py."""
        return durability.wanted_versions(self._run)

    def window_timing(self) -> WindowTiming:
        """Return when the last window opened, the number of slots and the size of a push, for `alignment.py`."""
        run = self._run
        return WindowTiming(run.opened_at, run.roster.slots, run.push_bytes(run.options.codec))

    def explain_unready(self) -> str:
        """Return why no outer step is possible now, whatever clusters do; empty if one is."""
        return view.explain_unready(self._run)

    def build_view(self, now: float) -> view.RunView:
        """Return the Coordinator's part of the view of the run: every state with its cause."""
        return view.build_view(self._run, now)


def _load_plugins(options: Options) -> None:
    """Load the user's rules and gates; raise ConfigError at start, not in the first round, if one cannot be loaded."""
    find_merge(options.outer.merge)
    find_step(options.outer.step)
    for gate in options.penalty.gates:
        find_gate(gate)
