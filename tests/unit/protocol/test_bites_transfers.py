"""What the master refuses of pushes and pulls: stale numbers, foreign ranges, absurd counts; how long they may take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import FailedDisk, RemoteProtocolError, StalePush
from dips.ids import PullId, PushId, VersionId
from dips.protocol import events as ev
from dips.protocol.claims import MOST_TOKENS_PER_S
from dips.protocol.clusters import MAX_RANGES_ASKED
from dips.protocol.data import BegunRange
from dips.protocol.effects import (
    Commit,
    Committed,
    Dropped,
    DropPush,
    Failed,
    Measure,
    OpenPull,
    OpenPush,
    Pending,
    Persist,
    Refused,
)
from dips.protocol.enums import Role
from dips.protocol.options import DataOptions, TimingOptions
from dips.protocol.records import IncarnationGiven
from tests.unit.protocol.scripted_run import MANIFEST, OPTIONS, ScriptedRun

MAX_TOKENS = (1 << 53) - 1


def make(clusters: str = "a", slots: int = 4, ranges: int = 0, **timing: float) -> ScriptedRun:
    options = replace(OPTIONS, data=DataOptions(ranges=ranges), timing=TimingOptions(window_s=10.0, **timing))
    run = ScriptedRun(options, slots)
    run.train(*clusters)
    return run


def failure(result: object) -> type[Exception]:
    assert isinstance(result, Failed), result
    return result.error


# ---- numbers that are used once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [1, 2, 3])
def test_a_seq_at_or_below_the_highest_opens_no_push(seq: int) -> None:
    """Each transfer of an incarnation has a seq above all before it, pushes and pulls counted together."""
    run = make()
    run.pull("a")
    run.pull("a")  # seq 3
    assert failure(run.ask(ev.PushRequested(0, PushId("a", 1, seq), run.head, 1))) is StalePush
    assert run.all_of(OpenPush) == []
    assert isinstance(run.ask(ev.PushRequested(0, PushId("a", 1, 4), run.head, 1)), Pending)


@pytest.mark.parametrize("seq", [1, 2, 3])
def test_a_seq_at_or_below_the_highest_opens_no_pull(seq: int) -> None:
    run = make()
    for _ in range(2):
        run.ask(ev.PushAborted(0, run.open_push("a"), "no"))
    opened = len(run.all_of(OpenPull))
    if seq > 1:  # that of the first pull is answered with how it ended
        assert failure(run.ask(ev.PullRequested(0, PullId("a", 1, seq), 1))) is StalePush
    assert len(run.all_of(OpenPull)) == opened
    assert isinstance(run.ask(ev.PullRequested(0, PullId("a", 1, 4), 1)), Pending)


def test_an_old_incarnation_of_a_slave_stages_nothing() -> None:
    """What lay in the memory of a process that is gone is gone."""
    run = make()
    run.ask(ev.SlaveRegistered(0, "s", "n2", "r", "s:1", ("s:2",), 0, run.head, None, (), 4, ""))
    push = run.open_push("a")
    run.step(ev.PushStaged("s", 1, push, 4))
    assert isinstance(run.ask(ev.PushFinished(0, push, 1, 1, (), 0.0)), Pending)
    run.step(ev.PushStaged("s", 2, push, 4))
    assert isinstance(run.ask(ev.PushFinished(0, push, 1, 1, (), 0.0)), Committed)
    given = [(row.inc, row.nonce) for row in run.all_of(IncarnationGiven) if row.role is Role.SLAVE]
    assert given == [(1, "n"), (2, "n2")], "the next master gives it neither of them again"


def test_a_push_is_counted_in_its_window_until_it_is_settled() -> None:
    """An agent that joins again hears how many of its pushes are, or are about to be, in a version."""
    run = make()
    for settled in (0, 1):
        assert run.ask(ev.ClusterJoined(0, "a", "p", "r", run.manifest.digest, "c")).settled == settled
        push = run.push("a")
        assert run.ask(ev.ClusterJoined(0, "a", "p", "r", run.manifest.digest, "c")).settled == settled + 1
        run.wait(11.0)
        run.outcome(push)


def test_a_cluster_whose_trainer_hung_asks_for_a_push() -> None:
    """What it asks shows that it goes on, whatever heartbeats have told."""
    run = make()
    run.step(ev.TrainerChanged("a", 1, False, "no inner step for 60 s"))
    assert run.view.clusters["a"].state == "idle"
    run.open_push("a")
    assert run.view.clusters["a"].state == "pushing"


def test_status_shows_since_when_a_state_holds() -> None:
    """The same state for the same cause goes on, whatever else happens."""
    run = make()
    for _ in range(2):
        run.wait(7.0)
        push = run.open_push("a")
        assert run.view.clusters["a"].since_s == 0.0
        run.wait(3.0)
        run.ask(ev.PushRequested(0, push, run.head, 1))
        assert run.view.clusters["a"].since_s == 3.0
        run.ask(ev.PushAborted(0, push, "no"))
    assert run.view.slaves["s"].since_s == 20.0


def test_a_base_of_a_round_that_was_never_reserved_shows_an_old_ledger() -> None:
    """The very next round is already one that this ledger does not know."""
    run = make()
    run.outcome(run.push("a"))
    refused = run.ask(ev.PushRequested(0, run.next_push("a"), VersionId(2, 2), 1))
    assert isinstance(refused, Refused) and "this ledger knows rounds below 2" in refused.reason


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [-1, 0, 65_537, 1 << 31])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks: int) -> None:
    """Before anything is made for each of them."""
    run = make()
    assert failure(run.ask(ev.PushRequested(0, PushId("a", 1, 5), run.head, ranks))) is RemoteProtocolError
    assert failure(run.ask(ev.PullRequested(0, PullId("a", 1, 6), ranks))) is RemoteProtocolError


@pytest.mark.parametrize(("tokens", "steps"), [(-1, 1), (1, -1)])
def test_negative_work_is_refused(tokens: int, steps: int) -> None:
    run = make()
    assert failure(run.commit(run.open_push("a"), tokens, steps)) is RemoteProtocolError


def test_tokens_stay_where_sums_are_exact() -> None:
    """The most that a run can have is accepted, and not one more: of this push, or with what is accepted and waits."""
    run = make("ab")
    run.now += MAX_TOKENS / MOST_TOKENS_PER_S  # else nobody can have trained on so many
    assert failure(run.commit(run.open_push("a"), MAX_TOKENS + 1)) is RemoteProtocolError
    run.push("b", MAX_TOKENS - 10)
    push = run.next_push("a")
    run.ask(ev.PushAborted(0, PushId("a", 1, push.seq - 1), "too much"))
    run.ask(ev.PushRequested(0, push, run.head, 1))
    assert failure(run.commit(push, 11)) is RemoteProtocolError
    assert isinstance(run.commit(push, 10), Committed)


# ---- data ranges -----------------------------------------------------------------------------------------------------


def leased(run: ScriptedRun, cluster: str, seq: int = 1, count: int = 2) -> tuple[int, ...]:
    result = run.ask(ev.RangesRequested(0, cluster, run.inc(cluster), seq, count))
    return tuple(result.ranges)


def test_nobody_finishes_a_range_that_is_leased_to_another() -> None:
    """Nor one that is leased to nobody, nor one of its own that it has finished before; all at once are refused."""
    run = make("ab", ranges=10)
    mine, others = leased(run, "a"), leased(run, "b")
    push = run.open_push("a")
    for foreign in (others[:1], (mine[0], others[1]), (9,), (99,)):
        result = run.commit(push, ranges=foreign)
        assert failure(result) is RemoteProtocolError and "not leased to a" in result.message
    assert run.view.ranges.settled == 0
    assert isinstance(run.commit(push, ranges=mine), Committed)
    run.wait(11.0)
    run.outcome(push)
    assert run.view.ranges.settled == 2
    assert failure(run.commit(run.open_push("a"), ranges=mine[:1])) is RemoteProtocolError


@pytest.mark.parametrize(
    ("number", "done", "why"),
    [(0, 0, "expected 1 to 8"), (0, 9, "expected 1 to 8"), (1, 4, "used up by this push"), (5, 4, "not leased to a")],
)
def test_a_part_of_a_range_is_its_own_and_no_more_than_a_part(number: int, done: int, why: str) -> None:
    """Nothing, all of it, a range that the push has used up, one of nobody: refused, and the push may say it anew."""
    run = make("a", ranges=10)
    leased(run, "a")
    push = run.open_push("a")
    result = run.ask(ev.PushFinished(0, push, 100, 1, (1,), 2.5, BegunRange(number, done, 9)))
    assert failure(result) is RemoteProtocolError and why in result.message
    run.step(ev.PushStaged("s", 1, push, 4))
    assert isinstance(run.ask(ev.PushFinished(0, push, 100, 1, (1,), 2.5, BegunRange(0, 4, 9))), Committed)
    run.wait(11.0)
    run.outcome(push)
    run.ask(ev.ClusterLeft(0, "a", run.inc("a"), 100))
    run.train("b")
    given = run.ask(ev.RangesRequested(0, "b", run.inc("b"), 1, 2))
    assert (given.ranges, given.begun) == ((0, 2), (BegunRange(0, 4, 9),)), "the next one begins there"


def test_a_range_that_a_committed_push_has_begun_waits_for_its_outcome() -> None:
    """Its cluster has left, and the window is open: nobody begins the range anew; behind it the next one goes on."""
    run = make("ab", ranges=2)
    leased(run, "a")
    push = run.open_push("a")
    run.step(ev.PushStaged("s", 1, push, 4))
    assert isinstance(run.ask(ev.PushFinished(0, push, 100, 1, (), 2.5, BegunRange(0, 4, 9))), Committed)
    run.ask(ev.ClusterLeft(0, "a", run.inc("a"), 100))
    assert leased(run, "b") == (1,)
    run.wait(11.0)
    given = run.ask(ev.RangesRequested(0, "b", run.inc("b"), 2, 2))
    assert (given.ranges, given.begun) == ((0,), (BegunRange(0, 4, 9),))


def test_a_question_repeated_gets_its_ranges_and_no_more() -> None:
    run = make("a", ranges=10)
    first = leased(run, "a", seq=1)
    assert leased(run, "a", seq=1, count=5) == first
    assert leased(run, "a", seq=2) == (2, 3)
    assert run.view.ranges.leased == 4


def test_a_range_beyond_the_last_cannot_be_claimed() -> None:
    """Ranges are numbered from 0; what a checkpoint claims and nobody has is leased, what does not exist is not."""
    run = make("a", ranges=4)
    result = run.ask(ev.RangesRequested(0, "a", 1, 1, 2, (3, 4, 5)))
    assert result.ranges == (3,)
    assert (run.view.ranges.free, run.view.ranges.leased) == (3, 1)


def test_a_checkpoint_claims_no_more_than_a_message_may_carry() -> None:
    run = make("a", ranges=4)
    claims = tuple(range(MAX_RANGES_ASKED + 1))
    assert failure(run.ask(ev.RangesRequested(0, "a", 1, 1, 1, claims))) is RemoteProtocolError
    assert run.ask(ev.RangesRequested(0, "a", 1, 1, 1, claims[:-1])).ranges == (0, 1, 2, 3)
    for count in (0, MAX_RANGES_ASKED + 1):
        assert failure(run.ask(ev.RangesRequested(0, "a", 1, 2, count))) is RemoteProtocolError


def test_freed_ranges_are_leased_first_and_in_order() -> None:
    """What a dead incarnation held comes before what nobody had."""
    run = make("ab", ranges=10)
    assert (leased(run, "a", count=3), leased(run, "b")) == ((0, 1, 2), (3, 4))
    run.step(ev.ClusterSilent("a", 1, 10.0, 0, 0))
    assert leased(run, "b", seq=2, count=4) == (0, 1, 2, 5)


def test_ranges_of_a_committed_push_outlive_their_cluster() -> None:
    """It died before its Outcome: what it committed is still trained once, and what else it held is free."""
    run = make("ab", ranges=4)
    mine = leased(run, "a", count=3)
    run.push("a", ranges=mine[:2])
    run.step(ev.ClusterSilent("a", 1, 10.0, 0, 0))
    assert leased(run, "b", count=4) == (2, 3)


def test_data_is_not_used_up_while_some_of_it_is_leased() -> None:
    """The last range is out, and its cluster may still die with it."""
    run = make("ab", ranges=2)
    (first,), _ = leased(run, "a", count=1), leased(run, "b", count=1)
    push = run.push("a", ranges=(first,))
    run.wait(11.0)
    run.outcome(push)
    assert run.view.finished is None


# ---- slots and time --------------------------------------------------------------------------------------------------


def test_there_are_as_many_pushes_as_slots() -> None:
    """The next learns when the first of them is due, at least a moment and at most the usual pause from now."""
    run = make("abc", slots=2, busy_retry_s=5.0)
    run.step(ev.BandwidthMeasured("a", 1, MANIFEST.numel * 4 / 3.0))  # its push takes 3 s
    run.open_push("a")
    run.open_push("b")
    refused = run.ask(ev.PushRequested(0, run.next_push("c"), run.head, 1))
    assert isinstance(refused, Refused) and refused.reason == "waits for a slot: 1st of 1, about 3 s"
    assert refused.retry_after_s == pytest.approx(3.0)
    run.wait(2.95)
    refused = run.ask(ev.PushRequested(0, run.next_push("c"), run.head, 1))
    assert refused.retry_after_s == pytest.approx(0.2)
    run.now = 3.0
    refused = run.ask(ev.PushRequested(0, run.next_push("c"), run.head, 1))
    assert refused.retry_after_s == pytest.approx(0.3), "a tenth of its time, once it is late"


def test_a_push_that_nobody_names_ends_at_its_deadline() -> None:
    """Counted from its cluster's last word; another push's, or another incarnation's, is none."""
    run = make(transfer_s=100.0)
    push = run.open_push("a")
    for _ in range(10):
        run.wait(99.9)
        run.step(ev.TransferAwaited("a", 1, push.seq))
    assert run.all_of(DropPush) == []
    run.wait(50.0)  # else a foreign word would give it the time that it has
    for other in (("a", 1, push.seq + 1), ("a", 2, push.seq), ("b", 1, push.seq)):
        run.step(ev.TransferAwaited(*other))
    assert run.machine.next_deadline() == pytest.approx(run.now + 50.0)
    run.now = run.machine.next_deadline()
    run.step(ev.Ticked())
    assert [o.push for o in run.all_of(DropPush)] == [push]


