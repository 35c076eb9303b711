"""What must always be true of models and books (protocol.md section 4); fences.py has the rest."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from dips.client.agent.phases import SyncPhase
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import Outcome
from dips.protocol.records import (
    ClusterEnded,
    FoldRow,
    LedgerState,
    OutcomeRow,
    PenaltyRow,
    RangesLeased,
    Record,
    RolledBack,
    RoundEnded,
    VersionCommitted,
    VersionDurable,
    VersionsRetired,
)
from dips.sim.twin import LineageTwin, PenaltyTwin, same_statistics
from dips.sim.watch import Invariant
from dips.sim.work import Frozen

if TYPE_CHECKING:
    from dips.sim.cluster import Agent
    from dips.sim.world import World


class Lineage(Invariant):
    """One content per version name: what slaves serve, pin or keep, and what clusters install, is the twin's."""

    number = 1

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.twin = LineageTwin(world.genesis)

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.require(record.version not in self.twin.versions, f"a second row for {record.version}")
            self.twin.commit(record, [self.world.books.frozen[f.push].content for f in record.folds])
            for name, machine in self.world.machines.items():
                snapshot = machine.disk.files.get(record.version)
                if snapshot is not None and snapshot.whole:
                    for layer, expected in self._expected(record.version, machine.layers):
                        found = (snapshot.theta[layer].tobytes(), snapshot.momentum[layer].tobytes())
                        self.require(
                            found == expected, f"{name}'s snapshot of {record.version} differs from the twin's"
                        )

    def after_event(self) -> None:
        for machine in self.world.looked_at:
            process = machine.process
            if process is None or process.versions.memory is None:
                continue
            versions, memory = process.versions, process.versions.memory
            theta, momentum = versions.theta(memory), versions.momentum(memory)
            for layer, expected in self._expected(memory, machine.layers):
                if (theta[layer].tobytes(), momentum[layer].tobytes()) != expected:
                    self.fail(f"{machine.name} serves another {memory} than the twin's (layer {layer})")
            for pull, opened in process.flow.pulls.items():
                for layer, (expected_theta, _) in self._expected(opened.version, machine.layers):
                    for source in (opened.source, *opened.former):
                        if source[layer].tobytes() != expected_theta:
                            self.fail(f"{machine.name}: the source of {pull} moved under it")

    def installed(self, agent: Agent) -> None:
        assert agent.base is not None
        for layer, (theta, _) in self._expected(agent.base, tuple(agent.theta)):
            self.require(
                agent.theta[layer].tobytes() == theta, f"{agent.name} installed another {agent.base} than the twin's"
            )

    def _expected(self, version: VersionId, layers: tuple[int, ...]) -> list[tuple[int, tuple[bytes, bytes]]]:
        content = self.twin.versions.get(version)
        return (
            [(layer, content.bytes_of[layer]) for layer in layers] if content else []
        )  # without a row: Commit's business


class Commit(Invariant):
    """A version is served, or told to a cluster, if and only if its row is durable."""

    number = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.rows = {GENESIS}
        self.head = GENESIS

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self.world.look_everywhere = True
            self.rows.add(record.version)
            self.head = record.version
        elif isinstance(record, RolledBack):
            self.require(record.head in self.rows, f"rolled back to {record.head}, which has no row")
            self.head = record.head

    def restored(self, state: LedgerState) -> None:
        head = state.versions[-1].version
        self.require(head == self.head, f"a new master starts at {head}, the newest durable row is {self.head}")

    def after_event(self) -> None:
        for machine in self.world.looked_at:
            process = machine.process
            if process is None:
                continue
            memory, rows = process.versions.memory, self.rows
            if memory is not None and memory not in rows:
                self.fail(f"{machine.name} serves {memory}, which has no row")
            for pull, opened in process.flow.pulls.items():
                if opened.version not in rows:
                    self.fail(f"{machine.name} opened {pull} on {opened.version}, which has no row")
            if process.holds and memory != self.head and process.versions.prepared != self.head:
                disk = machine.disk
                kept = self.head == GENESIS or self.head in disk.good or self.head in disk.harmed
                self.require(kept, f"{machine.name} neither holds the head {self.head} nor is in doubt about it")

    def told_version(self, agent: Agent, version: VersionId, whence: str) -> None:
        self.require(version in self.rows, f"{agent.name} was told {version} by {whence}, which has no row")


class Durable(Invariant):
    """Every disk holds a whole snapshot of the newest durable version of the lineage until a newer one is durable.

    Excepted is exactly a snapshot that rotted on this disk, or that its directory lost when an old copy was put back:
    then the head may go back by a row (RolledBack), and what that row undoes is no longer of the lineage.
    """

    number = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.durable = [GENESIS]  # of the lineage, oldest first

    @property
    def newest(self) -> VersionId:
        return self.durable[-1]

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionDurable) or (isinstance(record, VersionCommitted) and record.durable):
            self.durable.append(record.version)
        elif isinstance(record, RolledBack):
            self.durable = [v for v in self.durable if v not in record.undone]

    def after_event(self) -> None:
        if self.newest == GENESIS:
            return  # the initial model is on every disk
        for machine in self.world.looked_at:
            snapshot = machine.disk.files.get(self.newest)
            if (snapshot is None or not snapshot.good) and self.newest not in machine.disk.harmed:
                self.fail(f"{machine.name}'s disk has no whole {self.newest}")


