"""What must always be true of pushes, tokens and data ranges, and what was done with them (invariants 4, 6, 9, 10)."""

from __future__ import annotations

from dips.client.agent.state import SyncPhase
from dips.ids import PushId, VersionId
from dips.protocol.effects import Outcome
from dips.protocol.records import (
    ClusterEnded,
    LedgerState,
    OutcomeRow,
    RangesLeased,
    Record,
    RolledBack,
    RoundEnded,
    VersionCommitted,
)
from dips.sim.agent import SimAgent
from dips.sim.work import Frozen
from dips.sim.world import World
from tests.simulation.checks import Invariant


class OnceInvariant(Invariant):
    """Each push is in at most one row; "accepted" is the outcome exactly if it is there, "dropped" if it is in none.

    The row of an undone version counts: its clusters still carry that work in their parameters (docs/rationale.md#26).
    """

    number = 4

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.folded: dict[PushId, VersionId] = {}

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            for fold in record.folds:
                before = self.folded.get(fold.push)
                self.require(before is None, f"{fold.push} is in {before} and in {record.version}")
                self.folded[fold.push] = record.version

    def push_dropped(self, agent: SimAgent, push: PushId) -> None:
        row = self.folded.get(push)
        self.require(row is None, f"{push} was reported as dropped, the ledger has it in {row}")

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        row = self.folded.get(frozen.push)
        expected = outcome.version if outcome.kind == "accepted" else None
        self.require(
            row == expected, f"{frozen.push} was answered {outcome.kind} {outcome.version}, the ledger has it in {row}"
        )


class WholeInstallsInvariant(Invariant):
    """The ranks of a cluster hold one v@r each time the trainer takes an inner step."""

    number = 6

    def trainer_stepped(self, agent: SimAgent) -> None:
        if len(set(agent.held_versions)) != 1 or agent.held_versions[0] is None:
            self.fail(f"{agent.name} trains with ranks at {', '.join(map(str, agent.held_versions))}")


class TokensInvariant(Invariant):
    """Every inner step's tokens are accepted, gated, carried or lost; never two of these, never none.

    The ledger's own books say no more of a cluster than it has consumed: what it writes off may not be settled, too.
    """

    number = 9

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.counted: dict[str, list[int]] = {}  # of each cluster's last five accepted pushes
        self.settled: dict[int, str] = {}  # id of the work → where the ledger settled it
        self.accepted = 0  # by the lineage
        self.brought: dict[VersionId, int] = {}
        self.booked: dict[str, int] = {}  # cluster → tokens that the ledger settled or wrote off

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted | RoundEnded):
            for outcome in record.outcomes:
                self._tokens_of(outcome)
                if outcome.kind != "skipped":
                    self._settle(outcome.push, outcome.kind)
                    self._book(outcome.push.cluster, outcome.tokens)
        if isinstance(record, ClusterEnded):
            self._book(record.cluster, record.tokens_lost)
        if isinstance(record, VersionCommitted):
            self._count_folds(record)
            self.brought[record.version] = sum(f.tokens for f in record.folds)
            self.accepted += self.brought[record.version]
            expected = {o.push for o in record.outcomes if o.kind == "accepted"}
            self.require(
                expected == {f.push for f in record.folds}, f"{record.version}: folds and accepted Outcomes differ"
            )
        elif isinstance(record, RolledBack):
            self.accepted -= sum(self.brought[v] for v in record.undone)

    def master_restored(self, state: LedgerState) -> None:
        self.counted = {row.cluster: list(row.tokens) for row in state.penalty}
        total = sum(v.tokens for v in state.versions)
        self.require(
            total == self.accepted, f"the ledger's versions bring {total} tokens, {self.accepted} were accepted"
        )

    def trainer_stepped(self, agent: SimAgent) -> None:
        self._account(agent)

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        self._account(agent)

    def at_rest(self) -> None:
        agents = [agent for cluster in self.world.clusters.values() for agent in cluster.live_agents]
        carried = {id(w) for agent in agents if agent.trainer for w in agent.trainer.in_hand.works}
        for work in self.world.books.work:
            fate = id(work) in self.settled or bool(work.lost) or id(work) in carried
            if not fate:
                self.fail(f"range {work.data_range} of {work.cluster} ({work.tokens} tokens) has no fate")
        for agent in agents:
            self._account(agent)

    def _account(self, agent: SimAgent) -> None:
        """A client's own count: everything since its Joined is carried, frozen, accepted, gated or lost."""
        if agent.inc == 0 or agent.state.sync.phase is SyncPhase.JOINING:
            return
        account = agent.state.account
        if account.consumed_tokens != agent.consumed:
            self.fail(f"{agent.name} consumed {agent.consumed} tokens, its account: {account}")

    def _count_folds(self, record: VersionCommitted) -> None:
        """All tokens of a push count, but at most 16 times the largest median of any cluster's last five pushes."""
        most = max((16 * sorted(last)[2] for last in self.counted.values() if len(last) == 5), default=1 << 62)
        for fold in record.folds:
            brought = self.world.books.frozen[fold.push].tokens
            self.require(fold.tokens == min(brought, most), f"of {brought} tokens of {fold.push} {fold.tokens} count")
            self.counted[fold.push.cluster] = [*self.counted.get(fold.push.cluster, []), fold.tokens][-5:]

    def _tokens_of(self, row: OutcomeRow) -> None:
        frozen = self.world.books.frozen[row.push]
        self.require(
            row.tokens == frozen.tokens, f"{row.push} brought {frozen.tokens} tokens, its row says {row.tokens}"
        )

    def _book(self, cluster: str, tokens: int) -> None:
        booked = self.booked[cluster] = self.booked.get(cluster, 0) + tokens
        consumed = self.world.books.consumed.get(cluster, 0)
        self.require(
            booked <= consumed, f"the ledger has {booked} tokens of {cluster} as settled or lost, of {consumed} in all"
        )

    def _settle(self, push: PushId, kind: str) -> None:
        fate = f"{kind} in {push}"
        for work in self.world.books.frozen[push].work:
            before = self.settled.get(id(work))
            if before is not None:
                self.fail(f"{push} is {kind}, and brings work that was settled before as {before}")
            self.settled[id(work)] = fate