def test_a_pull_that_nobody_names_ends_at_its_deadline() -> None:
    run = make(transfer_s=100.0)
    run.ask(ev.PullRequested(0, PullId("a", 1, 9), 1))
    for _ in range(10):
        run.wait(99.9)
        run.step(ev.TransferAwaited("a", 1, 9))
    assert run.view.clusters["a"].state == "pulling"
    run.now = run.machine.next_deadline()
    run.step(ev.Ticked())
    assert run.view.clusters["a"].state == "training"


def test_a_push_below_the_least_rate_is_not_kept_by_a_word() -> None:
    """min_push_bps: an operator's word on what is too slow."""
    run = make(transfer_s=100.0, min_push_bps=8e6)
    push = run.open_push("a")
    run.wait(50.0)
    run.step(ev.BandwidthMeasured("a", 1, 0.5e6))
    run.step(ev.TransferAwaited("a", 1, push.seq))
    run.wait(50.1)
    assert len(run.all_of(DropPush)) == 1


@pytest.mark.parametrize("later", [ev.PullRequested, ev.PushRequested])
def test_a_push_is_over_when_its_cluster_asks_for_what_comes_after_it(later: type) -> None:
    """Its word that it gave the push up was lost, with a master perhaps: the slot is free at once."""
    run = make(slots=1)
    push = run.open_push("a")
    if later is ev.PullRequested:
        assert isinstance(run.ask(ev.PullRequested(0, PullId("a", 1, push.seq + 1), 1)), Pending)
    else:
        assert isinstance(run.ask(ev.PushRequested(0, run.next_push("a"), run.head, 1)), Pending)
    assert [o.push for o in run.all_of(DropPush)] == [push]


