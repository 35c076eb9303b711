"""An operator who tunes the run, quarantines and expels clusters at random, and what must be true of it."""

from __future__ import annotations

from functools import partial

from dips.client.agent.membership import HEAL_S
from dips.ids import VersionId
from dips.protocol.events import (
    OperatorReported,
    OperatorRequest,
    QuarantineAsked,
    ReadmissionAsked,
    TuningAsked,
)
from dips.protocol.options import AUTO, TunedOption
from dips.protocol.records import (
    ClusterEnded,
    ClusterQuarantined,
    ClusterReadmitted,
    LedgerState,
    OperatorActed,
    OptionsTuned,
    Record,
    RoundEnded,
    RoundReserved,
    VersionCommitted,
)
from dips.sim.agent import SimAgent
from dips.sim.observer import Observer
from dips.sim.world import World
from dips.transport.tls import LOOK_S
from tests import rules_reference
from tests.simulation.checks import Invariant
from tests.simulation.coverage import EXPELLED

AUTO_RATES = [rules_reference.rate_of(n) for n in range(1, 17)]
QUARANTINED = "quarantined by an operator"  # so begins the reason of a push that was gated for it
TRIES = 4  # in one seed of two
DOWN_S = 8.0  # until an expelled cluster is enrolled again, at most


class TuningOperator(Observer):
    """Acts in half of the seeds; what it forbade it allows again before faults stop.

    When they have stopped, it readmits in every seed whom only an operator may (docs/architecture.md#penalty): nobody
    else would, and a run all of whose clusters are out makes no version.
    """

    def __init__(self, world: World) -> None:
        self.world, self._rng = world, world.chance.generator_for("tuner")
        self.answers: list[object] = []

    def plan(self) -> None:
        quiet_at = self.world.scenario.quiet_at
        for share in (1.0, 1.1):  # the master may be down
            self.world.call_later(share * quiet_at, "the operator looks", self._readmit_broken)
        if self._rng.random() < 0.5:
            return
        for _ in range(TRIES):
            act = self._rng.choice((self._tune, self._tune, self._quarantine, self._expel, self._deny))
            self.world.call_later(0.9 * quiet_at * self._rng.random(), "the operator acts", act)
        for name in self.world.clusters:
            for share in (0.93, 0.97, 1.0, 1.1):  # the master may be down
                self.world.call_later(share * quiet_at, f"{name} is released", partial(self._release, name))

    def _tune(self) -> None:
        rng = self._rng
        drawn = (
            TunedOption("outer.lr", rng.choice((0.3, 0.5, 0.9))),
            TunedOption("outer.momentum", rng.choice((0.5, 0.9))),
            TunedOption("timing.window_s", rng.uniform(0.5, 3.0)),
            TunedOption("penalty.beta", rng.choice((2.0, 4.0))),
            TunedOption("outer.lr", -1.0),
        )
        self._ask(TuningAsked(0, tuple({c.key: c for c in rng.sample(drawn, 2)}.values())))

    def _quarantine(self) -> None:
        self._ask(QuarantineAsked(0, self._rng.choice(list(self.world.clusters)), "a look at its data"))

    def _release(self, cluster: str) -> None:
        self._ask(ReadmissionAsked(0, cluster))

    def _readmit_broken(self) -> None:
        process = self.world.master.process
        for name in self.world.clusters if process is not None and not process.stopped else ():
            if process.coordinator._run.penalty.penalty_row(name).broken:
                self._release(name)

    def _deny(self) -> None:
        process = self.world.master.process
        if process is not None:
            process.put_event(OperatorReported("eve.viewer", "drain", "slave-0", "for operators", True, 0.0))

    def _expel(self) -> None:
        """Its certificate is revoked: its agent ends, or goes on if it is enrolled again soon."""
        name = self._rng.choice(list(self.world.clusters))
        self.world.authority.revoke(name)
        self.world.call_later(DOWN_S * self._rng.random(), f"{name} is enrolled again", partial(self._enroll, name))

    def _enroll(self, cluster: str) -> None:
        self.world.authority.enroll(cluster)
        self.world.clusters[cluster].start()

    def _ask(self, request: OperatorRequest) -> None:
        process = self.world.master.process
        if process is not None:
            process.on_message(request, self.answers.append)


