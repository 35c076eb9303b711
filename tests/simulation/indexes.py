"""What the Coordinator keeps beside its state, to be found at once, held against a look at everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from dips.protocol.durability import _lacks, _stays_for
from dips.protocol.effects import SlaveAddress
from dips.protocol.entities import Push
from dips.protocol.enums import ClusterState, SlaveState
from dips.protocol.events import Event
from dips.protocol.heartbeats import LiveTransfers
from dips.protocol.rollback import _can_offer
from dips.protocol.run_state import RunState
from dips.protocol.transfer_book import Timers
from dips.sim.master import MasterProcess
from dips.sim.world import World
from tests.simulation.checks import Invariant

EVERY = 64  # steps of a master; a seed has some 1,500


class IndexInvariant(Invariant):
    """Every index says what a scan would give; the number of the list of what is live rises with each change."""

    number = 12  # what is forgotten here waits for ever

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._steps = 0
        self._lists: dict[int, LiveTransfers] = {}  # by term, the last one

    def after_step(self, master: MasterProcess, event: Event) -> None:
        self._steps += 1
        if not master.trusted:
            return  # a restored old copy may begin a term anew
        run, live = master.coordinator._run, master.coordinator.live_transfers()
        before = self._lists.get(run.term)
        if before is not live:
            self._lists[run.term] = live
            if before is not None and before.number >= live.number:
                self.fail(f"the list of what is live is {live.number} after {before.number}")
        if self._steps % EVERY == 0:
            book, seed = run.transfers, () if run.seed is None else (run.seed.push,)
            if {*live.pushes, *live.pulls} != {*book.pushes, *seed, *(p.id for p in book.pulls.values())}:
                self.fail(f"list {live.number} is told, and live is something else")
            for wrong in index_differences(run):
                self.fail(f"after {type(event).__name__}: {wrong}")


def index_differences(run: RunState) -> Iterator[str]:
    """Each index that is not what a scan gives."""
    for what, index, scan in (*_of_transfers(run), *_of_slaves(run), *_of_orders(run), *_of_the_rest(run)):
        if index != scan:
            yield f"{what}: the index has {index!r:.300}, a scan gives {scan!r:.300}"


Compared = tuple[str, Any, Any]  # what it is, by the index, by a scan


def _of_transfers(run: RunState) -> Iterator[Compared]:
    book, clusters = run.transfers, run.clusters.values()
    moving = [c.push for c in clusters if c.push is not None and not c.push.committed]
    committed = [*(run.round.pushes if run.round else ()), *run.waiting]
    settled = [*run.round.folded, *run.round.gated] if run.round else []
    held = [*moving, *(p for p in committed if all(p is not s for s in settled))]
    pulls = [c.pull for c in clusters if c.pull is not None]
    yield "slots", {k: id(p) for k, p in book.pushes.items()}, {p.id: id(p) for p in held}
    yield "pulls", {k: id(p) for k, p in book.pulls.items()}, {p.id.cluster: id(p) for p in pulls}
    yield "pull ranks", book.pull_ranks, sum(p.ranks for p in pulls)
    yield from _timers("push deadlines", book.push_deadlines, {p.id.cluster: p.deadline for p in moving})
    yield from _timers("pull deadlines", book.pull_deadlines, {p.id.cluster: p.deadline for p in pulls})
    yield "tokens in the window", run.tokens_in_window, sum(p.tokens for p in committed)
    tokens = {c.name: c.tokens_in_window for c in clusters if c.tokens_in_window}
    yield "tokens of each cluster in the window", tokens, _per_cluster(committed)


def _per_cluster(pushes: list[Push]) -> dict[str, int]:
    tokens = Counter[str]()
    for push in pushes:
        tokens[push.id.cluster] += push.tokens
    return {cluster: count for cluster, count in tokens.items() if count}


def _of_slaves(run: RunState) -> Iterator[Compared]:
    roster, slaves = run.roster, run.slaves.values()
    ready = [s for s in slaves if s.state is SlaveState.READY]
    yield "missing", set(roster.missing), set(run.slaves) - {s.name for s in ready}
    yield "unasked", set(roster.unasked), {s.name for s in slaves if s.offer is None}
    named = [s for s in slaves if s.offer is not None and run.head not in s.unread]
    lacking = {s.name for s in named if not _can_offer(run, s, run.head)}
    yield "lacking the head", set(roster.lacking), lacking
    yield "garbage of slaves that are not ready", set(roster.garbage) & set(roster.missing), set()
    registered = [s for s in slaves if s.name not in roster.unregistered]
    yield "slots of slaves", roster.slots, min((s.slots for s in registered), default=0)
    addresses = tuple(SlaveAddress(s.name, s.sinc, s.lanes, s.layers, s.key) for s in slaves)
    yield "addresses", roster.addresses or addresses, addresses
    target = run.mirror_target
    behind = {s.name for s in ready if target is not None and _lacks(s, target)}
    yield "mirrors behind", behind - set(roster.perhaps_behind), set()
    yield "mirrored", run.mirrored, dict(Counter(v for s in slaves for v in _stays_for(run, s)))


def _of_orders(run: RunState) -> Iterator[Compared]:
    book = run.orders
    fanouts = {id(f): f for f, _ in book.orders.values()}
    registered = {id(f): (kind, first) for kind, known in book.fanouts.items() for first, f in known.items()}
    yield "fanouts", registered, {key: (f.kind, f.first) for key, f in fanouts.items()}
    counts = Counter(id(f) for f, _ in book.orders.values())
    yield "orders of fanouts", {key: f.unanswered for key, f in fanouts.items()}, dict(counts)
    numbers = {number: f.waiting.get(order.slave) for number, (f, order) in book.orders.items()}
    yield "orders that are waited for", numbers, {number: number for number in book.orders}


def _of_the_rest(run: RunState) -> Iterator[Compared]:
    training = [c for c in run.clusters.values() if c.state is ClusterState.TRAINING and c.moving]
    due = {}
    for c in training:
        known = c.push_interval_s is not None and c.requested_at is not None
        due[c.name] = c.requested_at + c.push_interval_s + run.moving_s(c) if known else float("-inf")  # type: ignore[operator]
    yield from _timers("next pushes", run.next_pushes, due)
    queue = run.slot_queue
    expected = {name: w.asked_at + w.kept_s for name, w in queue.waiters.items() if w.place in queue.expected}
    yield from _timers("who is expected", queue.lateness, expected)
    yield "queue", queue.expected, sorted(queue.waiters[name].place for name in expected)
    rows = run.penalty._rows.values()
    norms = sorted(r.last_norm for r in rows if r.accepted > 0 and r.last_norm > 0)
    yield "last norms", run.penalty._norms.ordered, norms
    ranges = run.ranges
    held = [n for lease in ranges._leases.values() for n in lease.ranges]
    yield "leased ranges", ranges.leased, len(held)


def _timers(what: str, timers: Timers, times: dict[str, float]) -> Iterator[Compared]:
    yield what, timers.at, times
    yield f"first of {what}", timers.first_at(), min(times.values(), default=float("inf"))
