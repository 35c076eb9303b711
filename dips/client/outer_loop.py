"""The library inside every training rank: three lines in a training script.

    outer = OuterLoop(model)                    # joins, pulls θ into this rank's shard
    for batch in loader(outer.ranges()):        # the data ranges leased to this cluster; or your own loader
        ...
        outer.step(tokens=n, loss=loss)         # after each inner step; every H-th: push, window, pull
    outer.close()

Only rank 0 talks, to the agent that started this job; every verdict reaches all ranks by a broadcast, every rank moves
its own bytes, and a pulled version is installed on all ranks or on none. So at every inner step all ranks hold the same
version, whatever happens outside. The constructor, `step`, `ranges` and `close` are collective: all ranks call them, in
the same order, outside forward and backward.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from torch import nn

from dips import errors
from dips.client import local
from dips.client.line import Line, socket_path
from dips.client.local import (
    Answer,
    Attach,
    Bye,
    Failure,
    Heard,
    Moving,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    Question,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Stepped,
    TrainOn,
    Wait,
    Welcome,
)
from dips.client.mover import Mover
from dips.client.parallel import shards
from dips.client.transfer import Base
from dips.client.voice import Voice
from dips.config import ClusterFile, Shared, load_cluster
from dips.errors import ConfigError, DipsError, LocalProtocolError
from dips.ids import VersionId

Talk = PushWanted | PushMoved | PullWanted | PullMoved


class OuterLoop:
    """Takes part in the run for one rank of the training job."""

    def __init__(self, model: nn.Module, config: str | os.PathLike[str] | None = None) -> None:
        """Join the run and pull its newest version into `model`; returns when every rank holds it.

        model   plain, DDP or FSDP2 (`fully_shard`), with fp32 parameters; only parameters are shared, no buffers
        config  the cluster file; None: the one that the agent was started with
        Errors  ConfigError: no agent, a wrong file or a wrong dtype. CorruptManifest: the model is not the run's; the
                first differences are listed.
        """
        path = config or os.environ.get("DIPS_CLUSTER_FILE")
        if path is None:
            raise ConfigError("no cluster file: start this script as `dips-client --config cluster.yaml -- …`")
        self._config = load_cluster(Path(path))
        self._voice = Voice()
        self._pid = os.getpid()
        self._line: Line | None = None
        layout = shards(model, self._voice.rank)
        self._mover = Mover(layout, self._voice, self._config.poll_s, self._config.stall_s, self._config.shared.codec)
        self._attempt = self._number = self._ranges_asked = self._since_push = 0
        self._finished = self._closed = False
        self._progress = 0.0
        self._version: VersionId | None = None
        self.inner_steps = 0  # taken since this object was made
        self._attach(layout.manifest.to_json())
        self._obey(PullWanted(self._attempt, self._next()))

    # ---- what a training script sees -------------------------------------------------------------------------------

    @property
    def version(self) -> VersionId:
        """The version that was installed last: the base of the next push."""
        assert self._version is not None  # the constructor does not return without one
        return self._version

    @property
    def progress(self) -> float:
        """Accepted tokens over the run's target, 0 to 1, the same on all ranks: drive the learning-rate schedule by it.

        It moves when the cluster takes part in an outer step. 0 if the run has no token target.
        """
        return self._progress

    @property
    def shared(self) -> Shared:
        """What all clusters of the run agree on: the section `shared` of the cluster file."""
        return self._config.shared

    @property
    def finished(self) -> bool:
        """The run is over: leave the training loop. `step` does nothing from now on, `ranges` ends."""
        return self._finished

    def step(self, *, tokens: int, loss: Any = None) -> None:
        """Say that one inner step is done; every H-th takes part in an outer step before it returns.

        tokens  consumed in this step by the whole cluster, on all its ranks together; rank 0's number counts
        loss    of this step, a float or a tensor of one element, or None; rank 0's is shown
        Errors  Unavailable: the agent is gone. StaleIncarnation: another attempt of this trainer took over.
        """
        self._check()
        if self._finished:
            return
        if tokens < 0:
            raise LocalProtocolError(f"tokens: expected 0 or more, got {tokens}")
        self.inner_steps += 1
        self._since_push += 1
        if self._line:
            self._line.tell(Stepped(self._attempt, int(tokens), _finite(loss)))
        if self._since_push >= self._config.pace.steps:
            self._obey(PushWanted(self._attempt, self._next()))

    def ranges(self) -> Iterator[int]:
        """Yield the data ranges leased to this cluster, the same on all ranks, until none is left or the run is over.

        A range counts as trained when the next one is asked for. Split its samples over your data-parallel ranks.
        Raise ConfigError if the run has no data ranges (`shared.data.ranges`).
        """
        total = self._config.shared.data.ranges
        if total == 0:
            raise ConfigError(
                "shared.data.ranges is 0: this run leaves the data to its clusters; bring your own loader"
            )
        while not self._finished and not self._closed:
            self._check()
            self._ranges_asked += 1
            answer = self._persist(RangeWanted(self._attempt, self._ranges_asked))
            if isinstance(answer, RangeGiven):
                yield answer.range
                continue
            if isinstance(answer, RangesEnded) and answer.finished:
                self._obey(PushWanted(self._attempt, self._next()))  # nothing is pushed: the final version is pulled
            return

    def close(self) -> None:
        """Say that the training is done; what was trained since the last push does not count. Twice is fine."""
        if self._closed:
            return
        self._check()
        self._hear(Bye(self._attempt))
        self._end()

    def __enter__(self) -> OuterLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._line:  # no goodbye: the agent sees the line end, and ends what is open
            self._line.close()

    # ---- the talk ----------------------------------------------------------------------------------------------------

    def _attach(self, manifest: str) -> None:
        life, restart = (int(os.environ.get(key, "0")) for key in ("DIPS_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
        question = Attach(life, restart, os.getpid(), manifest, self._mover.push_ranks, self._mover.pull_ranks)
        welcome = self._persist(question)
        if not isinstance(welcome, Welcome):
            raise LocalProtocolError(f"expected Welcome from the agent, got {welcome!r}")
        self._attempt, self._progress = welcome.attempt, welcome.progress

    def _obey(self, talk: Talk) -> None:
        """Do what the agent says, on all ranks, until it says to train on."""
        while True:
            verdict = self._persist(talk)
            match verdict:
                case PushNow():
                    talk = self._push(verdict)
                case PullNow():
                    talk = self._pull(verdict)
                case TrainOn():
                    self._progress = verdict.progress
                    self._since_push = self._since_push if verdict.again else 0
                    return
                case Over():
                    self._progress, self._finished = verdict.progress, True
                    return
                case _:
                    raise LocalProtocolError(f"expected a verdict from the agent, got {verdict!r}")

    def _push(self, verdict: PushNow) -> PushMoved:
        base = self._base(verdict, self._mover.push_rank)
        moved = self._mover.push(verdict.grant, base, self._share, verdict.accepted)
        return PushMoved(self._attempt, self._next(), verdict.seq, moved.ok, moved.reason, moved.nbytes)

    def _pull(self, verdict: PullNow) -> PullMoved:
        base = self._base(verdict, self._mover.pull_rank)
        moved = self._mover.pull(verdict.grant, base, self._share, verdict.accepted)
        if moved.ok:  # on all ranks
            self._mover.install(verdict.grant.version)
            self._version, self._progress = verdict.grant.version, verdict.progress
        return PullMoved(self._attempt, self._next(), verdict.seq, moved.ok, moved.reason, moved.nbytes)

    def _base(self, verdict: PushNow | PullNow, rank: int) -> Base:
        return Base(self._config.shared.run, self._config.cluster, verdict.inc, verdict.seq, rank)

    def _share(self, moved: int, total: int) -> str:
        """Tell the agent how far the transfer is; return why it is to be ended, "" to go on. Only rank 0 has a line."""
        if not self._line:
            return ""
        try:
            answer = self._line.ask(Moving(self._attempt, moved, total))
        except DipsError as error:  # the other ranks are waiting in a collective: they must hear of it there
            return str(error)
        return "" if isinstance(answer, Heard) else getattr(answer, "reason", str(answer))

    def _persist(self, question: Question) -> Answer:
        """Ask until there is an answer; each Wait reaches all ranks, so no collective lasts longer than a poll."""
        while isinstance(answer := self._hear(question), Wait):
            pass
        return answer

    def _hear(self, question: Question) -> Answer:
        """Rank 0 asks the agent; all ranks hear the answer, and raise the same error if it is one."""
        words = local.encode(self._speak(question)) if self._voice.rank == 0 else None
        answer = cast(Answer, local.decode(self._voice.share(words)[local.LENGTH.size :]))
        if isinstance(answer, Failure):
            raised = getattr(errors, answer.error, DipsError)
            raise raised(answer.message)
        return answer

    def _speak(self, question: Question) -> Answer:
        try:
            if self._line is None:
                self._line = Line(_agent_socket(self._config), self._config.poll_s)
            return self._line.ask(question)
        except DipsError as error:
            return Failure(type(error).__name__, str(error))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _check(self) -> None:
        if self._closed:
            raise LocalProtocolError("this OuterLoop is closed")
        if os.getpid() != self._pid:
            raise LocalProtocolError("an OuterLoop belongs to the process that made it, not to one forked from it")

    def _end(self) -> None:
        self._closed = True
        if self._line:
            self._line.close()
        self._voice.close()


def _agent_socket(config: ClusterFile) -> Path:
    named = os.environ.get("DIPS_AGENT_SOCKET")
    return Path(named) if named else socket_path(config)


def _finite(loss: Any) -> float | None:
    """A loss that can be averaged and shown; one that is not finite is the gate's business, not the ledger's."""
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None
