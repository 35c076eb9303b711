"""A whole run in one process, for its cost: the real MasterCore, Coordinator and Judge under scripted peers.

Every slave answers every order at once and in turn. Clusters are known from the ledger, as after a restart of the
master. After each event the core is asked all that a daemon's loop asks it: tick, actions, when to wake. Only that is
timed, by kind of event.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import Any
from zlib import crc32

from dips.ids import GENESIS, PullId, PushId
from dips.master.core import HeartbeatReply, MasterCore, WriteRecords
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import Intervals
from dips.protocol.effects import Apply, Effect, Fold, Measure, Order, OrderBody, Pending, Persist, Refused, Reply
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import Event
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.membership import Judge
from dips.protocol.options import Options, TimingOptions
from dips.protocol.records import LedgerState, PeerRow, Record, RunRow, ScoreHistory, VersionRow

EVENT_S = 20e-6  # time that passes with each event: the master has enough to do
LAYER_NUMEL = 1_000
STEP_S = 1.0
TOKENS = 100  # of a push, and of an inner step


def layers_of(slave: int, layers: int, slaves: int) -> tuple[int, ...]:
    return tuple(range(slave, layers, slaves))


class ScaleRun:
    """`clusters` train, `slaves` serve v0@r0."""

    def __init__(self, clusters: int, slaves: int, layers: int, slots: int = 4) -> None:
        self.manifest = Manifest(tuple(Layer(f"l{i}", (Parameter("w", (LAYER_NUMEL,)),)) for i in range(layers)))
        self.clusters = [f"c{i:04}" for i in range(clusters)]
        self.slaves = [f"s{i:04}" for i in range(slaves)]
        placement = tuple((name, layers_of(i, layers, slaves)) for i, name in enumerate(self.slaves))
        self.layers = {name: len(held) for name, held in placement}
        row = RunRow("scale", "digest", self.manifest.to_json(), placement, ("0" * 32,) * layers, (1.0,) * layers)
        versions, peers = (VersionRow(GENESIS, GENESIS, True, 0, False),), tuple(map(_peer, self.clusters))
        state = LedgerState(row, 1, 1, versions, peers, (), (), (), ScoreHistory((), ()), (), Intervals(), None)
        timing = TimingOptions(window_s=1.0, lease_heartbeats=100_000, hang_s=1e6)  # nobody is silent, or hangs
        options = Options(timing=timing)
        self.now = 100.0
        self.coordinator = Coordinator(state, self.manifest, options, self.now)
        self.steps: list[tuple[float, Event, list[Effect]]] = []  # for the journal; kept only if `journaled`
        self.journaled = False
        judge = Judge.from_state(options.timing, state, self.now)
        self.core = MasterCore(self.coordinator, judge, options.timing, self.now, step=self._step)
        self.took: defaultdict[str, float] = defaultdict(float)  # seconds by kind of event
        self.count: Counter[str] = Counter()
        self.orders: deque[Order] = deque()
        self.answers: dict[int, Any] = {}
        self.records: list[Record] = []
        self._req = 0
        self.slots = slots
        for slave in self.slaves:
            self.ask(self._registers(slave))
        self.answer_orders()

    def _step(self, event: Event, now: float) -> list[Effect]:
        effects = self.coordinator.step(event, now)
        if self.journaled:
            self.steps.append((now, event, effects))
        return effects

    # ---- events ----------------------------------------------------------------------------------------------------

    def deliver(self, event: Any, kind: str = "") -> None:
        """Give the core an event or a heartbeat, and let it do what is due."""
        self.now += EVENT_S
        now, core = self.now, self.core
        begun = time.perf_counter()
        core.on_wake(now)
        if isinstance(event, ClusterHeartbeat | SlaveHeartbeat):
            core.on_heartbeat(self._req, event, now)
        elif event is not None:
            core.take_event(event, now)
        core.tick(now)
        actions = core.take_actions()
        while actions and isinstance(actions[-1], WriteRecords):
            self.records += actions.pop().records  # type: ignore[union-attr]
            core.on_written()
            actions += core.take_actions()
        core.sleep_until(now)
        name = kind or type(event).__name__
        self.took[name] += time.perf_counter() - begun
        self.count[name] += 1
        for action in actions:
            if isinstance(action, Order):
                self.orders.append(action)
            elif isinstance(action, Reply):
                self.answers[action.req] = action.result
            elif isinstance(action, HeartbeatReply):
                self.answers[action.req] = action.answer

    def ask(self, question: Any) -> int:
        """Put a question; its answer will lie in `answers`."""
        self._req += 1
        self.deliver(replace(question, req=self._req))
        return self._req

    def wait_for(self, req: int, most_s: float = 20.0) -> Any:
        """Let time pass until a question is answered, and its orders too."""
        until = self.now + most_s
        while req not in self.answers or isinstance(self.answers[req], Pending):
            assert self.now < until, f"no answer to question {req} in {most_s:g} s"
            if not self.answer_orders():
                self.now = max(self.now, min(self.core.next_deadline(), self.now + 0.5))
                self.deliver(None, "tick")
        return self.answers.pop(req)

    def answer_orders(self) -> int:
        """The slaves carry out what they were ordered; return how many orders that were."""
        done = 0
        while self.orders:
            order = self.orders.popleft()
            answer = self._answer(order.slave, order.body)
            kind = f"{type(order.body).__name__} answered"
            self.deliver(ev.OrderAnswered(order.slave, order.sinc, order.number, answer), kind)
            done += 1
        return done

    def _answer(self, slave: str, body: OrderBody) -> ev.Answer:
        match body:
            case Measure():
                return ev.Measured((1.0,) * self.layers[slave], True, digest=crc32(str(body.push).encode()))
            case Fold():
                return ev.Folded((1.0,) * self.layers[slave])
            case Apply():
                return ev.Prepared(body.version)
            case Persist():
                return ev.Persisted(body.version, "d" * 32)
        return ev.Done()

    def _registers(self, slave: str) -> ev.SlaveRegistered:
        lanes = tuple(f"10.0.0.1:{7000 + lane}" for lane in range(2))
        return ev.SlaveRegistered(
            0, slave, "nonce", "scale", "10.0.0.1:7000", lanes, 0, GENESIS, None, (GENESIS,), self.slots, ""
        )

    # ---- lives -----------------------------------------------------------------------------------------------------

    def open_push(self, cluster: str, seq: int, ranks: int = 8) -> Any:
        """A push up to its Grant, or its Refused."""
        push = PushId(cluster, 1, seq)
        return self.wait_for(self.ask(ev.PushRequested(0, push, self.coordinator_head, ranks, TOKENS, STEP_S)))

    @property
    def coordinator_head(self) -> Any:
        return self.coordinator._run.head

    def commit_push(self, cluster: str, seq: int) -> None:
        push = PushId(cluster, 1, seq)
        for slave in self.slaves:
            self.deliver(ev.PushStaged(slave, 1, push, 4_000))
        self.beat_cluster(cluster, seq * 10)
        self.wait_for(self.ask(ev.PushFinished(0, push, TOKENS, 1, (), 2.5)))

    def live_push(self, cluster: str, seq: int, ranks: int = 8) -> None:
        """The whole life of a push: request to outcome, and the pull after it."""
        granted = self.open_push(cluster, seq, ranks)
        assert not isinstance(granted, Refused), granted
        self.commit_push(cluster, seq)
        outcome = self.wait_for(self.ask(ev.RoundAwaited(0, PushId(cluster, 1, seq))))
        assert str(outcome.kind) == "accepted", outcome
        self.wait_for(self.ask(ev.PullFinished(0, PullId(cluster, 1, seq), True)))
        self.answer_orders()

    def abort_push(self, cluster: str, seq: int) -> None:
        """It gives up its push, or its place in the queue."""
        self.answers.pop(self.ask(ev.PushAborted(0, PushId(cluster, 1, seq), "over")))

    def open_pull(self, cluster: str, seq: int, ranks: int = 8) -> Any:
        return self.wait_for(self.ask(ev.PullRequested(0, PullId(cluster, 1, seq), ranks)))

    # ---- heartbeats ------------------------------------------------------------------------------------------------

    def beat_cluster(self, cluster: str, steps: int, aligned: int = 0) -> Any:
        """One heartbeat of a cluster; return its answer."""
        kind = "aligned heartbeat of a cluster" if aligned else "heartbeat of a cluster"
        self._req += 1
        self.deliver(
            ClusterHeartbeat(
                cluster, 1, TrainerState.TRAINING, Activity.INNER, 1, steps, 0, 0, 2.5, GENESIS, 0, 0, 1e6,
                aligned, STEP_S, steps % 100, steps * TOKENS,
            ),
            kind,
        )  # fmt: skip
        return self.answers.pop(self._req)

    def beat_slave(self, slave: str, **known: Any) -> Any:
        """One heartbeat of a slave, which knows what `known` says; return its answer."""
        self._req += 1
        beat = SlaveHeartbeat(slave, 1, 1, GENESIS, (), (), 0, 0, 0, 0, 0.0, 0.0, **known)
        self.deliver(beat, "heartbeat of a slave")
        return self.answers.pop(self._req)

    def beat_all(self, steps: int) -> None:
        """Everybody is alive."""
        for cluster in self.clusters:
            self.beat_cluster(cluster, steps)
        for slave in self.slaves:
            self.beat_slave(slave)


def _peer(name: str) -> PeerRow:
    return PeerRow(name, 1, "nonce", False)
