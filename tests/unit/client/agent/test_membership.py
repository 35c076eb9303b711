"""Joining, leaving, and a master that cannot be reached."""

from __future__ import annotations

import pytest

from dips.client.agent.account import PastIncarnation
from dips.client.agent.agent import _bracket_host
from dips.client.agent.membership import TAKEN_TRIES, past_incarnation
from dips.client.agent.state import Channel
from dips.client.ipc.messages import (
    AskAgain,
    Detach,
    ErrorReply,
    Halt,
    ManifestSent,
    Noted,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    TrainOn,
    TransferProgress,
)
from dips.dataclass import replace
from dips.errors import DifferentModel
from dips.ids import GENESIS
from dips.protocol.effects import Acknowledged, Joined, ManifestWanted, Pending, Progress, Refused
from dips.protocol.enums import ClusterStanding, OutcomeKind
from dips.protocol.events import ClusterJoined, ClusterLeft, ManifestOffered, PullFinished
from dips.protocol.manifest import Manifest
from dips.wire.packed_manifest import pack_manifest
from tests.unit.client.agent.play import DIGEST, MODEL, NONE_YET, V1, Play, grant, outcome


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_new_incarnation_has_no_accepted_push(play: Play) -> None:
    """Its seq begins anew, so the old incarnation's numbers must settle nothing [invariant 5]."""
    play.begin()
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.ACCEPTED))
    old = play.send(moved)
    assert isinstance(old, PullNow) and old.accepted == moved.seq
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, V1, NONE_YET, ()))
    failed = PullMoved(1, next(play.number), old.seq, False, "the pull is over", 1)
    play.send(failed)
    play.reply(grant(V1))
    verdict = play.send(failed)
    assert isinstance(verdict, PullNow) and (verdict.inc, verdict.accepted) == (2, 0)


def test_a_transfer_of_an_incarnation_that_is_over_is_halted(play: Play) -> None:
    """Its ranks still move it, and nobody answers them: the pull that is due must not be taken for it (seed 109)."""
    play.begin()
    play.step()
    pushing = play.push_until_granted()
    moving = TransferProgress(1, 10, 100)
    play.answer_heartbeat(ClusterStanding.GONE)
    assert isinstance(play.send(moving), Halt), "while it joins again"
    play.reply(Joined(3, 2, V1, NONE_YET, ()))
    play.reply(grant(V1))
    assert isinstance(play.send(moving), Halt) and play.s.sync.meter.nbytes == 0
    pull = play.send(PushMoved(1, next(play.number), pushing.seq, False, "it is over", 10))
    assert isinstance(pull, PullNow) and pull.inc == 2
    assert play.send(moving) == Noted()


def test_a_pull_of_an_incarnation_that_is_over_is_not_taken_for_the_present_one(play: Play) -> None:
    """Its lease ran out while the ranks installed v0@r0, the first pull of its incarnation: v1@r1, which the next
    incarnation is granted under the same seq, is on no rank yet [invariant 6].
    """
    play.send(play.attach())
    play.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.send(play.attach())
    want = PullWanted(1, next(play.number))
    play.send(want)
    play.reply(grant(GENESIS))
    old = play.send(want)
    assert isinstance(old, PullNow)
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, V1, NONE_YET, ()))
    play.reply(grant(V1))
    new = play.send(PullMoved(1, next(play.number), old.seq, True, "", 100))
    assert isinstance(new, PullNow) and (new.inc, new.seq, new.grant) == (2, old.seq, grant(V1))
    assert play.s.trainer.base is None, "the ranks hold v0@r0, which this incarnation has not pulled"


def test_what_the_master_has_of_another_incarnation_is_not_taken_for_ours(play: Play) -> None:
    """Between our lives 1 and 3 somebody else lived: nothing of incarnation 1 is reported again (seeds 86 and 233)."""
    play.begin()
    play.step(3)
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 3, V1, NONE_YET, (), accounted=0))
    assert play.s.account.lost == 0


def test_a_master_that_has_a_successor_gives_no_incarnation(play: Play) -> None:
    """A heartbeat was answered in term 5, a Join in term 4: the agent joins again, by another nonce [invariant 5]."""
    play.begin()
    play.answer_heartbeat(ClusterStanding.GONE, term=5)
    first = play.asked(ClusterJoined).nonce
    play.reply(Joined(4, 2, V1, NONE_YET, ()))
    assert not play.s.joined and play.asked(ClusterJoined).nonce != first
    play.reply(Joined(5, 2, V1, NONE_YET, ()))
    assert play.s.joined and (play.s.membership.term, play.s.membership.inc) == (5, 2)