def test_pulls_at_the_same_time_begin_at_different_slaves() -> None:
    """The second walks on from where the first began: with one slave, by its place in the line of all."""
    run = make("ab")
    for cluster in "ab":
        run.ask(ev.PullRequested(0, PullId(cluster, 1, 9), 3))
    firsts = [c.first for c in _pulls(run)]
    assert firsts == [0, 3]


def _pulls(run: ScriptedRun) -> list[object]:
    return list(run.machine.capture_state().transfers.pulls.values())  # type: ignore[attr-defined]


def test_a_slave_is_drained_when_it_has_answered_everything() -> None:
    """An order under way is a reason to wait: the slave would be stopped in the middle of it."""
    run = make()
    push = run.open_push("a")
    run.held.add(DropPush)
    run.ask(ev.PushAborted(0, push, "no"))
    assert isinstance(run.ask(ev.DrainAsked(0, "s")), Pending)
    run.held.clear()
    run.answer()
    run.step(ev.Ticked())
    assert run.view.slaves["s"].state == "draining"


def test_a_push_that_a_slave_gives_up_is_dropped_unless_it_is_committed() -> None:
    """Its cluster is told why. Word of a former process of the slave means nothing."""
    run = ScriptedRun()
    run.train("a")
    push, sinc = run.open_push("a"), run.view.slaves["s"].sinc
    assert (run.view.clusters["a"].state, run.view.clusters["a"].reason) == ("pushing", "pushing")
    run.step(ev.PushRefused("s", sinc - 1, push, "its ranges leave a gap"))
    assert run.view.clusters["a"].state == "pushing"
    run.step(ev.PushRefused("s", sinc, push, "its ranges leave a gap"))
    assert run.view.clusters["a"].state == "training"
    assert run.ask(ev.PushRequested(0, push, run.head, 1)) == Dropped("s: its ranges leave a gap")
    run.held.add(Measure)
    push = run.push("a")
    run.step(ev.PushRefused("s", sinc, push, "it stalled"))
    run.held.clear()
    run.answer()
    assert run.outcome(push).kind == "accepted"


