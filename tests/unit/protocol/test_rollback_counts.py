"""After any rollback the master's memory is what the next master reads in the ledger: tokens, ranges, versions, shares.

Mirrors lag, versions are archived, disks fail, and the lineage in memory is short, so rollbacks pass over versions that
are retired. Guards docs/architecture.md#invariant-9 and #invariant-10.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest

from dips.errors import FailedDisk
from dips.ids import GENESIS, PullId, VersionId
from dips.master.ledger import MEMORY, Ledger
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import BegunRange
from dips.protocol.effects import ClosePull, Commit, DropPush, Effect, Grant, Pending, Persist, Refused
from dips.protocol.enums import DurabilityMode, OutcomeKind, RequeuePolicy
from dips.protocol.options import DataOptions, Options, StopOptions
from dips.protocol.records import Record, RunRow, VersionDurable
from dips.protocol.rules import MOST_TIMES, TOKENS_KEPT
from dips.protocol.run_state import RunState, oldest_offered
from tests.unit.protocol.scripted_run import MANIFEST, OPTIONS, ScriptedRun

ROW = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (100.0,))
SHORT = replace(OPTIONS, data=DataOptions(ranges=200), requeue=RequeuePolicy.UNDONE, lineage_kept=3, most_rollback=100)


class StoredRun(ScriptedRun):
    """A scripted run with a ledger, a mirror, and a disk that may be full and holds what the master left on it."""

    def __init__(self, options: Options = SHORT) -> None:
        self.ledger, self.full, self.leases, self.processes, self.held_by_mirror = (
            Ledger.create(MEMORY, ROW), False, 0, 0, ev.MirrorReport(()),
        )  # fmt: skip
        self.ledger.start_term()
        self.options = options
        super().__init__(options)

    def step(self, event: Any) -> list[Effect]:
        effects = super().step(event)
        if records := [e for e in effects if isinstance(e, get_args(Record))]:
            self.ledger.write_records(records)
        return effects

    def answer(self) -> None:
        while self.orders:
            order = self.orders.popleft()
            name = (order.slave, order.sinc, order.number)
            if self.full and isinstance(order.body, Persist):
                self._decide(ev.OrderFailed(*name, FailedDisk, "full"))
            else:
                self._decide(ev.OrderAnswered(*name, self._answer(order.body)))

    @property
    def state(self) -> RunState:
        state = self.machine.capture_state()
        assert isinstance(state, RunState)
        return state

    def make_version(self, *clusters: str, finite: bool = True, done: int = 0, more: bool = True) -> None:
        """One round: each pushes two more ranges of data, or of the last one `done` of 10 samples. Without `more` it
        pushes those that it holds, if any.
        """
        self.leases, self.finite = self.leases + 1, finite
        pushes = []
        for cluster in clusters:
            if more or not self.state.ranges.held_by(cluster, self.inc(cluster)):
                self.ask(ev.RangesRequested(0, cluster, self.inc(cluster), self.leases, 2))
            *held, last = self.state.ranges.held_by(cluster, self.inc(cluster))
            begun = BegunRange(last, done, 10) if done else None
            pushes.append(self.push(cluster, ranges=held if done else (*held, last), begun=begun))
        self.wait(20.0)
        for push in pushes:
            self.outcome(push)

    def report_mirror(self, *held: VersionId, why: str = "") -> None:
        self.held_by_mirror = ev.MirrorReport(held, why)
        self.step(ev.MirrorReported("s", self.view.slaves["s"].sinc, self.held_by_mirror))

    def offer(self, *offered: VersionId) -> None:
        """Its slave is another process, which has these on its disk; it registers until it serves the head."""
        self.processes, memory = self.processes + 1, None
        for _ in range(3):
            asked = ev.SlaveRegistered(
                0, "s", f"n{self.processes}", "r", "s:1", ("s:2",), 0, memory, None, offered, 4, "",
                mirror=self.held_by_mirror, rival_heard_s=1e9,
            )  # fmt: skip
            order = self.ask(asked).order
            memory = getattr(order, "version", memory)

    def on_offer(self) -> list[VersionId]:
        """What its disk has."""
        return [v.version for v in self.state.versions.values() if not v.retired and v.version != GENESIS]


def describe(run: RunState) -> dict[str, Any]:
    """All that a rollback changes; of versions those that another rollback could undo."""
    oldest = oldest_offered(run.versions.values())
    newer = [v for v in run.versions.values() if v.version.version > oldest.version]
    return {
        "oldest": oldest,
        "head": run.head,
        "tokens": run.tokens_accepted,
        "clusters": {c.name: (c.counts, c.tokens, c.settled, c.last_tokens) for c in run.clusters.values()},
        "settled": run.ranges.settled,
        "undone ranges": run.ranges.undone,
        "begun ranges": (run.ranges.begun, run.ranges.parts if run.options.requeue is RequeuePolicy.UNDONE else None),
        "free": run.ranges.free,
        "leased": {c.name: run.ranges.held_by(c.name, c.inc) for c in run.clusters.values()},
        "versions": newer,
        "undone": sorted(run.undone),
        "finished": run.finished,
    }


def read_again(run: StoredRun) -> RunState:
    """The next master of the same ledger."""
    state = Coordinator(run.ledger.read_state(), MANIFEST, run.options, run.now).capture_state()
    assert isinstance(state, RunState)
    return state


def test_the_share_of_a_round_does_not_depend_on_a_restart() -> None:
    """What a cluster's last accepted push counted, which `outer.step: share` compares a round with: less than it
    claimed, and whatever its later pushes and incarnations did.
    """
    run = StoredRun()
    run.train("a")
    for tokens in (*[100] * TOKENS_KEPT, 10**9):
        push = run.push("a", tokens)
        run.wait(20.0)
        assert run.outcome(push).kind is OutcomeKind.ACCEPTED
    counted = MOST_TIMES * 100
    assert run.state.clusters["a"].last_tokens == read_again(run).clusters["a"].last_tokens == counted
    run.make_version("a", finite=False)
    assert run.state.clusters["a"].last_tokens == read_again(run).clusters["a"].last_tokens == counted
    run.train("a", process="another")
    assert run.state.clusters["a"].last_tokens == read_again(run).clusters["a"].last_tokens == counted


@pytest.mark.parametrize("lineage_kept", [3, 1000])
def test_a_mirror_that_lagged_over_retired_versions(lineage_kept: int) -> None:
    """v3 to v5 are retired while the mirror holds v2; a lost disk takes the run back there, and all is undone."""
    run = StoredRun(replace(SHORT, lineage_kept=lineage_kept))
    run.train("a")
    run.report_mirror()
    for _ in range(2):
        run.make_version("a")
    mirrored = run.head
    run.report_mirror(mirrored)
    run.report_mirror(mirrored, why="No route to host")
    for _ in range(5):
        run.make_version("a")
    assert [v.version for v in run.state.versions.values() if v.retired and v.version.version > 2]
    run.offer(mirrored)
    assert run.head == mirrored
    assert run.view.progress.tokens == run.view.clusters["a"].tokens_accepted == 200
    assert run.view.clusters["a"].tokens_undone == 500
    assert (run.view.clusters["a"].accepted_ever, run.view.clusters["a"].tokens_accepted_ever) == (7, 700)
    assert run.view.ranges.settled == 4 and run.view.ranges.free == 196
    assert describe(run.state) == describe(read_again(run))


def test_a_cluster_is_told_another_number_after_each_push_and_each_rollback() -> None:
    """Its checkpoints name it, and one is valid while it is the same: not when a rollback took away as many pushes as
    the cluster has brought since, which the checkpoint would bring a second time.
    """
    run = StoredRun()
    run.train("a")

    def number() -> int:
        return int(run.ask(ev.ClusterJoined(0, "a", "p", "r", MANIFEST.digest, "c")).settled)

    told = [number()]
    for _ in range(2):
        run.make_version("a")
        told.append(number())
    run.offer(VersionId(1, 1))
    told.append(number())
    run.make_version("a")
    told.append(number())
    assert told == sorted(set(told)) and run.head == VersionId(2, 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_push_that_is_lost_after_its_cluster_began_anew_stays_in_its_number(restarts: bool) -> None:
    """It was in a window when the next incarnation was told the number, from which the agent counts on; its round left
    no version. With one less, the number after the next push would be that of a checkpoint before it.
    """
    run = StoredRun()
    run.train("a")
    run.make_version("a")
    run.train("b")  # the window waits for it
    run.push("a")
    run.train("a", process="another")
    told = run.ask(ev.ClusterJoined(0, "a", "another", "r", MANIFEST.digest, "c")).settled
    if restarts:
        run.machine = Coordinator(run.ledger.read_state(), MANIFEST, run.options, run.now)
        run.orders.clear()
    else:
        run.step(ev.SlaveSilent("s", run.view.slaves["s"].sinc, 99.0))
    run.offer(head := run.head)
    again = run.ask(ev.ClusterJoined(0, "a", "another", "r", MANIFEST.digest, "c")).settled
    assert run.head == head == VersionId(1, 1) and told == again == 2


def test_back_to_the_initial_model_over_versions_that_no_disk_took() -> None:
    """Retired, and never durable: the initial model is on offer, so they are undone like all others."""
    run = StoredRun(replace(SHORT, lineage_kept=3))
    run.train("a")
    run.full = True
    for _ in range(8):
        run.make_version("a")
    assert run.head.version > 4 and all(v.retired for v in list(run.state.versions.values())[1:-2])
    run.offer()
    assert run.head == GENESIS and run.view.progress.tokens == 0
    assert describe(run.state) == describe(read_again(run))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_range_that_is_leased_again_begins_behind_the_part_that_the_lineage_has(restarts: bool) -> None:
    """v1 has three samples of it, v2 the rest, and a rollback to v1 frees it: the three would be trained twice in one
    lineage. Back at v0 all of it is to be trained. Guards docs/architecture.md#invariant-10.
    """
    run = StoredRun()
    run.train("a")
    for done in (3, 0):
        run.make_version("a", done=done)
    assert list(run.state.ranges.settled) == [0, 1, 2, 3] and not run.state.ranges.begun
    for head, begun in ((VersionId(1, 1), (BegunRange(1, 3, 10),)), (GENESIS, ())):
        if restarts:
            run.machine = Coordinator(run.ledger.read_state(), MANIFEST, run.options, run.now)
            run.orders.clear()
        run.offer(*[head] * (head != GENESIS))
        run.train("b" if begun else "c")
        given = run.ask(ev.RangesRequested(0, "b" if begun else "c", 1, 1, 2))
        assert (run.head, given.ranges[0], given.begun) == (head, 1 if begun else 0, begun)


def test_a_second_rollback_takes_back_the_part_with_the_version_that_has_it() -> None:
    """v3 has a range to its end, v1 and v2 a part each. The range stayed begun where v2 had left it, so that samples of
    undone versions were leased to nobody; the next master read another part. Guards docs/architecture.md#invariant-10.
    """
    run = StoredRun(replace(SHORT, keep_every=1, keep_most=8))
    run.train("a")
    run.ask(ev.RangesRequested(0, "a", 1, 1, 2))
    for ranges, begun in (((), BegunRange(0, 3, 10)), ((), BegunRange(0, 5, 10)), ((0,), None)):
        push = run.push("a", ranges=ranges, begun=begun)
        run.wait(20.0)
        run.outcome(push)
    for head, left in ((VersionId(2, 2), (BegunRange(0, 5, 10),)), (VersionId(1, 1), (BegunRange(0, 3, 10),))):
        run.offer(head)
        assert (run.head, run.state.ranges.begun_of((0,))) == (head, left)
        assert describe(run.state) == describe(read_again(run))
    run.train("b")
    assert run.ask(ev.RangesRequested(0, "b", 1, 1, 1)).begun == (BegunRange(0, 3, 10),)


def test_parts_are_forgotten_with_the_versions_that_no_rollback_undoes() -> None:
    """Else each range of a long run would have left its own."""
    run = StoredRun()
    run.train("a")
    for n in range(24):
        run.make_version("a", done=3 * (n % 2))
    assert len(run.state.ranges.parts) <= 3


@pytest.mark.parametrize("requeue", RequeuePolicy)
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 12)) for n in range(30)])
def test_memory_is_what_the_ledger_says_after_each_rollback(seed: int, requeue: RequeuePolicy) -> None:
    draw, draw_part = random.Random(seed), random.Random(seed)
    archive = draw.choice([0, 0, 2, 3])
    run = StoredRun(replace(SHORT, requeue=requeue, keep_every=archive, keep_most=archive and 2))
    run.train("a", "b")
    undone = 0
    for _ in range(40):
        match draw.randrange(10):
            case 0:
                run.report_mirror(
                    *draw.sample(run.on_offer(), k=min(1, len(run.on_offer()))), why=draw.choice(["", "away"])
                )
            case 1:
                run.full = not run.full
            case 2:
                offered = run.on_offer()
                run.offer(*offered[: draw.randrange(len(offered) + 1)])
                undone = len(run.state.undone)
            case _:
                clusters, finite = draw.choice([("a",), ("b",), ("a", "b")]), draw.random() > 0.1
                done, more = max(0, draw_part.randrange(-9, 10)), draw_part.random() < 0.5
                run.make_version(*clusters, finite=finite, done=done, more=more)
        assert describe(run.state) == describe(read_again(run)), f"seed {seed}"
        assert {*run.state.step_norms, *run.state.committed_at} <= set(run.state.versions), "nothing else is remembered"
        assert not any(run.state.versions[mirrored].retired for mirrored in run.state.mirrored)
    assert undone or seed != 0, "rollbacks are drawn"


def test_an_operator_goes_back_after_the_initial_model_is_offered_no_more() -> None:
    """Once versions are retired v0@r0 is refused, and the last version before the head is not."""
    run = StoredRun()
    run.train("a")
    for _ in range(6):
        run.make_version("a")
    before = run.on_offer()[-2]
    run.offer(*run.on_offer())
    refused = run.ask(ev.RollbackAsked(0, GENESIS))
    assert isinstance(refused, Refused) and "v0@r0 is on no disk any more" in refused.reason
    assert run.head != before and not isinstance(run.ask(ev.RollbackAsked(0, before)), Refused)
    assert run.head == before


def test_a_run_that_had_finished_goes_on_from_where_it_went_back() -> None:
    """And finishes anew when its target is reached again."""
    run = StoredRun(replace(SHORT, stop=StopOptions(versions=3)))
    run.train("a")
    for _ in range(3):
        run.make_version("a")
    assert run.state.finished == run.head
    run.offer(v2 := VersionId(2, 2))
    assert run.head == v2 and run.state.finished is None
    assert describe(run.state) == describe(read_again(run))
    run.make_version("a")
    assert run.state.finished == run.head != VersionId(3, 3)


def test_an_operator_s_rollback_ends_all_that_is_under_way() -> None:
    """A pull, a push that waits for the next round, and a flip: none has a place in the lineage afterwards."""
    run = ScriptedRun()
    run.train("a", "b", "c")
    for _ in range(2):
        push = run.push("a")
        run.wait(20.0)
        run.outcome(push)
    pull = PullId("c", run.inc("c"), 2)
    assert [type(run.ask(ev.PullRequested(0, pull, 1))) for _ in range(2)] == [Pending, Grant]
    run.held = {Commit}
    run.push("a")
    run.wait(20.0)
    waiting = run.push("b")
    assert run.machine.capture_state().flipping is not None
    run.ask(ev.RollbackAsked(0, VersionId(2, 2)))
    assert ClosePull(pull) in run.all_of(ClosePull)
    assert run.ask(ev.RoundAwaited(0, waiting)).kind is OutcomeKind.SKIPPED
    assert waiting in [order.push for order in run.all_of(DropPush)]
    assert run.machine.capture_state().flipping is None, "nobody waits for a slave that is to register"


def test_a_version_that_is_retired_meanwhile_is_not_gone_back_to() -> None:
    """The operator's request waits until the slave has said what it offers; by then v1 may be about to go."""
    run = StoredRun()
    run.train("a")
    for _ in range(2):
        run.make_version("a")
    v1, v2 = run.on_offer()
    assert isinstance(run.ask(ev.RollbackAsked(0, v1)), Pending)
    run.state.versions[v1] = replace(run.state.versions[v1], retired=True)
    run.offer(v1, v2)
    assert run.head == v2 and run.view.slaves["s"].state == "ready"