@pytest.mark.parametrize(
    ("inc", "lost", "why"),
    [(2, 20, "the master knows of 30 of its 50 tokens"), (3, 0, "another agent lived between, elsewhere")],
)
def test_what_the_agent_before_consumed_is_reported_by_the_next(inc: int, lost: int, why: str) -> None:
    """It died, and so did the master that had its heartbeats: the next one in its directory tells what is
    missing.
    """
    play = Play(former=PastIncarnation(1, 50))
    assert isinstance(play.send(play.attach()), AskAgain)
    play.asked(ClusterJoined)
    assert past_incarnation(play.s) == PastIncarnation(1, 50)
    play.reply(Joined(3, inc, V1, NONE_YET, (), accounted=30))
    assert play.s.account.lost == lost, why
    assert past_incarnation(play.s) == PastIncarnation(inc, lost)


def test_a_wrong_model_fails_the_trainer_and_stops(play: Play) -> None:
    """A manifest that differs ends agent and trainer with the master's list of differences."""
    play.send(play.attach())
    error = DifferentModel("this model is not the run's: norm.weight: expected shape (4,), got (8,)")
    play.do(play.core.on_error(play.asks[Channel.SYNC], error, 0.0))
    assert play.send(play.attach()) == ErrorReply("DifferentModel", str(error))
    assert play.stops[0].code == 78


def wanted(play: Play) -> None:
    """The master has another digest, and rank 0 is asked for the manifest."""
    assert isinstance(play.send(play.attach()), AskAgain)
    joining = play.asked(ClusterJoined)
    assert joining.manifest_digest == DIGEST
    play.reply(ManifestWanted("f" * 64))
    assert play.send(play.attach()) == ManifestWanted(DIGEST)


def test_the_manifest_travels_only_when_its_digest_is_not_the_runs(play: Play) -> None:
    """The master asks for it once, to say where the two models differ."""
    wanted(play)
    sent = ManifestSent("7", pack_manifest(MODEL))
    assert isinstance(play.send(sent), AskAgain)
    assert play.asked(ManifestOffered) == ManifestOffered("west", DIGEST, sent.packed)
    play.do(play.core.on_error(play.asks[Channel.SYNC], DifferentModel("norm.weight: expected …"), 0.0))
    assert play.send(sent) == ErrorReply("DifferentModel", "norm.weight: expected …")


def test_a_model_that_is_the_runs_after_all_joins(play: Play) -> None:
    """The master was started anew meanwhile, on a run of this model."""
    wanted(play)
    play.send(ManifestSent("7", pack_manifest(MODEL)))
    play.reply(Acknowledged())
    assert play.asked(ClusterJoined).manifest_digest == DIGEST


@pytest.mark.parametrize(
    ("packed", "error", "words"),
    [
        (pack_manifest(MODEL)[:-3], "RemoteProtocolError", "torn"),
        (pack_manifest(Manifest.from_shapes([("norm.weight", (4,))])), "RemoteProtocolError", "as announced"),
        (b"", "DifferentModel", "the run's is ffffffffffff, and too large to be compared"),
    ],
)
def test_what_is_not_the_announced_manifest_ends_the_attempt(play: Play, packed: bytes, error: str, words: str) -> None:
    """Torn, of another model, or too large to travel: nothing of it reaches the master."""
    wanted(play)
    asked = play.asks[Channel.SYNC]
    answer = play.send(ManifestSent("7", packed))
    assert isinstance(answer, ErrorReply) and answer.error == error and words in answer.message
    assert play.asks[Channel.SYNC] is asked and len(play.stops) == 1


def test_a_manifest_of_an_older_attempt_changes_nothing(play: Play) -> None:
    """Rank 0 died while the master wanted it; the next attempt is asked."""
    wanted(play)
    assert play.send(play.attach(restart=1, pid=8)) == ManifestWanted(DIGEST)
    answer = play.send(ManifestSent("7", pack_manifest(MODEL)))
    assert isinstance(answer, ErrorReply) and answer.error == "StaleIncarnation"
    assert isinstance(play.send(ManifestSent("8", pack_manifest(MODEL))), AskAgain)


