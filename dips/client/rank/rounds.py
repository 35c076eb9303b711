"""A rank's part in outer steps: what the agent orders is begun, moved and put into the model, on all ranks alike.

Either the training stands still from the question to the verdict (`_obey`), or it goes on and the ranks look at what is
out now and then (`_look`, under `overlap: full`; why.md 36). Collective throughout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    LossReported,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    TrainOn,
)
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.background_transfer import BackgroundTransfer, TransferResult
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.losses import LossChannel
from dips.client.rank.shard_transfer import ShardTransfer
from dips.client.rank.transfer import TransferIdentity
from dips.config import ClusterFile
from dips.errors import LocalProtocolError
from dips.ids import VersionId

Talk = PushWanted | PushMoved | PullWanted | PullMoved


class Rounds:
    """What an OuterLoop does beside what its training script sees of it."""

    def __init__(self, config: ClusterFile, voice: JobCollectives, mouth: AgentClient, mover: ShardTransfer) -> None:
        self._config, self._voice, self._mouth, self._mover = config, voice, mouth, mover
        self._attempt = self._number = self._look_in = 0
        self._soon = 1  # inner steps until the next look at what is out
        self._overlaps = config.overlap == "full"
        # Under `overlap: full`: what moves and the verdict that began it; what the agent is still to answer.
        self._out: tuple[Answer, BackgroundTransfer] | None = None
        self._talk: Talk | None = None
        self._finished = self._torn = False
        self._progress = 0.0
        self._version: VersionId | None = None
        self._losses: LossChannel | None = None  # of a pipeline

    @property
    def moving(self) -> bool:
        """Under `overlap: full`: a push or pull of this cluster is out, and training goes on beside it."""
        return self._out is not None or self._talk is not None

    def _obey(self, talk: Talk) -> None:
        """Do what the agent says, on all ranks, standing still until it says to train on."""
        while True:
            verdict = self._mouth.persist(talk)
            underway = self._begin(verdict)
            if underway is None:
                return
            talk = self._land(verdict, underway.finish(self._config.poll_s))

    def _look_at(self, demanded: bool) -> None:
        if not self.moving:
            self._voice.meet("OuterLoop.step")
        if self._losses is not None:
            heard = self._losses.heard()
            if heard is not None:
                self._mouth.tell(LossReported(self._attempt, *heard))
        question = PushWanted(self._attempt, 0 if self._out or self._talk else self._next(), demanded)
        if self._overlaps:
            self._look(question)
        else:
            self._obey(question)

    def _look(self, question: PushWanted) -> None:
        """Go on with what is out, or ask the agent what is due; in neither case stand still for it."""
        if self._out is not None:
            verdict, underway = self._out
            moved = underway.look()
            if moved is None:
                self._look_in = self._soon
                return
            self._out, self._talk = None, self._land(verdict, moved)
        self._talk = self._talk or question
        answer = self._mouth.hear(replace(self._talk, at_once=True))
        if isinstance(answer, AskAgain):
            self._look_in = self._soon = answer.steps
            return
        self._talk, begun = None, self._begin(answer)
        if begun is not None and isinstance(answer, PullNow) and not answer.merge:  # no step before it is worth taking
            self._obey(self._land(answer, begun.finish(self._config.poll_s)))
        elif begun is not None:
            self._out, self._look_in = (answer, begun), self._soon

    def _settle(self) -> None:
        """Stand still until nothing is out."""
        if self._out is not None:
            verdict, underway = self._out
            self._out, self._talk = None, self._land(verdict, underway.finish(self._config.poll_s))
        if self._talk is not None:
            talk, self._talk = self._talk, None
            self._obey(talk)

    def _begin(self, verdict: Answer) -> BackgroundTransfer | None:
        """Begin the transfer that the agent ordered, or note that there is none to begin."""
        match verdict:
            case PushNow():
                base, share = self._base(verdict), partial(self._mouth.share, self._attempt)
                return self._mover.push(verdict.grant, base, share, verdict.accepted, keep=self._overlaps)
            case PullNow():
                base, share = self._base(verdict), partial(self._mouth.share, self._attempt)
                return self._mover.pull(verdict.grant, base, share, verdict.accepted)
            case TrainOn():
                self._progress, self._look_in = verdict.progress, verdict.steps
            case Over():
                self._mover.finish()  # no forward of this training comes any more
                self._progress, self._finished = verdict.progress, True
            case _:
                raise LocalProtocolError(f"expected a verdict from the agent, got {verdict!r}")
        return None

    def _land(self, verdict: Answer, moved: TransferResult) -> Talk:
        """The transfer is over on all ranks: put what was pulled into the model, and say so."""
        if isinstance(verdict, PushNow):
            return PushMoved(self._attempt, self._next(), verdict.seq, moved.ok, moved.reason, moved.nbytes)
        assert isinstance(verdict, PullNow)
        self._torn = moved.torn or (self._torn and not moved.ok)
        merged = False
        if moved.ok:  # on all ranks
            if verdict.merge:
                merged = self._mover.merge(verdict.grant.version)
            else:
                self._mover.install(verdict.grant.version)
            self._version, self._progress = verdict.grant.version, verdict.progress
        number, torn = self._next(), self._torn
        return PullMoved(self._attempt, number, verdict.seq, moved.ok, moved.reason, moved.nbytes, torn, merged=merged)

    def _base(self, verdict: PushNow | PullNow) -> TransferIdentity:
        return TransferIdentity(
            self._config.shared.run, self._config.cluster, verdict.inc, verdict.seq, self._mover.rank
        )

    def _next(self) -> int:
        self._number += 1
        return self._number
