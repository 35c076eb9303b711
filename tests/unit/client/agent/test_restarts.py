"""Whether the training command is launched again."""

from __future__ import annotations

from dips.client.agent.restarts import RESTART_PAUSE_S, EndAgent, LaunchCommand
from dips.ids import GENESIS
from dips.protocol.effects import Finished
from dips.protocol.enums import ClusterStanding
from tests.unit.client.agent.play import Play


def test_a_command_that_crashes_is_launched_again_so_often() -> None:
    """After a pause, with the next number, `max_restarts` times; then the agent ends with its exit code."""
    core = Play(max_restarts=2).core
    first = core.plan_first_launch()
    assert first == LaunchCommand(1, 0.0, 2)
    second = core.plan_next_launch(first, code=1)
    assert second == LaunchCommand(2, RESTART_PAUSE_S, 1)
    assert isinstance(second, LaunchCommand)
    third = core.plan_next_launch(second, code=1)
    assert isinstance(third, LaunchCommand) and third.launch == 3
    end = core.plan_next_launch(third, code=137)
    assert isinstance(end, EndAgent) and end.code == 137 and "3 times" in end.reason


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