def test_a_committed_push_has_no_deadline() -> None:
    """However long slaves measure it: its cluster has done all that is asked of it."""
    run = ScriptedRun()
    run.train("a")
    run.held.add(Measure)
    push = run.push("a")
    run.wait(2 * OPTIONS.timing.transfer_s)
    run.held.clear()
    run.answer()
    assert run.outcome(push).kind == "accepted"


def test_a_push_without_a_step_is_committed() -> None:
    """It counts for nothing, and is no false claim."""
    run = make()
    assert run.commit(run.open_push("a"), tokens=0, steps=0) == Committed()


@pytest.mark.parametrize("pushed", [False, True])
def test_the_outcome_of_a_push_that_is_not_known_is_that_it_was_dropped(pushed: bool) -> None:
    """Also beside the outcome of the push before: its cluster trains on, and does not take that one's for its own."""
    run = make()
    if pushed:
        run.outcome(run.push("a"))
    assert isinstance(run.ask(ev.RoundAwaited(0, run.next_push("a"))), Dropped)


def test_an_outcome_is_told_when_the_slaves_have_flipped_and_names_its_own_version() -> None:
    """Not the head, which others may have moved on since."""
    run = make("abc")
    run.held.add(Commit)
    first = run.push("a")
    run.wait(11.0)
    waits = run.ask(ev.PullRequested(0, PullId("c", 1, 2), 1))
    assert isinstance(waits, Refused) and waits.reason == "waits for the slaves to flip"
    assert run.ask(ev.RoundAwaited(0, first)) == Pending("the slaves are flipping to the new version")
    run.held.clear()
    run.answer()
    assert run.view.slaves["s"].reason == "serves v1@r1"
    second = run.push("b")
    run.wait(11.0)
    assert run.head == VersionId(2, 2) and run.outcome(second).version == run.head
    assert run.outcome(first).version == VersionId(1, 1)


