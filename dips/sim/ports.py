"""The interfaces that a simulated trainer needs of the world and of its agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dips.client.ipc.messages import Answer, Question, Stepped
from dips.ids import PullId, PushId
from dips.protocol.manifest import Manifest
from dips.protocol.options import Options
from dips.sim.heap import Chance, Gate, Heap, Timer, Trace, Wait
from dips.sim.scenario import Scenario
from dips.sim.streams import DataNetwork
from dips.sim.work import Books, SimModel, Work


class TrainerWorld(Protocol):
    """The parts of the world that a trainer needs."""

    heap: Heap
    chance: Chance
    trace: Trace
    books: Books
    data: DataNetwork
    scenario: Scenario
    model: SimModel
    options: Options
    manifest: Manifest
    sizes: dict[int, int]

    def call_later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...


class TrainerAgent(Protocol):
    """The parts of its agent that a trainer needs: answers, and hooks that record its work."""

    @property
    def gate(self) -> Gate: ...

    @property
    def progress(self) -> float: ...

    def handle_message(self, message: Question | Stepped) -> Answer | None: ...
    def next_change(self, at_most_s: float) -> Wait: ...
    def on_trainer_end(self) -> None: ...
    def on_trainer_failed(self, trainer: Any) -> None: ...
    def record_step(self) -> None: ...
    def record_work(self, work: Work) -> None: ...
    def record_push(self, push: PushId) -> None: ...
    def record_push_end(self, push: PushId, moved: bool) -> None: ...
    def record_pull(self, pull: PullId) -> None: ...
    def record_install(self) -> None: ...
    def record_merge(self, kept: bool) -> None: ...
    def record_pull_end(self, installed: bool, attempt: int) -> None: ...