def test_a_run_that_was_made_anew_of_another_model_ends_its_trainer(play: Play) -> None:
    """Its lease ran out, and the master that it joins again serves another model."""
    play.begin()
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(ManifestWanted("f" * 64))
    assert play.stops[0].code == 78 and "was another when this trainer attached" in play.stops[0].reason


def test_leaving_loses_what_was_not_pushed(play: Play) -> None:
    """Tokens after the last push are reported as lost when the cluster leaves."""
    play.begin()
    play.step(3)
    play.send(Detach(1))
    assert play.core.leave_run() == ClusterLeft(0, "west", 1, 30)


def test_an_unreachable_master_holds_nobody_who_asks_for_a_push() -> None:
    """The trainer trains on from the first failure; the question goes on, and the look after its grant freezes."""
    play = Play(pace_steps=1)
    play.begin()
    play.step()
    want = play.look_for_push()
    assert isinstance(play.send(want), AskAgain)
    play.lose_master(0.0)
    assert play.send(want) == TrainOn("no answer", 1, 0.0)
    play.step()
    assert play.send(play.look_for_push()) == TrainOn("no answer", 1, 0.0)
    assert play.s.account.carried.tokens == 20
    play.now = 60.0
    play.lose_master(60.0)
    play.reply(grant())
    assert isinstance(play.send(play.want_push()), PushNow)
    assert play.s.account.frozen.tokens == 20


def test_a_trainer_with_parameters_does_not_wait_for_an_absent_master_to_close_its_last_pull(play: Play) -> None:
    """It pulled, and the answer to FinishPull is lost with the master: the next push waits for him, the trainer not."""
    play.begin()
    verdict = play.push_until_accepted()
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.step()
    assert isinstance(play.send(play.look_for_push()), AskAgain), "he answers: it is a matter of milliseconds"
    play.lose_master(0.0)
    assert isinstance(play.send(play.look_for_push()), TrainOn)
    play.reply(Acknowledged())
    play.step()
    assert play.push_until_granted().seq == 3


def test_unreachable_master_after_commit_settles_later() -> None:
    """The trainer trains on; the Outcome that comes later settles the push, and its pull is closed unread."""
    play = Play(pace_steps=1)
    play.demands = False
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.lose_master(0.0)
    play.now = 10.0
    play.lose_master(10.0)
    assert isinstance(play.send(moved), TrainOn)
    play.step(1)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    assert not play.asked(PullFinished).installed
    play.reply(Acknowledged())
    assert (play.s.account.accepted, play.s.account.carried.tokens) == (20, 10)
    play.push_until_granted()


def test_a_name_that_is_taken_is_waited_for_and_then_refused() -> None:
    """Its bearer may be found dead within two leases; one that lives keeps it, and this agent ends: 77."""
    play = Play()
    play.send(play.attach())
    for _ in range(TAKEN_TRIES):
        play.reply(Refused(2.0, "the name west is taken"))
        assert play.asks[Channel.SYNC].delay_s == 2.0 and play.asked(ClusterJoined).nonce == "nonce1"
        assert not play.stops
    play.reply(Refused(2.0, "the name west is taken"))
    assert play.stops[0].code == 77 and "--take-over" in play.stops[0].reason


def test_a_name_that_was_taken_is_waited_for_as_long_the_next_time(play: Play) -> None:
    """Refusals of an earlier Join, which was granted in the end, do not count."""
    play.send(play.attach())
    for inc in (1, 2):
        for _ in range(TAKEN_TRIES):
            play.reply(Refused(2.0, "the name west is taken"))
        play.reply(Joined(3, inc, GENESIS, NONE_YET, ()))
        play.answer_heartbeat(ClusterStanding.GONE)
    assert not play.stops


def test_what_is_trained_while_it_joins_again_is_saved(play: Play) -> None:
    """The agent may die before it has joined: the next one here reports the tokens of both."""
    play.begin()
    play.step(4)
    play.answer_heartbeat(ClusterStanding.GONE)
    play.step(3)
    assert past_incarnation(play.s) == PastIncarnation(1, 70)


def test_the_next_agent_of_a_directory_names_the_incarnation_before() -> None:
    """So it gets the name at once, and an operator's --take-over is handed on."""
    play = Play(former=PastIncarnation(4, 100), take_over=True)
    play.send(play.attach())
    asked = play.asked(ClusterJoined)
    assert (asked.former, asked.take_over) == (4, True)