class Once(Invariant):
    """Each push is in at most one row; "accepted" is told if and only if it is in that row, "dropped" if it is in none.

    The row of an undone version counts: its clusters still carry that work in their parameters (why.md 26).
    """

    number = 4

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.folded: dict[PushId, VersionId] = {}

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            for fold in record.folds:
                before = self.folded.get(fold.push)
                self.require(before is None, f"{fold.push} is in {before} and in {record.version}")
                self.folded[fold.push] = record.version

    def dropped(self, agent: Agent, push: PushId) -> None:
        row = self.folded.get(push)
        self.require(row is None, f"{push} was told to be dropped, the ledger has it in {row}")

    def outcome(self, agent: Agent, frozen: Frozen, outcome: Outcome) -> None:
        row = self.folded.get(frozen.push)
        told = outcome.version if outcome.kind == "accepted" else None
        self.require(
            row == told, f"{frozen.push} was told {outcome.kind} {outcome.version}, the ledger has it in {row}"
        )


class WholeInstalls(Invariant):
    """The ranks of a cluster hold one v@r each time the trainer takes an inner step."""

    number = 6

    def stepped(self, agent: Agent) -> None:
        if len(set(agent.held)) != 1 or agent.held[0] is None:
            self.fail(f"{agent.name} trains with ranks at {', '.join(map(str, agent.held))}")


class Authority(Invariant):
    """Every lineage ends in the initial model: each row's parent is the head before it, each round is a new one."""

    number = 7

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.head = GENESIS
        self.lineage = [GENESIS]
        self.retired: set[VersionId] = set()  # never offered again, though a disk may still have them

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionsRetired):
            self.retired.update(record.versions)
        elif isinstance(record, VersionCommitted):
            self.require(
                record.parent == self.head, f"{record.version} has the parent {record.parent}, the head is {self.head}"
            )
            follows = record.version.version == self.head.version + 1 and record.version.round > self.head.round
            self.require(follows, f"{record.version} cannot follow {self.head}")
            self.head = record.version
            self.lineage.append(record.version)
        elif isinstance(record, RolledBack):
            kept = self.lineage.index(record.head) + 1 if record.head in self.lineage else 0
            self.require(
                kept > 0 and tuple(self.lineage[kept:]) == record.undone,
                f"rolled back to {record.head} and undid {record.undone}, the lineage is {self.lineage}",
            )
            del self.lineage[kept:]
            self.head = record.head


class Finite(Invariant):
    """θ and m are finite, weights sum to 1, norms and statistics are those of a twin fed by committed rows only."""

    number = 8

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.twin = PenaltyTwin(world.options.penalty)
        self.lineage = {GENESIS}

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self._weights(record)
            self._norms(record)
            self.twin.accepted(record.folds, self.lineage)
            self.lineage.add(record.version)
        elif isinstance(record, RolledBack):
            self.lineage.difference_update(record.undone)  # statistics stay: clusters are as loud as they were
        if isinstance(record, VersionCommitted | RoundEnded):
            self._gated(record.outcomes, record.penalty)
            if isinstance(record, RoundEnded) and record.kind == "skipped":
                self.require(not record.penalty, f"round {record.round} was skipped and moves statistics")
            self._same(record.penalty, "a row")

    def restored(self, state: LedgerState) -> None:
        self._same(state.penalty, "the ledger")

    def _weights(self, record: VersionCommitted) -> None:
        total = sum(f.tokens for f in record.folds)
        for fold in record.folds:
            expected = fold.tokens / record.folds[0].tokens
            self.require(
                abs(fold.weight - expected) <= 1e-12 * expected, f"{fold.push} weighs {fold.weight}, not {expected}"
            )
        shares = sum(f.weight * record.folds[0].tokens / total for f in record.folds)
        self.require(abs(shares - 1.0) < 1e-9, f"the weights of {record.version} sum to {shares}")
        delta = max(record.delta_norm, 1e-30)
        clip = self.world.options.outer.clip.norm
        scale = record.folds[0].tokens / total * (1.0 if clip is None else min(1.0, clip / delta))
        self.require(
            abs(record.scale - scale) <= 1e-9 * scale, f"{record.version} was scaled by {record.scale}, not {scale}"
        )

    def _norms(self, record: VersionCommitted) -> None:
        twin = self.world.lineage.twin
        for numbers in twin.versions[record.version].theta.values():
            self.require(all(map(isfinite, numbers)), f"{record.version} is not finite")
        for fold in record.folds:
            norm = twin.norm(record.parent, self.world.books.frozen[fold.push].content, fold.inner_steps)
            self.require(
                abs(norm - fold.norm) <= 1e-5 * norm, f"the norm of {fold.push} is {norm}, the row says {fold.norm}"
            )

    def _gated(self, outcomes: tuple[OutcomeRow, ...], told: tuple[PenaltyRow, ...]) -> None:
        rows = {row.cluster: row for row in told}
        for outcome in outcomes:
            if outcome.kind == "gated":
                cluster = outcome.push.cluster
                self.require(cluster in rows, f"{outcome.push} was gated and the round has no statistics of {cluster}")
                self.twin.gated(cluster, rows[cluster])

    def _same(self, rows: tuple[PenaltyRow, ...], whose: str) -> None:
        for row in rows:
            expected = self.twin.row(row.cluster)
            self.require(same_statistics(row, expected), f"{whose} has {row}, the twin has {expected}")