class OperatorInvariant(Invariant):
    """What changed has a row that says who did it; a version's row has numbers that held in its round; nobody's push is
    folded who was quarantined before the round began; a new master knows all of it."""

    number = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        outer = world.options.outer
        self.tuned: dict[str, TunedOption] = {}
        self.quarantined: dict[str, str] = {}
        self.held = {"outer.lr": {outer.lr}, "outer.momentum": {outer.momentum}}  # since the open round was reserved
        self.now = {"outer.lr": outer.lr, "outer.momentum": outer.momentum}
        self.out: frozenset[str] = frozenset()
        self.unsigned: Record | None = None

    def record_written(self, record: Record) -> None:
        if self.unsigned is not None and not isinstance(
            record, ClusterReadmitted
        ):  # one request lifts both quarantines
            self.require(isinstance(record, OperatorActed), f"nobody is named for {self.unsigned}")
            self.unsigned = None
        match record:
            case OptionsTuned():
                self.unsigned = record
                self.tuned |= {change.key: change for change in record.changes}
                for change in record.changes:
                    if change.key in self.now:
                        self.now[change.key] = change.value
                        self.held[change.key].add(change.value)
                self.world.monitor.rare_event_occurred("tuned")
            case ClusterQuarantined():
                self.unsigned = record
                self.quarantined.pop(record.cluster, None)
                if record.reason:
                    self.quarantined[record.cluster] = record.reason
                self.out &= self.quarantined.keys()
            case RoundReserved():
                self.held = {key: {value} for key, value in self.now.items()}
                self.out = frozenset(self.quarantined)
            case VersionCommitted():
                self._check_version(record.version, record)
            case ClusterEnded(reason=reason, open_seq=0) if EXPELLED in reason:
                self.world.monitor.rare_event_occurred("expelled")
        outcomes = record.outcomes if isinstance(record, VersionCommitted | RoundEnded) else ()
        if any(outcome.reason.startswith(QUARANTINED) for outcome in outcomes):
            self.world.monitor.rare_event_occurred("operator_quarantine")

    def agent_exits(self, agent: SimAgent, reason: str) -> None:
        """Whoever is enrolled again within a moment goes on: every process looks at its files once a second."""
        if EXPELLED in reason and agent.inc:
            lasted_s = self.world.authority.revoked_s(agent.name, agent.answered_at)
            self.require(lasted_s >= HEAL_S - LOOK_S, f"{agent.name} ends, revoked for {lasted_s:.1f} s: {reason}")

    def _check_version(self, version: VersionId, record: VersionCommitted) -> None:
        lr, numbers = record.step.lr, record.step.numbers
        rates = [rate for held in self.held["outer.lr"] for rate in (AUTO_RATES if held == AUTO else (held,))]
        self.require(any(abs(lr - rate) < 1e-12 for rate in rates), f"{version} names lr {lr}, {self.held} held")
        rule = rules_reference.STEPS[self.world.options.outer.step]
        share = record.step.c  # of a round that steps by its share; Nesterov's is 1
        possible = [rule(mu, share) for mu in self.held["outer.momentum"]]
        self.require(numbers in possible and 0 < share <= 1, f"{version} names {numbers}, the rule makes {possible}")
        folded = {fold.push.cluster for fold in record.folds}
        self.require(not folded & self.out, f"{version} folded {folded & self.out}, who were quarantined")

    def master_restored(self, state: LedgerState) -> None:
        self.require({c.key: c for c in state.tuned} == self.tuned, f"a new master has {state.tuned}")
        self.require(dict(state.quarantined) == self.quarantined, f"a new master has {state.quarantined}")
