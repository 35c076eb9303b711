"""What trains in vain is said with its remedy, once, and for as long as it holds."""

from __future__ import annotations

import pytest

from dips.client.agent.membership import build_heartbeat
from dips.client.agent.training import NO_STEP_S
from dips.client.ipc.messages import ErrorReply, PullMoved, PullNow, PushMoved, RangeWanted, Remarked
from dips.ids import GENESIS
from dips.protocol.effects import Acknowledged
from dips.protocol.enums import ClusterStanding, OutcomeKind
from dips.protocol.heartbeats import REMARK_CHARS
from tests.unit.client.agent.play import H, Play, outcome


def note(play: Play) -> str:
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None
    return "; ".join(remark.text for remark in heartbeat.remarks)


def remarks(play: Play) -> list[str]:
    return [fields["text"] for kind, fields in play.marks if kind == "remark"]


def settle(play: Play, kind: OutcomeKind) -> None:
    """A push of H steps is settled."""
    play.step(H)
    end_push(play, play.push_until_committed(), kind)


def end_push(play: Play, moved: PushMoved, kind: OutcomeKind) -> None:
    play.reply(outcome(kind))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow)
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.reply(Acknowledged())


@pytest.fixture(name="play")
def begun() -> Play:
    play = Play(max_restarts=9)
    play.begin()
    return play


def test_a_script_that_never_calls_step(play: Play) -> None:
    """After two minutes with parameters and without a wait; the first step ends it."""
    for play.now in (0.0, NO_STEP_S - 1):
        play.do(play.core.tick(play.now))
    assert note(play) == ""
    play.now = NO_STEP_S
    play.do(play.core.tick(play.now))
    assert note(play) == "no inner step reported in 120 s: call outer.step(local_tokens=…) after each optimizer step"
    play.now += 50
    play.do(play.core.tick(play.now))
    assert len(remarks(play)) == 1
    play.step()
    assert note(play) == ""


def test_steps_that_never_bring_tokens_end_the_job(play: Play) -> None:
    """At the first push, with what to pass; starting it again would not help."""
    play.step(H, tokens=0)
    answer = play.send(play.want_push())
    assert isinstance(answer, ErrorReply) and answer.error == "ConfigError"
    assert answer.message.startswith(f"{H} inner steps and no tokens: give outer.step(local_tokens=…)")
    assert [stop.code for stop in play.stops] == [78]


def test_a_push_without_tokens_is_remarked(play: Play) -> None:
    """Until one brings some; a step without them is none of a person's business."""
    settle(play, OutcomeKind.ACCEPTED)
    play.step(H, tokens=0)
    assert note(play) == ""
    moved = play.push_until_committed()
    assert note(play).startswith("its push brings no tokens: give outer.step(local_tokens=…)")
    end_push(play, moved, OutcomeKind.GATED)
    play.step(1)
    play.push_until_granted()
    assert "no tokens" not in note(play)


def test_a_gated_push_says_why_until_one_is_accepted(play: Play) -> None:
    settle(play, OutcomeKind.GATED)
    assert note(play).startswith("its push was gated: ")
    settle(play, OutcomeKind.ACCEPTED)
    assert note(play) == ""


@pytest.mark.parametrize(
    ("steps", "remedy"),
    [(0, "reported no inner step: call outer.step"), (3, "took 3 inner steps: train longer, call outer.push()")],
)
def test_a_command_that_ends_without_an_accepted_push(play: Play, steps: int, remedy: str) -> None:
    """The log and the last message say so; after an accepted one there is nothing to say."""
    play.step(steps)
    play.core.plan_next_launch(play.core.plan_first_launch(), code=0)
    left = play.core.leave_run()
    assert left is not None and left.reason.startswith("left without one accepted push") and remedy in left.reason

    stopped = Play()
    stopped.core.plan_next_launch(stopped.core.plan_first_launch(), code=0, terminated=True)
    stopped.core.plan_next_launch(stopped.core.plan_first_launch(), code=143, terminated=True)
    stopped.do(stopped.core.tick(0.0))
    assert not remarks(stopped), "somebody ended it"

    done = Play()
    done.begin()
    settle(done, OutcomeKind.ACCEPTED)
    done.core.plan_next_launch(done.core.plan_first_launch(), code=0)
    left = done.core.leave_run()
    assert left is not None and left.reason == ""


def test_a_command_without_an_outer_loop() -> None:
    play = Play()
    play.core.plan_next_launch(play.core.plan_first_launch(), code=0)
    play.do(play.core.tick(0.0))
    assert "it made no OuterLoop" in remarks(play)[0]


def test_what_a_rank_remarks_is_bounded(play: Play) -> None:
    play.send(Remarked(1, "x" * 10_000))
    assert note(play) == "x" * REMARK_CHARS


@pytest.mark.parametrize("why", ["waits", "has no data", "is gone", "has stepped", "joins again"])
def test_a_trainer_that_cannot_step_now_is_not_remarked_on(play: Play, why: str) -> None:
    """The two minutes begin when it can."""
    if why == "waits":
        play.step()
        play.s.trainer.steps_before = 1
        play.send(play.want_push())
    elif why == "has no data":
        play.send(RangeWanted(1, 1))
    elif why == "is gone":
        play.do(play.core.on_trainer_gone("killed", play.now))
    elif why == "has stepped":
        play.step()
    else:
        play.answer_heartbeat(ClusterStanding.GONE)
    for play.now in (NO_STEP_S - 1, NO_STEP_S, NO_STEP_S + 50):
        play.do(play.core.tick(play.now))
    assert not remarks(play)


def test_a_crash_is_forgotten_with_the_next_accepted_push(play: Play) -> None:
    play.do(play.core.on_trainer_gone("it ended", play.now))
    play.core.plan_next_launch(play.core.plan_first_launch(), code=1)
    assert note(play).startswith("crashing, 1 of 9")
    play.send(play.attach(launch=2, pid=8))
    play.pull(GENESIS)
    settle(play, OutcomeKind.ACCEPTED)
    assert note(play) == ""
