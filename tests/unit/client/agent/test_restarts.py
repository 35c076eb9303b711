"""Whether the training command is launched again, and what is said of its crashes."""

from __future__ import annotations

import pytest

from dips.client.agent.membership import build_heartbeat
from dips.client.agent.restarts import RESTART_PAUSE_S, EndAgent, LaunchCommand, describe_crash
from dips.client.agent.state import Crash
from dips.client.ipc.messages import InsideChanged
from dips.ids import GENESIS
from dips.protocol.effects import Finished
from dips.protocol.enums import ClusterStanding, RemarkSubject
from dips.protocol.heartbeats import Remark
from tests.unit.client.agent.play import Play


def crash(play: Play, code: int = 1, last_line: str = "", at: float = 0.0) -> LaunchCommand | EndAgent:
    """The command crashes once more."""
    play.now = at
    play.do(play.core.on_trainer_gone("it ended", at))
    return play.core.plan_next_launch(play.core.plan_first_launch(), code, last_line=last_line)


def test_a_command_that_crashes_is_launched_again_so_often() -> None:
    """After a pause, with the next number, `max_restarts` times; then the agent ends with its exit code."""
    core = Play(max_restarts=2).core
    first = core.plan_first_launch()
    assert first == LaunchCommand(1, 0.0)
    second = core.plan_next_launch(first, code=1, last_line="a")
    assert second == LaunchCommand(2, RESTART_PAUSE_S)
    assert isinstance(second, LaunchCommand)
    third = core.plan_next_launch(second, code=1, last_line="b")
    assert isinstance(third, LaunchCommand) and third.launch == 3
    end = core.plan_next_launch(third, code=137)
    assert end == EndAgent(
        137, "crashed too often: 3 times, max_restarts is 2 in 86400 s: exit 137, killed by SIGKILL (out of memory?)"
    )


def test_crashes_count_within_a_window() -> None:
    """A crash a day is no crash too often, however long the run lasts."""
    play = Play(max_restarts=2, restart_window_s=100.0)
    assert all(isinstance(crash(play, at=60.0 * i, last_line=f"{'x' * i}"), LaunchCommand) for i in range(50))
    assert len(play.s.crashes) <= 2
    assert isinstance(crash(play, at=2941.0), EndAgent)
    play = Play(max_restarts=1, restart_window_s=100.0)
    assert isinstance(crash(play, at=0.0), LaunchCommand) and isinstance(crash(play, at=100.0), EndAgent)


def test_the_same_crash_three_times_before_the_first_step() -> None:
    """Another try would end like it: numbers in the line do not make it another. After a step it is tried on."""
    play = Play(max_restarts=9)
    line = "RuntimeError: port {} is taken"
    assert isinstance(crash(play, last_line=line.format(1)), LaunchCommand)
    assert isinstance(crash(play, last_line=line.format(22)), LaunchCommand)
    end = crash(play, last_line=line.format(3))
    assert isinstance(end, EndAgent) and "3 times in the same way before its first step: exit 1" in end.reason

    play = Play(max_restarts=9)
    play.begin()
    play.step()
    assert all(isinstance(crash(play, last_line="ValueError: x"), LaunchCommand) for _ in range(9))
    assert isinstance(crash(play, last_line="ValueError: x"), EndAgent)

    play = Play(max_restarts=9)
    assert all(isinstance(crash(play, last_line="ValueError: x"), LaunchCommand) for _ in range(2))
    play.begin()
    play.step()
    assert isinstance(crash(play, last_line="ValueError: x"), LaunchCommand), "the third has taken a step"

    play = Play(max_restarts=9)
    assert all(isinstance(crash(play, code=137), LaunchCommand) for _ in range(9)), "killed, perhaps from outside"
    play = Play(max_restarts=9)
    assert isinstance([crash(play, code=255) for _ in range(3)][-1], EndAgent), "a command that says exit(-1)"
    play = Play(max_restarts=9)
    ends = [crash(play, code=128) for _ in range(3)]
    assert isinstance(ends[-1], EndAgent), "no signal has this code"


def test_what_no_other_try_can_mend_ends_at_once() -> None:
    """A command that cannot be started, and an error of configuration, also under a torchrun with a code of its own."""
    end = crash(Play(max_restarts=9), code=127, last_line="error: cannot start 'x'")
    assert isinstance(end, EndAgent) and end.code == 127 and "cannot be started" in end.reason
    assert crash(Play(max_restarts=9), code=78) == EndAgent(78, "an error of configuration: exit 78")
    end = crash(Play(max_restarts=9), last_line="dips.errors.ConfigError: shared.run: missing")
    assert isinstance(end, EndAgent) and end.code == 78 and "shared.run: missing" in end.reason
    assert isinstance(crash(Play(max_restarts=9), last_line="dips.errors.Busy: full"), LaunchCommand)