def test_a_late_snapshot_of_what_is_undone_is_not_waited_for() -> None:
    """Its answer comes when the head is an older version."""
    run = ScriptedRun(replace(OPTIONS, durability=DurabilityMode.ASYNC))
    run.train("a")
    run.outcome(run.push("a"))
    v1 = run.head
    run.held = {Persist}
    run.outcome(run.push("a"))
    assert [order.body.version for order in run.orders] == [run.head] != [v1]
    assert isinstance(run.ask(ev.RollbackAsked(0, v1)), Pending)
    register = ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 1, run.head, None, (v1,), 4, "")
    run.ask(register)
    assert run.head == v1
    run.held = set()
    run.answer()
    assert run.head == v1 and not run.all_of(VersionDurable)[1:]


def test_an_operator_goes_back_to_the_initial_model() -> None:
    """While no version that all slaves had is retired."""
    run = StoredRun()
    run.train("a")
    run.make_version("a")
    run.report_mirror(run.head)
    run.offer(*run.on_offer())
    assert not isinstance(run.ask(ev.RollbackAsked(0, GENESIS)), Refused)
    assert run.head == GENESIS and not run.state.mirrored, "nothing is kept for the mirror of what is undone"


def test_a_rollback_overtakes_what_a_cluster_saved_before_it() -> None:
    """A cluster counts its settled pushes on from the number that Joined told, and knows no rollback. What it saves is
    compared with the number that the next Joined tells: never equal to it again after a further push was settled.
    """
    run = StoredRun()
    run.train("a")
    for _ in range(2):
        run.make_version("a")
    counted = 2  # by the agent
    run.offer(VersionId(1, 1))
    run.make_version("a")
    counted += 1
    saved = counted
    run.make_version("a")
    joined = run.ask(ev.ClusterJoined(0, "a", "again", "r", MANIFEST.digest, "c", former=run.inc("a")))
    assert joined.settled > saved, "a push was settled after it was saved"
    assert run.machine.capture_state().clusters["a"].counts == read_again(run).clusters["a"].counts
