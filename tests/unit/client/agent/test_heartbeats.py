"""What heartbeats report, and what their answers mean."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import count
from math import inf, isnan
from pathlib import Path

import pytest

from dips.client.agent.account import Pace, PastIncarnation
from dips.client.agent.membership import HEAL_S, build_heartbeat
from dips.client.agent.state import Channel, SendHeartbeat, SyncPhase
from dips.client.ipc.messages import (
    AskAgain,
    ErrorReply,
    Halt,
    Noted,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    RangeWanted,
    TrainOn,
    TransferProgress,
)
from dips.errors import Denied, StaleIncarnation
from dips.identity.names import PeerRole
from dips.ids import GENESIS, PushId
from dips.protocol.effects import Acknowledged, Committed, Joined, Progress, Refused
from dips.protocol.enums import Activity, ClusterStanding, OutcomeKind
from dips.protocol.events import ClusterJoined, ClusterLeft, PullRequested, TrainerChanged, TransferAwaited
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer
from dips.protocol.membership import Judge
from dips.protocol.options import TimingOptions
from dips.transport.tls import LOOK_S, TlsSource
from tests.enrolled import Enrolled
from tests.unit.client.agent.play import HEARTBEAT_S, NONE_YET, V1, Play, grant, outcome


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_push_that_the_master_has_dropped_is_halted(play: Play) -> None:
    """A heartbeat that left while the push moved, answered without it, ends it; one from before the grant does not."""
    play.s.pace, play.demands = Pace(steps=1), False
    play.begin()
    play.step()
    assert build_heartbeat(play.s) is not None
    play.s.heartbeats.in_flight = True
    verdict = play.push_until_granted()
    nothing = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, NONE_YET)
    moving = TransferProgress(play.s.trainer.attempt, 10, 100)
    play.do(play.core.on_heartbeat_reply(play.s.membership.inc, nothing, play.now))
    assert play.send(moving) == Noted()
    assert build_heartbeat(play.s) is not None
    play.do(
        play.core.on_heartbeat_reply(
            play.s.membership.inc, replace(nothing, push=PushId("west", 1, verdict.seq)), play.now
        )
    )
    assert play.send(moving) == Noted()
    assert build_heartbeat(play.s) is not None
    play.do(play.core.on_heartbeat_reply(play.s.membership.inc, nothing, play.now))
    assert isinstance(play.send(moving), Halt)
    moved = PushMoved(play.s.trainer.attempt, next(play.number), verdict.seq, False, "the master has dropped it", 10)
    assert isinstance(play.send(moved), TrainOn)
    play.reply(Acknowledged())
    play.check_consumed(10)
    play.demands = True
    play.push_until_granted()
    assert play.send(moving) == Noted()


def test_a_heartbeat_reports_the_rate_of_the_present_or_last_transfer(play: Play) -> None:
    """Bytes over the time since the grant, while they move and after; a transfer shorter than a heartbeat counts
    too.
    """
    play.begin()
    play.step()
    play.now = 10.0
    verdict = play.push_until_granted()
    play.now = 12.0
    play.send(TransferProgress(play.s.trainer.attempt, 100, 400))
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None and (heartbeat.bytes_moved, heartbeat.bytes_total, heartbeat.bytes_per_s) == (
        100,
        400,
        50.0,
    )
    play.now = 14.0
    play.send(PushMoved(play.s.trainer.attempt, next(play.number), verdict.seq, True, "", 400))
    play.now = 60.0
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None and (heartbeat.bytes_moved, heartbeat.bytes_per_s) == (400, 100.0)


def test_a_heartbeat_tells_by_which_rate_a_push_moves(play: Play) -> None:
    """A pull at ten times the rate of the push before it: by that each next push was begun and expected too late, and
    met no other. Before the first push there is no other rate.
    """
    play.begin()
    pulled = build_heartbeat(play.s)
    assert pulled is not None and pulled.bytes_per_s > 0
    play.step()
    verdict = play.push_until_granted()
    play.now += 10.0
    moved = PushMoved(play.s.trainer.attempt, next(play.number), verdict.seq, True, "", 400)
    play.send(moved)
    play.reply(Committed())
    play.reply(outcome(OutcomeKind.ACCEPTED))
    order = play.send(moved)
    assert isinstance(order, PullNow)
    play.now += 1.0
    play.send(PullMoved(play.s.trainer.attempt, next(play.number), order.seq, True, "", 400))
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None and (heartbeat.bytes_moved, heartbeat.bytes_per_s) == (400, 40.0)


def test_a_push_of_which_nothing_moves_leaves_the_rate_of_pushes_alone(play: Play) -> None:
    """Ranks first report that no byte has moved: where that was all, the next push was planned by the rate of pulls."""
    play.begin()
    play.step()
    play.s.sync.meter.push_bytes_per_s = 40.0
    play.push_until_granted()
    play.now += 1.0
    play.send(TransferProgress(1, 0, 400))
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None and (heartbeat.bytes_moved, heartbeat.bytes_per_s) == (0, 40.0)


def test_gone_joins_again_and_pulls_before_anything_counts(play: Play) -> None:
    """The lease ran out: what was unsettled is lost, a new incarnation begins with a new nonce, the trainer pulls the
    head.
    """
    play.begin(ranges=(5,))
    play.send(RangeWanted(1, 1))
    play.step(3)
    play.answer_heartbeat(ClusterStanding.LIVE)
    play.step(1)
    play.answer_heartbeat(ClusterStanding.GONE)
    assert play.asked(ClusterJoined).nonce == "nonce2"
    play.reply(Joined(3, 2, V1, NONE_YET, (), accounted=30))
    assert play.s.account.lost == 10  # the master wrote off the 30 that were reported
    play.step(2)
    assert play.s.account.lost == 30
    want = play.want_push()
    play.send(want)
    assert play.asked(PullRequested).pull.inc == 2
    play.reply(grant(V1))
    verdict = play.send(want)
    assert isinstance(verdict, PullNow)
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 1))
    play.step(1)
    assert play.s.account.carried.tokens == 10
    left = play.core.leave_run()
    assert left == ClusterLeft(0, "west", 2, 40)


def test_fenced_stops_with_75(play: Play) -> None:
    """Only a new process joins again: two agents would fence each other for ever."""
    play.begin()
    play.answer_heartbeat(ClusterStanding.FENCED)
    assert [stop.code for stop in play.stops] == [75]
    failure = play.send(play.want_push())
    assert isinstance(failure, ErrorReply) and "fenced" in failure.message


REVOKED = Denied("the certificate of cluster 'west' of run 'run' is revoked")


def refuse_heartbeat(play: Play, after_s: float) -> None:
    play.now += after_s
    play.do(play.core.on_heartbeat_error(REVOKED, play.now))


@pytest.mark.parametrize("heartbeat_s", [0.1, HEARTBEAT_S, 12.0])
def test_who_is_refused_for_good_stops_with_77(heartbeat_s: float) -> None:
    """At the second heartbeat, and not before everybody has looked at their files: the rank hears why."""
    play = Play(heartbeat_s=heartbeat_s)
    play.begin()
    play.step()
    play.push_until_granted()
    refuse_heartbeat(play, 0.0)
    while (refused_s := play.now + heartbeat_s) < max(heartbeat_s, HEAL_S):
        refuse_heartbeat(play, heartbeat_s)
        assert not play.stops, f"after {refused_s} s"
    refuse_heartbeat(play, heartbeat_s)
    assert [stop.code for stop in play.stops] == [77]
    failure = play.send(TransferProgress(play.s.trainer.attempt, 10, 100))
    assert isinstance(failure, ErrorReply) and failure.error == "Denied"
    assert "is revoked" in failure.message and "start this agent again" in failure.message


def test_a_heartbeat_that_was_hurried_is_refused_for_no_longer() -> None:
    """Where heartbeats are rare, files are looked at between two that are due, not before one sent in between."""
    play = Play(heartbeat_s=12.0)
    play.begin()
    refuse_heartbeat(play, 0.0)
    refuse_heartbeat(play, 11.0)
    assert not play.stops
    refuse_heartbeat(play, 1.0)
    assert [stop.code for stop in play.stops] == [77]


def test_a_refusal_that_heals_ends_nothing(play: Play) -> None:
    """A certificate is being replaced: an answer between two refusals begins anew, a silent master does not."""
    play.begin()
    refuse_heartbeat(play, 0.0)
    play.answer_heartbeat(ClusterStanding.LIVE)
    refuse_heartbeat(play, 5 * HEARTBEAT_S)
    assert not play.stops
    play.lose_master(play.now + 1.0)
    refuse_heartbeat(play, HEARTBEAT_S)
    assert [stop.code for stop in play.stops] == [77]


def test_a_question_that_is_refused_hurries_one_heartbeat(play: Play) -> None:
    """It is asked again meanwhile: its answer counts if the refusal heals; only heartbeats say that it will not."""
    play.begin()
    play.step()
    want = play.want_push()
    play.send(want)
    sent, asked = len(play.heartbeats), play.asks[Channel.SYNC]
    play.do(play.core.on_error(asked, REVOKED, play.now))
    again = play.asks[Channel.SYNC]
    assert len(play.heartbeats) == sent + 1 and again is not asked and again.number == asked.number
    answer = play.send(want)
    assert isinstance(answer, AskAgain) and answer.reason == str(REVOKED)
    refuse_heartbeat(play, 0.0)
    play.do(play.core.on_error(play.asks[Channel.SYNC], REVOKED, play.now))
    assert len(play.heartbeats) == sent + 1 and not play.stops, "the next one is not hurried"
    play.answer_heartbeat(ClusterStanding.LIVE)
    play.reply(grant())
    assert isinstance(play.send(want), PushNow)


def test_who_never_joined_is_told_at_once(play: Play) -> None:
    """A person has just started it."""
    play.send(play.attach())
    play.do(play.core.on_error(play.asks[Channel.SYNC], REVOKED, play.now))
    assert [stop.code for stop in play.stops] == [77]


def test_a_refusal_lasts_longer_than_files_are_unread() -> None:
    """Master and agent have both looked again before one is believed to be for good."""
    assert HEAL_S >= 2 * LOOK_S


def test_stale_incarnation_waits_for_the_heartbeat(play: Play) -> None:
    """A question of an incarnation that is not live says nothing about why; the next heartbeat does, and it is
    hurried.
    """
    play.begin()
    play.step()
    want = play.want_push()
    play.send(want)
    play.do(play.core.on_error(play.asks[Channel.SYNC], StaleIncarnation("west/1 is gone"), 1.0))
    assert len(play.heartbeats) == 1 and isinstance(play.send(want), AskAgain)
    play.answer_heartbeat(ClusterStanding.GONE)
    play.asked(ClusterJoined)


def test_the_answer_of_an_older_term_changes_nothing(play: Play) -> None:
    """A master that has a successor neither ends the incarnation nor fences it."""
    play.begin()
    for standing in (ClusterStanding.GONE, ClusterStanding.FENCED):
        play.answer_heartbeat(standing, term=2)
    assert play.s.joined and not play.stops
    play.answer_heartbeat(ClusterStanding.GONE, term=4)
    assert not play.s.joined


def test_the_answer_to_a_former_incarnation_changes_nothing(play: Play) -> None:
    """It was sent before the cluster joined again: what became of that incarnation is known."""
    play.begin()
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, V1, NONE_YET, ()))
    for standing in (ClusterStanding.GONE, ClusterStanding.FENCED):
        play.answer_heartbeat(standing, inc=1)
    assert play.s.joined and play.s.membership.inc == 2 and not play.stops


def test_while_it_joins_no_answer_counts(play: Play) -> None:
    """The Join under way ends the incarnation that asked: a second one would fence the first."""
    play.begin()
    play.answer_heartbeat(ClusterStanding.GONE)
    nonce = play.asked(ClusterJoined).nonce
    play.answer_heartbeat(ClusterStanding.GONE)
    assert play.asked(ClusterJoined).nonce == nonce


def test_one_heartbeat_is_out_at_a_time(play: Play) -> None:
    """The next one leaves HEARTBEAT_S after the answer, or at once if it was needed meanwhile."""
    play.begin()
    play.now = HEARTBEAT_S
    play.do(play.core.tick(play.now))
    assert len(play.heartbeats) == 1 and play.core.next_deadline() == inf
    play.now += 5.0
    play.do(play.core.tick(play.now))
    assert len(play.heartbeats) == 1
    play.answer_heartbeat(ClusterStanding.LIVE)
    assert play.core.next_deadline() == play.now + HEARTBEAT_S
    play.now += HEARTBEAT_S
    play.do(play.core.tick(play.now))
    assert len(play.heartbeats) == 2
    play.send(play.want_push())
    play.do(play.core.on_error(play.asks[Channel.SYNC], StaleIncarnation("west/1 is gone"), play.now))
    assert len(play.heartbeats) == 2
    play.answer_heartbeat(ClusterStanding.LIVE)
    assert len(play.heartbeats) == 3


def test_each_heartbeat_saves_what_was_consumed(play: Play) -> None:
    """The next agent in this directory knows what may have been reported to the master, and a little more."""
    play.begin()
    play.step(3)
    play.now = HEARTBEAT_S
    play.do(play.core.tick(play.now))
    assert play.saved[-1] == PastIncarnation(1, 30)


def test_an_incarnation_that_lives_after_all_goes_on() -> None:
    """A push was refused as if it were over, and the master says that it lives: the trainer is told to train on."""
    play = Play(pace_steps=1)
    play.begin()
    play.step()
    want = play.look_for_push()
    play.send(want)
    play.do(play.core.on_error(play.asks[Channel.SYNC], StaleIncarnation("west/1 is gone"), 1.0))
    assert play.s.sync.phase is SyncPhase.UNSURE and isinstance(play.send(want), AskAgain)
    play.answer_heartbeat(ClusterStanding.LIVE)
    assert play.s.sync.phase is SyncPhase.RESTING
    answer = play.send(want)
    assert isinstance(answer, TrainOn) and answer.reason == "the master took up this incarnation again"
    assert play.s.account.carried.tokens == 10, "what was trained goes with the next push"


def test_a_renewed_certificate_that_is_not_used_is_told(tmp_path: Path) -> None:
    """An expired one that was put over a valid one: the valid one stays in use, and `dips status` says why."""
    enrolled, looks = Enrolled(tmp_path), count(step=2 * LOOK_S)
    files = enrolled.enroll("west", PeerRole.CLUSTER)
    source = TlsSource(files, "west", PeerRole.CLUSTER, enrolled.run, clock=lambda: next(looks))
    play = Play()
    play.begin()

    def note() -> str:
        play.do(play.core.on_certificate(source.find_problem()))
        heartbeat = build_heartbeat(play.s)
        assert heartbeat is not None
        return "; ".join(remark.text for remark in heartbeat.remarks)

    valid = files.cert.read_bytes(), files.key.read_bytes()
    assert note() == ""
    enrolled.enroll("west", PeerRole.CLUSTER, timedelta())
    assert note().startswith(f"certificate: the new files are not used: tls: {files.cert} expired at")
    assert source.read_current().cert == valid[0]
    files.cert.write_bytes(valid[0])
    files.key.write_bytes(valid[1])
    assert note() == ""


def report(play: Play) -> ClusterHeartbeat:
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None
    return heartbeat


def test_a_heartbeat_tells_what_the_trainer_waits_for(play: Play) -> None:
    """And of which transfer: slaves keep one open only while the heartbeats name it."""
    play.begin()
    resting = report(play)
    assert (resting.activity, resting.transfer_seq) == (Activity.INNER, 0) and isnan(resting.loss)
    play.step(2)
    moved = play.push_until_committed()
    assert (report(play).activity, report(play).transfer_seq) == (Activity.WINDOW, 2)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow)
    assert (report(play).activity, report(play).transfer_seq, report(play).loss) == (Activity.PULL, 2, 2.0)
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    assert play.s.sync.phase is SyncPhase.CLOSING
    assert (report(play).activity, report(play).transfer_seq) == (Activity.INNER, 0), "it trains while the pull closes"
    play.reply(Acknowledged())
    play.send(play.want_push())
    assert (report(play).activity, report(play).transfer_seq) == (Activity.PUSH, 3)
    play.reply(grant())
    play.do(play.core.on_trainer_gone("killed", play.now))
    assert (report(play).activity, report(play).transfer_seq) == (Activity.IDLE, 0)


def test_a_trainer_that_waits_for_a_slot_does_not_hang(play: Play) -> None:
    """The push that its script demands is refused for longer than the master has patience with a trainer."""
    judge = Judge(TimingOptions(hang_s=10.0))
    judge.welcome_cluster("west", 1, play.now)
    play.begin()
    play.step()
    want = play.want_push()
    for play.now in range(0, 20, 2):
        play.send(want)
        play.reply(Refused(2.0, "all 2 slots are in use"))
        found = judge.on_cluster_heartbeat(report(play), play.now)
        assert not [event for event in found if isinstance(event, TrainerChanged | TransferAwaited)]
    play.now += 2.0
    play.reply(grant())
    play.send(want)
    assert report(play).transfer_seq == play.s.sync.seq, "now its ranks have a push to begin"


def test_a_trainer_that_overlaps_is_reported_as_training() -> None:
    """Whatever its push waits for; before it has parameters, and where its ranks stand until the push is settled, it
    waits like any other.
    """
    play = Play(overlap=True)
    play.send(play.attach())
    play.reply(Joined(3, 1, GENESIS, NONE_YET, ()))
    play.send(play.attach())
    want = PullWanted(1, next(play.number))
    play.send(want)
    assert report(play).activity is Activity.PULL and play.s.tally.cause == "pull"
    play.reply(grant())
    assert isinstance(play.send(want), PullNow)
    play.send(PullMoved(1, next(play.number), 1, True, "", 9))
    play.reply(Acknowledged())
    play.step()
    moved = play.push_until_committed()
    assert isinstance(play.send(replace(moved, at_once=True)), AskAgain)
    assert (report(play).activity, report(play).transfer_seq) == (Activity.INNER, 2) and play.s.tally.cause == "inner"
    play.send(moved)
    assert (report(play).activity, report(play).transfer_seq) == (Activity.WINDOW, 2) and play.s.tally.cause == "window"


def test_a_commit_whose_trainer_is_gone_is_no_transfer(play: Play) -> None:
    """Its outcome is awaited, and no rank moves a byte for it."""
    play.begin()
    play.step()
    play.push_until_committed()
    play.do(play.core.on_trainer_gone("killed", play.now))
    assert play.s.sync.phase is SyncPhase.AWAITING and report(play).transfer_seq == 0


def test_the_length_of_a_step_is_that_of_the_first_until_more_are_known(play: Play) -> None:
    """Of an aligned cluster nothing is told so early: meetings are planned by it."""
    play.begin()
    for play.now, told in ((10.0, 10.0), (12.0, 2.0)):
        play.step()
        assert report(play).step_s == told
    aligned = Play()
    aligned.s.pace = Pace(aligned=8)
    aligned.begin()
    aligned.now = 10.0
    aligned.step()
    assert report(aligned).step_s == 0.0


def test_what_an_answer_says_of_the_run_is_known(play: Play) -> None:
    """Its progress, and when the next push should begin: the trainer is told with its next answer."""
    play.s.pace = Pace(aligned=2)
    play.begin()
    for play.now in (1.0, 2.0):
        play.step()
    answer = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, Progress(500, 1000, None), 100.0)
    play.do(play.core.on_heartbeat_reply(1, answer, play.now))
    told = play.send(PushWanted(1, next(play.number)))
    assert isinstance(told, TrainOn) and told.progress == 0.5 and told.steps > 1, "a push is not due before the meeting"
    moved = replace(answer, progress=Progress(500, 2000, None))
    play.do(play.core.on_heartbeat_reply(1, moved, play.now))
    assert play.s.fraction == 0.25, "an operator has set another target"


def test_a_rollback_lowers_the_progress(play: Play) -> None:
    """From one heartbeat to the next, and a finished run goes on; but an answer that the outcome of a push has
    overtaken is older.
    """
    play.begin()

    def answer_next(progress: Progress) -> None:
        play.now += HEARTBEAT_S
        play.do(play.core.tick(play.now))
        answer = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, progress)
        play.do(play.core.on_heartbeat_reply(1, answer, play.now))

    answer_next(Progress(1000, 1000, V1))
    answer_next(Progress(300, 1000, None))
    assert play.s.fraction == 0.3 and not play.s.membership.progress.finished
    play.step()
    play.push_until_committed()
    play.now += HEARTBEAT_S
    play.do(play.core.tick(play.now))
    play.reply(replace(outcome(OutcomeKind.ACCEPTED), progress=Progress(400, 1000, None)))
    late = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, Progress(300, 1000, None))
    play.do(play.core.on_heartbeat_reply(1, late, play.now))
    assert play.s.fraction == 0.4, "an older answer that comes late"


def test_an_unanswered_heartbeat_is_followed_by_the_next(play: Play) -> None:
    """In its own time; and a deadline is never too short for a long way."""
    play.begin()
    play.now = HEARTBEAT_S
    play.do(play.core.tick(play.now))
    assert play.core.next_deadline() == inf
    play.lose_master(play.now)
    assert play.core.next_deadline() == play.now + HEARTBEAT_S


@pytest.mark.parametrize(("heartbeat_s", "deadline_s"), [(0.1, 1.0), (12.0, 12.0)])
def test_a_heartbeat_has_a_heartbeats_time_and_no_less_than_a_second(heartbeat_s: float, deadline_s: float) -> None:
    play = Play(heartbeat_s=heartbeat_s)
    play.begin()
    (sent,) = [a for a in play.core.tick(heartbeat_s) if isinstance(a, SendHeartbeat)]
    assert sent.deadline_s == deadline_s


def test_a_committed_push_of_an_incarnation_that_lives_after_all_goes_with_the_next(play: Play) -> None:
    """Whether it was folded is not known: its trainer's progress is carried again, one that is gone has lost it."""
    for gone in (False, True):
        play = Play()
        play.begin()
        play.step(2)
        play.push_until_committed()
        play.do(play.core.on_error(play.asks[Channel.SYNC], StaleIncarnation("west/1 is gone"), play.now))
        if gone:
            play.do(play.core.on_trainer_gone("killed", play.now))
        play.answer_heartbeat(ClusterStanding.LIVE)
        assert (play.s.account.carried.tokens, play.s.account.lost) == ((0, 20) if gone else (20, 0))


