"""A whole run in one process: a Coordinator, and slaves that answer every order at once. Tests move its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import BegunRange, Intervals
from dips.protocol.effects import Apply, Commit, Effect, Fold, Measure, OpenPull, Order, Persist, Reply
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import Options, PenaltyOptions, TimingOptions
from dips.protocol.records import LedgerState, RunRow, ScoreHistory, VersionCommitted, VersionRow
from dips.protocol.releases import PROTOCOL
from dips.protocol.view import RunView
from tests.push_digest import digest_push

OPTIONS = Options(penalty=PenaltyOptions(gates=()), timing=TimingOptions(window_s=10.0))
MANIFEST = Manifest((Layer("l", (Parameter("l.w", (1000,)),)),))  # one layer: a push's norm is one number


class ScriptedRun:
    """One slave `s`; `acc_norm` and `norms` are what it measures. Orders whose type is in `held` wait in `orders`."""

    def __init__(
        self,
        options: Options = OPTIONS,
        slots: int = 4,
        history: ScoreHistory = ScoreHistory((), ()),
        manifest: Manifest = MANIFEST,
        protocol: int = PROTOCOL,
    ) -> None:
        self.manifest, layers = manifest, tuple(range(len(manifest.layers)))
        row = RunRow("r", "c", manifest.to_json(), (("s", layers),), ("0" * 32,) * len(layers), (100.0,) * len(layers))
        row = replace(row, protocol=protocol)
        versions = (VersionRow(GENESIS, GENESIS, True, 0, False),)
        state = LedgerState(row, 1, 1, versions, (), (), (), (), history, (), Intervals(), None)
        self.first, self.now, self._req = state, 0.0, 0
        self.machine = Coordinator(state, manifest, options, self.now)
        self.effects: list[Effect] = []  # every effect, in order
        self.orders: deque[Order] = deque()
        self.held: set[type] = set()
        self.norms: dict[str, float] = {}  # of a cluster's next push; 1.0 by default
        self.finite = True
        self.acc_norm = 1.0
        self.slots, self._seqs = slots, dict[str, int]()
        self.ask(ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), slots, ""))

    # ---- events ----------------------------------------------------------------------------------------------------

    def step(self, event: Any) -> list[Effect]:
        """Give one event and let the slave answer; return all that was decided."""
        begin = len(self.effects)
        self._decide(event)
        self.answer()
        return self.effects[begin:]

    def ask(self, question: Any) -> Any:
        """Put a question; return its answer."""
        self._req += 1
        effects = self.step(replace(question, req=self._req))
        return next(e.result for e in effects if isinstance(e, Reply) and e.req == self._req)

    def answer(self) -> None:
        """The slave answers every order that is not held."""
        while ready := [o for o in self.orders if type(o.body) not in self.held]:
            for order in ready:
                self.orders.remove(order)
                self._decide(ev.OrderAnswered(order.slave, order.sinc, order.number, self._answer(order.body)))

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.step(ev.Ticked())

    def _decide(self, event: Any) -> None:
        effects = self.machine.step(event, self.now)
        self.effects += effects
        self.orders += [e for e in effects if isinstance(e, Order)]

    def _answer(self, body: Any) -> Any:
        layers = len(self.manifest.layers)
        match body:
            case Measure():
                square = self.norms.get(body.push.cluster, 1.0) ** 2
                return ev.Measured((square / layers,) * layers, self.finite, digest=digest_push(body.push))
            case Fold():
                return ev.Folded((self.acc_norm**2 / layers,) * layers)
            case Apply():
                return ev.Prepared(body.version)
            case Persist():
                return ev.Persisted(body.version, "digest")
            case OpenPull(momentum=True):
                return ev.Pinned(("θ", "m") * layers)
        return ev.Done()

    # ---- clusters --------------------------------------------------------------------------------------------------

    def train(self, *clusters: str, process: str = "p") -> None:
        """Each joins, and asks for the next transfer under seq 1."""
        for cluster in clusters:
            self.ask(ev.ClusterJoined(0, cluster, process, "r", self.manifest.digest, "c", take_over=True))
            self._seqs[cluster] = 0
            self.pull(cluster)

    def inc(self, cluster: str) -> int:
        return int(self.view.clusters[cluster].inc)

    def next_push(self, cluster: str) -> PushId:
        self._seqs[cluster] += 1
        return PushId(cluster, self.inc(cluster), self._seqs[cluster])

    def pull(self, cluster: str) -> None:
        self._seqs[cluster] += 1
        pull = PullId(cluster, self.inc(cluster), self._seqs[cluster])
        self.ask(ev.PullRequested(0, pull, 1))
        self.ask(ev.PullFinished(0, pull, True))

    def open_push(self, cluster: str, base: VersionId | None = None, ranks: int = 1, idle_s: float = 0.0) -> PushId:
        """A push that has its slot and moves."""
        push = self.next_push(cluster)
        self.ask(ev.PushRequested(0, push, base or self.head, ranks, idle_s=idle_s))
        return push

    def commit(
        self,
        push: PushId,
        tokens: int = 100,
        steps: int = 1,
        ranges: Iterable[int] = (),
        begun: BegunRange | None = None,
    ) -> Any:
        """The push is staged, and committed; return what its cluster is answered."""
        self.step(ev.PushStaged("s", self.view.slaves["s"].sinc, push, 4))
        return self.ask(ev.PushFinished(0, push, tokens, steps, tuple(ranges), 2.5, begun))

    def push(
        self,
        cluster: str,
        tokens: int = 100,
        steps: int = 1,
        ranges: Iterable[int] = (),
        begun: BegunRange | None = None,
    ) -> PushId:
        push = self.open_push(cluster)
        self.commit(push, tokens, steps, ranges, begun)
        return push

    def outcome(self, push: PushId) -> Any:
        """What the round said of a push; the pull that came with it is over, and its cluster trains."""
        result = self.ask(ev.RoundAwaited(0, push))
        pull = PullId(push.cluster, push.inc, push.seq)
        self.ask(ev.PullFinished(0, pull, True))
        return result

    # ---- what is seen ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> RunView:
        return self.machine.build_view(self.now)

    @property
    def head(self) -> VersionId:
        return VersionId.parse(self.view.head)

    def all_of(self, kind: type) -> list[Any]:
        """Every effect of this type so far, and the body of every order of it."""
        return [e for e in self.effects if isinstance(e, kind)] + [
            e.body for e in self.effects if isinstance(e, Order) and isinstance(e.body, kind)
        ]

    @property
    def committed(self) -> list[VersionCommitted]:
        return self.all_of(VersionCommitted)

    @property
    def applied(self) -> list[Apply]:
        return self.all_of(Apply)

    @property
    def flips(self) -> list[Commit]:
        return self.all_of(Commit)
