"""A simulated agent's line to the master: a question is carried there again and again until it is answered."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from dips.client.agent.actions import AskMaster
from dips.errors import Busy, DipsError, Unavailable, UnavailableMaster
from dips.protocol.effects import Failed
from dips.sim.fiber import Fiber, Gate, Story, sleep
from dips.sim.heap import Heap
from dips.sim.network import Network

CALL_S = 2.0  # deadline of one question
PAUSE_S = 0.3  # until a master that did not answer is asked again


class Asker(Protocol):
    """Who asks, and is told what came of it."""

    def on_answer(self, ask: AskMaster, answer: Any) -> None: ...
    def on_failure(self, ask: AskMaster, error: DipsError) -> None: ...
    def on_hindrance(self, reason: str) -> None: ...


class SimMasterClient:
    """One question in each channel at a time; a newer one takes the place of an older one."""

    def __init__(self, heap: Heap, network: Network, name: str, gate: Gate, asker: Asker) -> None:
        self._heap, self._network, self._name, self._gate, self._asker = heap, network, name, gate, asker
        self._asking: dict[str, Fiber] = {}

    def ask(self, ask: AskMaster) -> None:
        older = self._asking.get(ask.channel)
        if older is not None:
            older.kill()
        self._asking[ask.channel] = Fiber(self._carry(ask), self._gate)

    def kill(self) -> None:
        for fiber in self._asking.values():
            fiber.kill()

    def _carry(self, ask: AskMaster) -> Story:
        yield sleep(self._heap, ask.delay_s, f"{self._name} asks")
        while True:
            answer = yield partial(self._network.call, self._name, "master", ask.event, CALL_S)
            error = _error(answer)
            if error is None:
                self._asker.on_answer(ask, answer)
                return
            if not isinstance(error, Unavailable | Busy):
                self._asker.on_failure(ask, error)
                return
            self._asker.on_hindrance(str(error))
            yield sleep(self._heap, PAUSE_S, f"{self._name} asks again")


def _error(answer: Any) -> DipsError | None:
    if answer is None:
        return UnavailableMaster("the master does not answer")
    if isinstance(answer, Failed):
        return answer.error(answer.message)
    return None