def test_the_rate_falls_while_no_byte_comes(play: Play) -> None:
    """A link that stands still is slow. And what is counted is counted for one transfer alone."""
    play.begin()
    assert report(play).bytes_moved == 100, "of its first pull"
    play.step()
    play.send(play.want_push())
    assert report(play).bytes_moved == 0
    play.reply(grant())
    play.now = 10.0
    verdict = play.send(play.want_push())
    assert isinstance(verdict, PushNow)
    for play.now, rate in ((12.0, 50.0), (14.0, 25.0)):
        play.send(TransferProgress(1, 100, 400))
        assert report(play).bytes_per_s == rate
    moved = PushMoved(1, next(play.number), verdict.seq, True, "", 400)
    play.send(moved)
    play.reply(Committed())
    play.reply(outcome(OutcomeKind.ACCEPTED))
    assert isinstance(play.send(moved), PullNow) and report(play).bytes_moved == 0
    play.send(TransferProgress(1, 7, 400))
    play.do(play.core.on_trainer_gone("killed", play.now))
    play.reply(Acknowledged())
    play.send(play.attach(launch=2, pid=8))
    play.send(PullWanted(2, next(play.number)))
    assert play.asked(PullRequested).pull.seq == 3 and report(play).bytes_moved == 0


def test_a_meeting_that_was_answered_for_the_push_before_is_not_kept(play: Play) -> None:
    """The master told "now" of a window that was over when its answer came: the next push had one inner step."""
    play.s.pace, play.demands = Pace(aligned=8), False
    play.begin()
    play.step(8)
    order = play.push_until_accepted()
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None and heartbeat.since_push == 8
    moved = PullMoved(play.s.trainer.attempt, next(play.number), order.seq, True, "", 100)
    assert isinstance(play.send(moved), TrainOn)
    now = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, NONE_YET, push_in_s=0.0)
    play.do(play.core.on_heartbeat_reply(1, now, play.now))
    play.step()
    assert play.s.pace.look_in(play.now) > 0
    assert build_heartbeat(play.s) is not None
    play.do(play.core.on_heartbeat_reply(1, now, play.now))
    assert play.s.pace.look_in(play.now) == 0, "what is answered to this one is for the next push"