def test_what_is_on_every_disk_and_the_head_can_be_pulled() -> None:
    """The initial model, too; neither a version whose snapshot failed nor one of another run."""
    run = ScriptedRun(replace(OPTIONS, durability="async"))
    run.train("a")
    run.outcome(run.push("a"))
    run.held.add(Persist)
    for _ in range(2):
        run.outcome(run.push("a"))
        order = run.orders.popleft()
        run.step(ev.OrderFailed(order.slave, order.sinc, order.number, FailedDisk, "full"))
    kinds = {}
    for seq, version in enumerate(
        (VersionId(0, 0), VersionId(1, 1), VersionId(2, 2), VersionId(3, 3), VersionId(9, 9))
    ):
        kinds[version.version] = type(run.ask(ev.PullRequested(0, PullId("a", 1, 9 + seq), 1, version)))
    assert kinds == {0: Pending, 1: Pending, 2: Failed, 3: Pending, 9: Failed}


def test_a_link_and_a_trainer_are_those_of_the_present_incarnation() -> None:
    """What is heard of a former one, or of a cluster that is none, changes nothing; a trainer that goes on trains."""
    run = make()
    inc = run.inc("a")
    for cluster, heard in (("a", inc - 1), ("b", inc), ("a", inc)):
        run.step(ev.BandwidthMeasured(cluster, heard, 1e6 * heard + 1.0))
        run.step(ev.TrainerChanged(cluster, heard - 1, False, "it hangs"))
    state = run.machine.capture_state()
    assert state.clusters["a"].bytes_per_s == 1e6 * inc + 1.0  # type: ignore[attr-defined]
    for moving, expected in ((False, "idle"), (True, "training")):
        run.step(ev.TrainerChanged("a", inc, moving, "so it is"))
        assert (run.view.clusters["a"].state, run.view.clusters["a"].reason) == (expected, "so it is")
