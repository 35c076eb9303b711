"""A stand-in for the agent: a training script without an agent trains alone, in no run, and every call works.

So the same script runs on a workstation. DIPS_ALONE=1 asks for it; a rank without a cluster file from its script or
from an agent is alone, too. Nothing is pulled, pushed or counted; data ranges, if the file has any, are given in order,
and a checkpoint continues where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dips.client.ipc.address import AGENT
from dips.client.ipc.messages import (
    Answer,
    Attach,
    Attached,
    Detach,
    Noted,
    Notice,
    PullMoved,
    PullWanted,
    PushMoved,
    PushWanted,
    Question,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Resume,
    Resumed,
    Saved,
    SaveWanted,
    Stepped,
    TrainOn,
    TransferProgress,
)
from dips.client.rank.agent_client import AgentClient
from dips.config import ClusterFile, Shared
from dips.ids import GENESIS
from dips.protocol.data import BegunRange

ALONE = "DIPS_ALONE"
CLUSTER_FILE = "DIPS_CLUSTER_FILE"
LOOK_STEPS = 1 << 40  # inner steps until the ranks ask again: in effect never
WARNING = (
    "OuterLoop trains alone: no agent started this script, so nothing is pulled or pushed. To take part in a run start "
    "it as `dips-client --config cluster.yaml -- …`; DIPS_ALONE=1 says that this is meant"
)


def is_alone(config: str | os.PathLike[str] | None) -> bool:
    """Return whether this script takes part in no run."""
    named = config is not None or CLUSTER_FILE in os.environ or AGENT in os.environ
    return os.environ.get(ALONE) == "1" or not named


def lone_config(config: ClusterFile | None) -> ClusterFile:
    """Return the script's cluster file, or a default one, without transfers."""
    if config is None:
        shared = Shared(run="alone")
        config = ClusterFile(shared=shared, cluster="alone", master="127.0.0.1:0", directory=Path("."), tls=False)
    return config.model_copy(update={"install": "whole", "overlap": "none", "fragments": 1})


class LoneAgent(AgentClient):
    """Answers in place of an agent without a run; has no connection."""

    def __init__(self, ranges: int) -> None:
        self._ranges, self._given = ranges, list[int]()  # ranges given and not used up, in order
        self._next, self._begun = 0, dict[int, BegunRange]()
        self._answers: dict[type, Callable[[Any], Answer]] = {
            Attach: lambda _: Attached(1, 0.0),
            RangeWanted: self._give_range,
            SaveWanted: lambda _: self._save_progress(),
            Resume: self._resume_progress,
            Detach: lambda _: Noted(),
            TransferProgress: lambda _: Noted(),
        }
        self._answers |= dict.fromkeys(
            (PushWanted, PushMoved, PullWanted, PullMoved), lambda _: TrainOn("it trains alone", LOOK_STEPS, 0.0)
        )

    def ask_agent(self, question: Question) -> Answer:
        """Return the answer, the same on every rank."""
        return self._answers[type(question)](question)

    def ask_until_answered(self, question: Question) -> Answer:
        """Return the answer; it is never AskAgain."""
        return self.ask_agent(question)

    def notify_agent(self, notice: Notice) -> None:
        """Do nothing, since there is no agent."""

    def report_step(self, step: Stepped, ended_s: float) -> None:
        """Record the position in the data; steps are not counted."""
        if step.left is not None:
            self._use_up(step.left)
            self._begun = {step.begun.number: step.begun} if step.begun else {}

    def report_progress(self, attempt: int, moved: int, total: int, idle_s: float) -> str:
        """Return "": nothing moves."""
        return ""

    def disconnect(self) -> None:
        """Do nothing, since there is no connection."""

    def _give_range(self, wanted: RangeWanted) -> Answer:
        self._use_up(wanted.left or ())
        if self._next >= self._ranges:
            return RangesEnded("all ranges were walked", finished=False)
        self._given.append(self._next)
        self._next += 1
        return RangeGiven(self._given[-1], self._begun.get(self._given[-1]))

    def _use_up(self, left: Sequence[int]) -> None:
        self._given = [number for number in self._given if number in left]

    def _save_progress(self) -> Saved:
        """Return the position: all ranges from the first that is not used up are ahead."""
        ahead = self._given[0] if self._given else self._next
        begun = tuple(self._begun.values())
        return Saved("alone", str(GENESIS), 0, False, 0, 0, (), 0.0, 0, (ahead,), 0, begun)

    def _resume_progress(self, message: Resume) -> Answer:
        (self._next,) = message.saved.ahead
        self._given, self._begun = [], {part.number: part for part in message.saved.begun}
        return Resumed("it trains alone", LOOK_STEPS)