def test_what_is_waited_for_is_logged_once() -> None:
    """A trainer that stands still for the same reason for five seconds: one line says which."""
    play = Play()
    play.send(play.attach())
    play.reply(Pending("waits for ps1 (lost)"))
    for now in range(20):
        play.do(play.core.tick(float(now)))
    assert [fields for kind, fields in play.marks if kind == "waits"] == [{"reason": "waits for ps1 (lost)"}]


def test_an_address_of_ipv6_has_brackets_where_a_port_follows() -> None:
    assert [_bracket_host(host) for host in ("fd00::7", "10.0.0.7", "berlin")] == ["[fd00::7]", "10.0.0.7", "berlin"]


def test_what_is_trained_while_it_joins_again_is_lost(play: Play) -> None:
    """No incarnation owns it: it is reported as lost by the one that follows, which also learns how far the run is."""
    play.begin()
    play.step(2)
    play.push_until_committed()
    play.step(1)
    play.answer_heartbeat(ClusterStanding.GONE)
    assert dict(play.marks)["incarnation_ended"] == {"inc": 1, "tokens_lost": 30}
    assert not play.asked(ClusterJoined).take_over
    play.step(4)
    play.reply(Joined(3, 2, V1, Progress(500, 1000, None), (), accounted=30))
    assert (play.s.account.lost, play.s.account.unsettled_tokens, play.s.fraction) == (40, 0, 0.5)


def test_an_operators_take_over_is_for_the_first_join_alone() -> None:
    """A second agent that was started later must not be fenced by one whose lease ran out."""
    play = Play(take_over=True)
    play.begin()
    play.answer_heartbeat(ClusterStanding.GONE)
    assert not play.asked(ClusterJoined).take_over


def test_a_manifest_is_sent_once_for_each_time_it_is_wanted(play: Play) -> None:
    """A repetition waits for the master's answer; after a failure nothing more is sent or stopped."""
    wanted(play)
    sent = ManifestSent("7", pack_manifest(MODEL))
    play.send(sent)
    offered = play.asks[Channel.SYNC]
    assert isinstance(play.send(sent), AskAgain) and play.asks[Channel.SYNC] is offered
    other = Play()
    wanted(other)
    for _ in range(2):
        assert isinstance(other.send(ManifestSent("7", b"")), ErrorReply)
    assert len(other.stops) == 1


def test_an_attempt_with_another_model_joins_again(play: Play) -> None:
    """The script was changed between two launches: the master compares, or the run would train two models."""
    play.begin()
    assert isinstance(play.send(replace(play.attach(launch=2, pid=8), manifest_digest="e" * 64)), AskAgain)
    assert play.asked(ClusterJoined).manifest_digest == "e" * 64
    play.reply(Joined(3, 2, GENESIS, NONE_YET, ()))
    frozen = replace(play.attach(launch=3, pid=9), manifest_digest="e" * 64, frozen_digest="d" * 64)
    assert isinstance(play.send(frozen), AskAgain) and play.asked(ClusterJoined).frozen_digest == "d" * 64


def test_a_bug_stops_the_agent(play: Play) -> None:
    """A task of the shell failed: the trainer does not go on beside an agent that does half of its work."""
    play.begin()
    play.do(play.core.on_bug(ValueError("x")))
    assert [(stop.code, stop.reason) for stop in play.stops] == [(70, "ValueError: x")]


def test_each_wait_is_logged_after_five_seconds_of_its_own(play: Play) -> None:
    """None for a trainer that trains or is gone, whatever its last transfer said."""
    play.begin()
    play.step()

    def logged(*times: float) -> list[object]:
        before = len(play.marks)
        for play.now in times:
            play.do(play.core.tick(play.now))
        return [fields["reason"] for kind, fields in play.marks[before:] if kind == "waits"]

    assert logged(0.0, 50.0) == []
    play.send(play.want_push())
    assert logged(100.0, 104.9) == [] and logged(105.0, 200.0) == ["it asks for a push"]
    play.reply(Pending("waits for ps1"))
    assert logged(200.0, 204.0) == [] and logged(205.0) == ["waits for ps1"]
    play.do(play.core.on_trainer_gone("killed", play.now))
    assert logged(206.0, 300.0) == []
