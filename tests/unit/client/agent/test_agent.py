"""The agent around its core: its calls travel, their answers wake who waits, and nothing is left at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dips.client.agent import agent as agents
from dips.client.agent import state
from dips.client.agent.agent import Agent
from dips.client.agent.state import RecordMark
from dips.client.ipc.messages import TrainOn
from dips.errors import UnavailableMaster
from dips.protocol.effects import Acknowledged, Refused
from dips.protocol.enums import ClusterStanding
from dips.protocol.events import ClusterLeft, PushAborted, PushRequested
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer
from tests.unit.client.agent.play import NONE_YET, Play
from tests.waiting import eventually

LIVES = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, NONE_YET)


class AnsweringMaster:
    """Answers as the test says, and keeps what came: a question without an answer hangs until it is cancelled."""

    def __init__(self, answers: dict[type, Any]) -> None:
        self.asked, self.cancelled, self.heartbeats = list[object](), list[object](), list[ClusterHeartbeat]()
        self.fails_first = 0  # heartbeats that are not answered
        self._answers = answers

    async def ask_master(self, event: object) -> Any:
        self.asked.append(event)
        answer = self._answers.get(type(event))
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.append(event)
        return answer

    async def send_heartbeat(self, heartbeat: ClusterHeartbeat, deadline_s: float) -> ClusterHeartbeatAnswer:
        self.heartbeats.append(heartbeat)
        if len(self.heartbeats) <= self.fails_first:
            raise UnavailableMaster("no answer")
        return LIVES


@asynccontextmanager
async def running(
    play: Play, answers: dict[type, Any], fails_first: int = 0, problem: str = ""
) -> AsyncIterator[tuple[Agent, AnsweringMaster]]:
    """An agent whose trainer others have started; it ends by SIGTERM, unless it has ended before."""
    master, timeline = (
        AnsweringMaster({ClusterLeft: Acknowledged(), **answers}),
        SimpleNamespace(record_mark=lambda kind, **fields: play.marks.append((kind, fields))),
    )
    master.fails_first = fails_first
    agent = Agent(60.0, play.core, master, timeline, structlog.get_logger(), find_problem=lambda: problem)  # type: ignore[arg-type]
    life = asyncio.create_task(agent.run([], {}))
    await asyncio.sleep(0)
    yield agent, master
    agent.terminate()
    async with asyncio.timeout(5):
        await life
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def play() -> Play:
    """It has joined and trains; its heartbeats follow each other at once."""
    play = Play(heartbeat_s=0.005, pace_steps=1)
    play.begin()
    play.step()
    return play


async def test_an_answer_that_orders_nothing_wakes_the_rank(play: Play) -> None:
    """All slots are in use: the trainer goes on at once, and not when its question has been held for long enough."""
    async with running(play, {PushRequested: Refused(2.0, "all 2 slots are in use")}) as (agent, _), asyncio.timeout(5):
        told = await agent.ranks._await_answer(play.look_for_push())
        assert isinstance(told, TrainOn) and told.reason == "all 2 slots are in use"


async def test_each_heartbeat_is_followed_by_the_next(play: Play) -> None:
    """Answered or not, with the time between two; the last message is the farewell."""
    async with running(play, {}, fails_first=2, problem="tls: expired") as (_, master):
        await eventually(lambda: len(master.heartbeats) >= 5)
    assert master.heartbeats[0].remarks[0].text == "certificate: tls: expired"
    assert [type(event) for event in master.asked] == [ClusterLeft]


async def test_a_question_that_another_replaces_reaches_no_master_later(play: Play) -> None:
    """Its trainer is gone, and the push that it asked for is aborted: the call that is under way is given up."""
    async with running(play, {PushAborted: Acknowledged()}) as (agent, master):
        _, actions = play.core.on_message(play.want_push(), play.now)
        agent.perform_actions(actions)
        await eventually(lambda: master.asked)
        agent.perform_actions(play.core.on_trainer_gone("killed", play.now))
        await eventually(lambda: len(master.asked) == 2)
        await eventually(lambda: master.cancelled)
        assert [type(event) for event in master.cancelled] == [PushRequested]


async def test_a_master_that_is_away_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause that the core names lies between two tries."""
    monkeypatch.setattr(state, "FIRST_PAUSE_S", 0.05)
    play = Play()
    play.begin()
    async with running(play, {PushRequested: UnavailableMaster("refused")}) as (agent, master):
        agent.perform_actions(play.core.on_message(play.want_push(), play.now)[1])
        await eventually(lambda: len(master.asked) == 2)
        began = asyncio.get_running_loop().time()
        await eventually(lambda: len(master.asked) == 3)
        assert asyncio.get_running_loop().time() - began >= 0.04


async def test_a_task_that_fails_ends_the_agent(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours, with its exit code: an agent that does half of its work would hold its trainer for ever."""
    monkeypatch.setattr(agents, "FAILURE_GRACE_S", 0.0)
    async with running(play, {PushRequested: ZeroDivisionError("of ours")}) as (agent, _):
        with capture_logs() as logs:
            agent.perform_actions(play.core.on_message(play.want_push(), play.now)[1])
            await eventually(agent._signals.stopped.is_set)
    assert logs[0]["event"] == "a task of the agent failed"
    assert play.core.state.stop is not None and play.core.state.stop.code == 70


async def test_what_is_no_routine_is_logged(play: Play) -> None:
    async with running(play, {}) as (agent, _):
        with capture_logs() as logs:
            agent.perform_actions([RecordMark("joined", {"inc": 1}), RecordMark("inner", {"inner_steps": 7})])
    assert logs == [{"event": "joined", "inc": 1, "log_level": "info"}] and play.marks[-1][0] == "inner"
