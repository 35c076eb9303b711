"""The library inside every training rank: three lines in a training script.

    outer = OuterLoop(model)                    # joins, pulls θ into this rank's shard
    for batch in loader(outer.ranges()):        # the data ranges leased to this cluster; or your own loader
        ...
        outer.step(tokens=n, loss=loss)         # after each inner step; when its pace says so: push, window, pull
    outer.close()

Only rank 0 talks, to the agent that started this job; every verdict reaches all ranks by a broadcast, every rank moves
its own bytes, and a pulled version is installed on all ranks or on none. So at every inner step all ranks hold the same
version, whatever happens outside. The constructor, `step`, `ranges` and `close` are collective: all ranks call them, in
the same order, outside forward and backward.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from dips.client.ipc import address
from dips.client.ipc.messages import (
    Answer,
    Attach,
    Attached,
    Detach,
    Healed,
    PullWanted,
    PushWanted,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Resume,
    Resumed,
    Saved,
    SaveWanted,
    Stepped,
)
from dips.client.ipc.process import process_name
from dips.client.parallel import HostMemory, LazyMemory, StreamedMemory, lay_out
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.losses import LossChannel, finite
from dips.client.rank.orphan import watch_agent
from dips.client.rank.rounds import Rounds
from dips.client.rank.shard_transfer import ShardTransfer
from dips.config import Shared, load_cluster
from dips.errors import ConfigError, LocalProtocolError
from dips.ids import VersionId

MEMORY = {"whole": HostMemory, "streaming": StreamedMemory, "forward": LazyMemory}  # by `install`
STATE_FORMAT = 1  # of state_dict; another number is refused, never guessed at


class OuterLoop(Rounds):
    """Takes part in the run for one rank of the training job."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        config: str | os.PathLike[str] | None = None,
        *,
        optimizer: Any = None,
    ) -> None:
        """Join the run and pull its newest version into `model`; returns when every rank holds it.

        model      plain, DDP, FSDP2 or HSDP (`fully_shard`), tensor parallel by DTensor, or Megatron-core; a list of
                   pipeline stages or model chunks counts as one model. Parameters with requires_grad are shared,
                   frozen ones and buffers are not. Wrapped and sharded already: its memory must not be replaced later
        config     the cluster file; None: the one that the agent was started with
        optimizer  Megatron's: its fp32 masters are what is pushed, and are told of a pull. Nothing else needs it:
                   torch's own optimizers work on the parameters themselves
        Errors     the same on every rank. ConfigError: no agent, a wrong file, a model of a kind or dtype that is not
                   supported, ranks that hold different models. CorruptManifest: the model is not the run's; the first
                   differences are listed.
        """
        path = config or os.environ.get("DIPS_CLUSTER_FILE")
        if path is None:
            raise ConfigError("no cluster file: start this script as `dips-client --config cluster.yaml -- …`")
        config_file = load_cluster(Path(path))
        agent = address.find(config_file)
        self._unwatch = watch_agent(agent, config_file.poll_s)
        voice = JobCollectives(config_file.collective_s)
        layout = lay_out(model, voice, optimizer, config_file.speakers)
        memory = MEMORY[config_file.install](layout.adapter, layout.held, layout.plan, voice)
        mover = ShardTransfer(memory, voice, config_file.stall_s, config_file.shared.codec)
        super().__init__(config_file, voice, AgentClient(voice, agent, config_file.poll_s), mover)
        self._losses = LossChannel(voice) if layout.adapter.staged else None
        self._pid, self._closed, self._ranges_asked = os.getpid(), False, 0
        self.inner_steps = 0  # taken since this object was made
        self._attach(layout.plan.manifest.to_json())
        self._obey(PullWanted(self._attempt, self._next()))
        self._mover.finish()
        self._warms_up = self.version.version > 0  # its optimizer has seen nothing, until a checkpoint is loaded

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
    def lr_scale(self) -> float:
        """A factor for the inner learning rate: below 1 while a cluster that joined a run under way warms up."""
        if not self._warms_up:
            return 1.0
        return min(1.0, (self.inner_steps + 1) / max(1, self._config.rejoin_warmup_steps))

    @property
    def shared(self) -> Shared:
        """What all clusters of the run agree on: the section `shared` of the cluster file."""
        return self._config.shared

    @property
    def finished(self) -> bool:
        """The run is over: leave the training loop. `step` does nothing from now on, `ranges` ends."""
        return self._finished

    def step(self, *, tokens: int, loss: Any = None) -> None:
        """Say that one inner step is done; when a push is due it takes part in an outer step before it returns.

        With `install: forward` the new version may still have to be put into the model then; see `install`.

        tokens  consumed in this step by the whole cluster, on all its ranks together; rank 0's number counts
        loss    of this step, a float or a tensor of one element, or None; rank 0's is shown. Of a pipeline, whose
                rank 0 has none, that of the first rank that says one
        Errors  Unavailable: the agent is gone. StaleIncarnation: another attempt of this trainer took over.
                LocalProtocolError: with `install: forward`, this step was taken on parameters of the former version
        """
        self._check()
        if self._finished:
            return
        if tokens < 0:
            raise LocalProtocolError(f"tokens: expected 0 or more, got {tokens}")
        self._mover.stepped()
        self.inner_steps += 1
        self._look_in -= 1
        shown = finite(loss) if self._voice.rank == 0 or self._losses else None  # to look at it may wait for a device
        if self._losses:
            self._losses.add(shown, loss is None or shown is not None)
        if self._voice.rank == 0:
            self._mouth.tell(Stepped(self._attempt, int(tokens), shown, loss is None or shown is not None))
        if self._look_in <= 0:
            self._look_at(demanded=False)

    def push(self) -> None:
        """Take part in an outer step now, whatever the pace; as many inner steps count as were taken since the last."""
        self._check()
        if not self._finished:
            self._settle()
            self._look_at(demanded=True)

    def install(self) -> None:
        """Have the present version in the model, all of it; nothing to do but with `install: forward`.

        Call it before parameters are read or written otherwise than by a forward of their module, a step of a torch
        optimizer, state_dict or load_state_dict, which see to it themselves: a moving average, a norm, a copy of the
        model. Not collective.
        """
        self._check()
        self._mover.finish()

    def ranges(self) -> Iterator[int]:
        """Yield the data ranges leased to this cluster, the same on all ranks, until none is left or the run is over.

        A range counts as trained when the next one is asked for. At the end of the data what was trained since the last
        push is pushed before this returns, and settled. Split a range's samples over your data-parallel ranks.
        Raise ConfigError if the run has no data ranges (`shared.data.ranges`).
        """
        total = self._config.shared.data.ranges
        if total == 0:
            raise ConfigError(
                "shared.data.ranges is 0: this run leaves the data to its clusters; bring your own loader"
            )
        while not self._finished and not self._closed:
            self._check()
            self._voice.meet("OuterLoop.ranges")
            self._ranges_asked += 1
            answer = self._next_range()
            if not isinstance(answer, RangeGiven):
                return
            yield answer.range

    def state_dict(self) -> dict[str, Any]:
        """What a cluster's checkpoint needs of the outer loop, for `torch.save` or `torch.distributed.checkpoint`.

        Save it with the model and the optimizer, between two steps. Collective; the same on all ranks but for the
        tensors of lossy runs, whose names bear the rank. While a push is out (`overlap: full`) it says so: a resume
        then loses the merge.
        """
        self._check()
        self._voice.meet("OuterLoop.state_dict")
        self._mover.finish()
        saved = self._mouth.hear(SaveWanted(self._attempt))
        if not isinstance(saved, Saved):
            raise LocalProtocolError(f"expected Saved from the agent, got {saved!r}")
        own = {f"{name}.rank{self._voice.rank}": tensor for name, tensor in self._mover.saved().items()}
        return {"format": STATE_FORMAT, "inner_steps": self.inner_steps, **asdict(saved), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Go on from a checkpoint whose model and optimizer were loaded just now; return what came of it.

        Exact if no push of this cluster was settled since it was saved: same base, same tokens, same data ranges, the
        first of which may be half trained. A checkpoint that the run has overtaken is healed: the head is pulled into
        the model, and the returned text says why. Call it before the first inner step. Collective.
        Errors  LocalProtocolError: inner steps were taken already; a checkpoint of another format or layout of ranks.
        """
        self._check()
        if state.get("format") != STATE_FORMAT:
            raise LocalProtocolError(f"expected an outer state of format {STATE_FORMAT}, got {state.get('format')!r}")
        saved = Saved(**{f.name: _plain(state[f.name]) for f in fields(Saved)})
        self._voice.meet("OuterLoop.load_state_dict")
        answer = self._mouth.persist(Resume(self._attempt, saved))
        if isinstance(answer, Healed):
            self._obey(PullWanted(self._attempt, self._next()))
            self._mover.finish()
            self._warms_up = False
            return f"the checkpoint is overtaken: {answer.reason}; pulled {self.version}"
        if not isinstance(answer, Resumed):
            raise LocalProtocolError(f"expected Resumed or Healed from the agent, got {answer!r}")
        suffix = f".rank{self._voice.rank}"
        own = {name.removesuffix(suffix): tensor for name, tensor in state.items() if name.endswith(suffix)}
        self._version, self._warms_up = VersionId.parse(saved.base), False
        self._mover.resume(self._version, own)
        self.inner_steps, self._look_in = int(state["inner_steps"]), answer.steps
        return answer.reason

    def close(self) -> None:
        """Say that the training is done; what was trained since the last push does not count. Twice is fine."""
        if self._closed:
            return
        self._check()
        self._unwatch()  # the agent may end as soon as it gets Detach, and other ranks have things left to do
        self._voice.meet("OuterLoop.close")
        self._mover.finish()
        if self._out is not None:
            self._out[1].cancel()
        self._mouth.hear(Detach(self._attempt))
        self._end()

    def __enter__(self) -> OuterLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._mouth.hang_up()

    # ---- data ranges -------------------------------------------------------------------------------------------------

    def _next_range(self) -> Answer:
        """Ask for a data range; when none is left, push until nothing that was trained is unsettled."""
        while True:
            answer = self._mouth.persist(RangeWanted(self._attempt, self._ranges_asked))
            if not isinstance(answer, RangesEnded):
                return answer
            moved = self.moving
            self._settle()
            if moved and not self._finished:
                continue  # its outcome may have settled all, or given some back
            if not self._finished and (answer.finished or answer.unsettled):
                # of a run that is finished nothing is pushed: the final version is pulled
                self._obey(PushWanted(self._attempt, self._next(), demanded=answer.unsettled))
            if self._finished or not answer.unsettled:
                return answer

    # ---- the talk ----------------------------------------------------------------------------------------------------

    def _attach(self, manifest: str) -> None:
        life, restart = (int(os.environ.get(key, "0")) for key in ("DIPS_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
        question = Attach(life, restart, process_name(), manifest, self._mover.ranks, self._mover.ranks)
        welcome = self._mouth.persist(question)
        if not isinstance(welcome, Attached):
            raise LocalProtocolError(f"expected Welcome from the agent, got {welcome!r}")
        self._attempt, self._progress = welcome.attempt, welcome.progress

    def _check(self) -> None:
        if self._closed:
            raise LocalProtocolError("this OuterLoop is closed")
        if self._torn or self._mover.torn:
            raise LocalProtocolError("the model is torn: an install was broken off; only a new start can mend it")
        if os.getpid() != self._pid:
            raise LocalProtocolError("an OuterLoop belongs to the process that made it, not to one forked from it")

    def _end(self) -> None:
        self._closed = True
        self._mouth.hang_up()
        self._voice.close()


def _plain(value: Any) -> Any:
    """What a checkpoint gives back for what was saved: torch.distributed.checkpoint makes lists of tuples."""
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else value
