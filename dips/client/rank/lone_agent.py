"""A training script without an agent: it trains alone, in no run, and no call of it fails for that.

So the same script runs on a desk. DIPS_ALONE=1 asks for it; a rank that neither its script nor an agent has given a
cluster file is alone, too. Nothing is pulled, pushed or counted; data ranges, if the file has any, are walked in order,
and a checkpoint goes on where it stood.
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
LOOK_STEPS = 1 << 40  # inner steps until it asks again: nobody will have an answer
WARNING = (
    "OuterLoop trains alone: no agent started this script, so nothing is pulled or pushed. To take part in a run start "
    "it as `dips-client --config cluster.yaml -- …`; DIPS_ALONE=1 says that this is meant"
)


def is_alone(config: str | os.PathLike[str] | None) -> bool:
    """No run is to be joined."""
    named = config is not None or CLUSTER_FILE in os.environ or AGENT in os.environ
    return os.environ.get(ALONE) == "1" or not named


def lone_config(config: ClusterFile | None) -> ClusterFile:
    """The cluster file that the script named, or none; nothing is transferred."""
    if config is None:
        shared = Shared(run="alone")
        config = ClusterFile(shared=shared, cluster="alone", master="127.0.0.1:0", directory=Path("."), insecure=True)
    return config.model_copy(update={"install": "whole", "overlap": "none", "fragments": 1})


class LoneAgent(AgentClient):
    """Answers what an agent would, if there were no run; has no connection."""

    def __init__(self, ranges: int) -> None:
        self._ranges, self._given = ranges, list[int]()  # those that are given and not used up, in order
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
        """Answer on every rank alike."""
        return self._answers[type(question)](question)

    def ask_until_answered(self, question: Question) -> Answer:
        """No answer is pending."""
        return self.ask_agent(question)

    def notify_agent(self, notice: Notice) -> None:
        """Nobody is there to be told."""

    def report_step(self, step: Stepped, ended_s: float) -> None:
        """Nobody counts; only how far the data is trained."""
        if step.left is not None:
            self._use_up(step.left)
            self._begun = {step.begun.number: step.begun} if step.begun else {}

    def report_progress(self, attempt: int, moved: int, total: int, idle_s: float) -> str:
        """Nothing moves."""
        return ""

    def disconnect(self) -> None:
        """There is no connection."""

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
        """What is ahead are the last ranges, from the first that is not used up."""
        ahead = self._given[0] if self._given else self._next
        begun = tuple(self._begun.values())
        return Saved("alone", str(GENESIS), 0, False, 0, 0, (), 0.0, 0, (ahead,), 0, begun)

    def _resume_progress(self, message: Resume) -> Answer:
        (self._next,) = message.saved.ahead
        self._given, self._begun = [], {part.number: part for part in message.saved.begun}
        return Resumed("it trains alone", LOOK_STEPS)