class Tokens(Invariant):
    """Every inner step's tokens are accepted, gated, carried or lost; never two of these, never none.

    The ledger's own books say no more of a cluster than it has consumed: what it writes off may not be settled, too.
    """

    number = 9

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.settled = world.books.settled
        self.accepted = 0  # by the lineage
        self.brought: dict[VersionId, int] = {}
        self.booked: dict[str, int] = {}  # cluster → tokens that the ledger settled or wrote off

    def recorded(self, record: Record) -> None:
        if isinstance(record, VersionCommitted | RoundEnded):
            for outcome in record.outcomes:
                self._tokens_of(outcome)
                if outcome.kind != "skipped":
                    self._settle(outcome.push, outcome.kind)
                    self._book(outcome.push.cluster, outcome.tokens)
        if isinstance(record, ClusterEnded):
            self._book(record.cluster, record.tokens_lost)
        if isinstance(record, VersionCommitted):
            for fold in record.folds:
                self._tokens_of(fold)
                self.world.books.made[fold.push] = record.version
            self.brought[record.version] = sum(f.tokens for f in record.folds)
            self.accepted += self.brought[record.version]
            told = {o.push for o in record.outcomes if o.kind == "accepted"}
            self.require(
                told == {f.push for f in record.folds}, f"{record.version}: folds and accepted Outcomes differ"
            )
        elif isinstance(record, RolledBack):
            self.accepted -= sum(self.brought[v] for v in record.undone)

    def restored(self, state: LedgerState) -> None:
        total = sum(v.tokens for v in state.versions)
        self.require(
            total == self.accepted, f"the ledger's versions bring {total} tokens, {self.accepted} were accepted"
        )

    def stepped(self, agent: Agent) -> None:
        self._account(agent)

    def outcome(self, agent: Agent, frozen: Frozen, outcome: Outcome) -> None:
        self._account(agent)

    def at_rest(self) -> None:
        agents = [agent for site in self.world.sites.values() for agent in site.agents]
        carried = {id(w) for agent in agents if agent.trainer for w in agent.trainer.works}
        for work in self.world.books.work:
            fate = id(work) in self.settled or bool(work.lost) or id(work) in carried
            if not fate:
                self.fail(f"range {work.data_range} of {work.cluster} ({work.tokens} tokens) has no fate")
        for agent in agents:
            self._account(agent)

    def _account(self, agent: Agent) -> None:
        """A client's own count: everything since its Joined is carried, frozen, accepted, gated or lost."""
        if agent.inc == 0 or agent.core.state.sync.phase is SyncPhase.JOINING:
            return
        account = agent.core.state.account
        if account.consumed != agent.consumed:
            self.fail(f"{agent.name} consumed {agent.consumed} tokens, its account: {account}")

    def _tokens_of(self, row: FoldRow | OutcomeRow) -> None:
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
        for work in self.world.books.frozen[push].work:
            before = self.settled.get(id(work))
            self.require(before is None, f"{push} is {kind}, and brings work that was settled before as {before}")
            self.settled[id(work)] = f"{kind} in {push}"


class Data(Invariant):
    """Each data range is in one fate: nothing is leased to two lives, nothing is trained twice in the lineage.

    What an undone version trained is leased again with `requeue: undone` only. A row names what its push used up.
    """

    number = 10

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.holder: dict[int, tuple[str, int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.settled = world.books.ranges_settled

    def recorded(self, record: Record) -> None:
        if isinstance(record, RangesLeased):
            for r in record.ranges:
                self.require(r not in self.settled, f"range {r} is leased again, {self.settled.get(r)} trained it")
                holder = self.holder.get(r)
                self.require(
                    holder is None or holder in self.ended, f"range {r} is leased to {record.cluster} and to {holder}"
                )
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
                for use in frozen.uses if outcome.kind != "skipped" else ():
                    use.settled = True
                for r in outcome.ranges if outcome.kind != "skipped" else ():
                    self.require(
                        r not in self.settled, f"range {r} of {outcome.push} was settled by {self.settled.get(r)}"
                    )
                    self.settled[r] = outcome.push