class DataInvariant(Invariant):
    """Each data range is in one fate: nothing is leased to two incarnations, nothing is trained twice in the lineage.

    What an undone version trained is leased again with `requeue: undone` only. A row names what its push used up.
    """

    number = 10

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.holder: dict[int, tuple[str, int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.settled: dict[int, PushId] = {}

    def record_written(self, record: Record) -> None:
        if isinstance(record, RangesLeased):
            for r in record.ranges:
                if r in self.settled:
                    self.fail(f"range {r} is leased again, {self.settled[r]} trained it")
                holder = self.holder.get(r)
                if holder is not None and holder not in self.ended:
                    self.fail(f"range {r} is leased to {record.cluster} and to {holder}")
                self.holder[r] = (record.cluster, record.inc)
        elif isinstance(record, ClusterEnded):
            self.ended.add((record.cluster, record.inc))
        elif isinstance(record, RolledBack) and self.world.options.requeue == "undone":
            over = [r for r, push in self.settled.items() if self.world.books.made.get(push) in record.undone]
            for r in over:  # to be trained again: not in this lineage any more
                del self.settled[r]
                self.holder.pop(r, None)
        elif isinstance(record, VersionCommitted | RoundEnded):
            for outcome in record.outcomes:
                frozen = self.world.books.frozen[outcome.push]
                used = frozen.ranges
                self.require(
                    sorted(outcome.ranges) == sorted(used), f"{outcome.push} used {used}, its row says {outcome.ranges}"
                )
                for r in outcome.ranges if outcome.kind != "skipped" else ():
                    self.require(
                        r not in self.settled, f"range {r} of {outcome.push} was settled by {self.settled.get(r)}"
                    )
                    self.settled[r] = outcome.push


class SamplesInvariant(Invariant):
    """Where trainers count samples: each sample of a range is in one settled push, also if several trained the range.

    With `requeue: undone` a rollback has trained again what undone versions had, but not what the lineage still has of
    the same range; whoever holds a range then goes on where it was, so samples may be missing from there on.
    """

    number = 10

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.settled: dict[tuple[int, int], PushId] = {}  # (range, place in its order)
        self._requeued = False

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted | RoundEnded):
            for outcome in record.outcomes:
                if outcome.kind != "skipped":
                    self._settle_push(outcome.push)
                    self._has_all(outcome)
        elif isinstance(record, RolledBack) and self.world.options.requeue == "undone":
            made, self._requeued = self.world.books.made, True
            self.settled = {s: push for s, push in self.settled.items() if made.get(push) not in record.undone}

    def _has_all(self, row: OutcomeRow) -> None:
        """A range that is used up has no sample that nobody trained."""
        shape = self.world.scenario.samples
        if shape is None or self._requeued:
            return
        for number in row.ranges:
            missing = [place for place in range(shape.range_samples) if (number, place) not in self.settled]
            self.require(not missing, f"{row.push} uses up range {number}, whose samples {missing} nobody trained")

    def _settle_push(self, push: PushId) -> None:
        parts = [part for work in self.world.books.frozen[push].work for part in work.parts]
        for sample in ((part.number, place) for part in parts for place in range(part.begin, part.end)):
            if before := self.settled.get(sample):
                self.fail(f"{push} brings sample {sample[1]} of range {sample[0]}, as did {before}")
            self.settled[sample] = push