def test_where_a_command_configures_each_launch_a_wrong_configuration_is_tried_again() -> None:
    """The plan was for devices of which one has gone; the next one is for those that are there. Not for ever."""
    play = Play(max_restarts=9, before_start=("plan",))
    line = "dips.errors.ConfigError: plan.yaml: expected 4 ranks, got 3"
    assert isinstance(crash(play, last_line=line), LaunchCommand)
    assert isinstance(crash(play, code=78, last_line="before_start: error: fits nowhere"), LaunchCommand)
    assert all(isinstance(crash(play, code=78), LaunchCommand) for _ in range(2))
    end = crash(play, code=78)
    assert isinstance(end, EndAgent) and end.code == 78 and "3 times in the same way" in end.reason
    end = crash(Play(max_restarts=9, before_start=("plan",)), code=127, last_line="before_start: sh: plan: not found")
    assert isinstance(end, EndAgent) and end.reason.endswith("last line: before_start: sh: plan: not found")


def test_ranks_that_end_for_a_new_plan_have_not_crashed() -> None:
    """The command is started again at once, whatever its exit code, and neither counted nor remarked on as a crash; the
    next attempt's end is an end like any other. SIGTERM and the run's end go first.
    """
    play = Play(max_restarts=0)
    first = play.core.plan_first_launch()
    play.begin()
    for attempt, code in ((1, 1), (2, 0)):
        if attempt > 1:
            play.send(play.attach(launch=attempt, pid=attempt))
        play.step()
        play.send(InsideChanged(play.s.trainer.attempt, "plan", "plan.yaml is another now", restarts=True))
        assert play.core.plan_next_launch(first, code) == LaunchCommand(2, 0.0)
        assert play.marks[-1] == ("remark", {"subject": RemarkSubject.INSIDE, "text": "plan.yaml is another now"})
    assert not play.s.crashes and RemarkSubject.CRASH not in play.s.remarks
    play.send(play.attach(launch=3, pid=3))
    assert play.s.trainer.restarts_for == "" and RemarkSubject.INSIDE not in play.s.remarks
    play.send(InsideChanged(play.s.trainer.attempt, "plan", "plan.yaml is another now", restarts=True))
    assert play.core.plan_next_launch(first, code=143, terminated=True) == EndAgent(143)
    play.send(play.attach(launch=4, pid=4))
    assert isinstance(crash(play), EndAgent)


def test_crashes_are_shown() -> None:
    """The heartbeat says how often and how, the last message why the cluster is gone."""
    play = Play(max_restarts=1)
    play.begin()
    crash(play, last_line="ValueError: x")
    heartbeat = build_heartbeat(play.s)
    assert heartbeat is not None and heartbeat.remarks == (
        Remark(RemarkSubject.CRASH, "crashing, 1 of 1, exit 1, last line: ValueError: x"),
    )
    crash(play, last_line="ValueError: x")
    left = play.core.leave_run()
    assert left is not None and left.reason.startswith(
        "crashed too often: 2 times, max_restarts is 1 in 86400 s: exit 1"
    )


def test_a_command_that_is_done_is_not_launched_again() -> None:
    """It ended well, or SIGTERM ended it, or the run is finished."""
    play = Play(max_restarts=9)
    first = play.core.plan_first_launch()
    assert play.core.plan_next_launch(first, code=0) == EndAgent(0)
    assert play.core.plan_next_launch(first, code=143, terminated=True) == EndAgent(143)
    play.begin()
    play.send(play.want_push())
    play.reply(Finished(GENESIS))
    assert play.core.plan_next_launch(first, code=1) == EndAgent(1)


def test_what_stopped_the_agent_first_is_its_exit_code() -> None:
    """Fenced: the code is that of the reason, whatever the command ended with and whatever failed afterwards."""
    play = Play(max_restarts=9)
    play.begin()
    play.answer_heartbeat(ClusterStanding.FENCED)
    play.do(play.core.on_bug(RuntimeError("later")))
    end = play.core.plan_next_launch(play.core.plan_first_launch(), code=0)
    assert isinstance(end, EndAgent) and end.code == 75 and "fenced" in end.reason


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (137, "exit 137, killed by SIGKILL (out of memory?)"),
        (143, "exit 143, killed by SIGTERM"),
        (134, "exit 134, killed by SIGABRT, last line: std::bad_alloc"),
        (1, "exit 1, last line: std::bad_alloc"),
        (255, "exit 255, last line: std::bad_alloc"),  # of exit(-1), and of ssh: no signal has this number
    ],
)
def test_who_is_killed_has_not_said_why(code: int, shown: str) -> None:
    """The last line of a process that SIGKILL ended is any line; one that aborts has said why."""
    assert describe_crash(Crash(0.0, code, "std::bad_alloc", stepped=True)) == shown
