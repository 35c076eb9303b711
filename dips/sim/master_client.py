"""A simulated agent's connection to the master: sends each question and each heartbeat once."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from dips.client.agent.actions import AskMaster, Channel, SendHeartbeat
from dips.errors import DipsError, UnavailableMaster
from dips.protocol.effects import Failed
from dips.protocol.heartbeats import ClusterHeartbeatAnswer
from dips.sim.fiber import Fiber, Gate, Story, sleep
from dips.sim.heap import Heap
from dips.sim.network import Network

CALL_S = 2.0  # deadline of a question


class Asker(Protocol):
    """The receiver of replies and errors."""

    def on_reply(self, ask: AskMaster, answer: Any) -> None: ...
    def on_error(self, ask: AskMaster, error: DipsError) -> None: ...
    def on_heartbeat_reply(self, inc: int, answer: ClusterHeartbeatAnswer) -> None: ...
    def on_heartbeat_error(self, error: DipsError) -> None: ...


class SimMasterClient:
    """Sends one question at a time in each channel; a newer one replaces an older one."""

    def __init__(self, heap: Heap, network: Network, name: str, gate: Gate, asker: Asker) -> None:
        self._heap, self._network, self._name, self._gate, self._asker = heap, network, name, gate, asker
        self._asking: dict[Channel, Fiber] = {}

    def ask_master(self, ask: AskMaster) -> None:
        older = self._asking.get(ask.channel)
        if older is not None:
            older.kill()
        self._asking[ask.channel] = Fiber(self._carry_question(ask), self._gate)

    def send_heartbeat(self, action: SendHeartbeat) -> None:
        """Send a heartbeat; its answer is processed when the agent's machine runs."""
        inc = action.heartbeat.inc

        def on_answer(answer: Any) -> None:
            self._gate.pass_on(partial(self._take_heartbeat_answer, inc, answer))

        self._network.call_host(self._name, "master", action.heartbeat, action.deadline_s, on_answer)

    def kill_client(self) -> None:
        for fiber in self._asking.values():
            fiber.kill()

    def _carry_question(self, ask: AskMaster) -> Story:
        if ask.delay_s:
            yield sleep(self._heap, ask.delay_s, f"{self._name} asks")
        answer = yield partial(self._network.call_host, self._name, "master", ask.event, CALL_S)
        error = error_of(answer)
        if error is None:
            self._asker.on_reply(ask, answer)
        else:
            self._asker.on_error(ask, error)

    def _take_heartbeat_answer(self, inc: int, answer: Any) -> None:
        error = error_of(answer)
        if error is None:
            self._asker.on_heartbeat_reply(inc, answer)
        else:
            self._asker.on_heartbeat_error(error)


def error_of(answer: Any) -> DipsError | None:
    """Return the error that a call to the master would have raised; None if it would have returned."""
    if answer is None:
        return UnavailableMaster("the master does not answer")
    if isinstance(answer, Failed):
        return answer.error(answer.message)
    return None
