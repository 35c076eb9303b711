"""The library inside every training rank: three lines in a training script.

    outer = OuterLoop(model)                    # joins the run, pulls θ into this rank's shard
    for batch in loader(outer.ranges()):        # the data ranges leased to this cluster; or your own loader
        ...
        outer.step(local_tokens=n, loss=loss)   # after each inner step; when one is due: an outer step
    outer.close()

Only rank 0 connects to the agent of this job; the agent's answers are broadcast to all ranks, every rank moves
its own bytes, and a pulled version is installed on all ranks or on none. So at every inner step all ranks hold the same
version. The constructor, `step`, `push`, `ranges`, `state_dict`, `load_state_dict` and `close` are collective: all
ranks call them, in the same order, outside forward and backward.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, SupportsInt
from weakref import WeakSet

from torch import nn

from dips.client.ipc import messages
from dips.client.ipc.address import find_address
from dips.client.parallel import HostMemory, LazyMemory, UntouchedMemory, lay_out
from dips.client.parallel.tensors import unwrap_module
from dips.client.parallel.unshared_buffers import BufferWatch
from dips.client.rank import joining
from dips.client.rank.agent_client import AgentClient, JobCollectives
from dips.client.rank.model_checks import UNKNOWN, TrainedNames, digest_frozen
from dips.client.rank.optimizers import InnerOptimizers, KeptWeights
from dips.client.rank.outer_log import OnVersion, OuterLog
from dips.client.rank.shard_transfer import ShardTransfer, make_state, read_saved, read_tensors
from dips.client.rank.steps import InnerState, OuterState, OuterSteps, StepChecks, StepReports, StepTokens
from dips.codecs import Codec
from dips.config import Shared
from dips.errors import ConfigError, Diverged, LocalProtocolError
from dips.ids import GENESIS, VersionId
from dips.protocol.data import BegunRange
from dips.protocol.enums import DivergencePolicy

MEMORY = {"whole": HostMemory, "lazy": LazyMemory}  # classes by the option `install`
HIDDEN_MASTERS = (
    "fragments need the optimizer itself instead of a function that makes its masters: one called for a fragment would "
    "round the masters of all others"
)
CLOSED = "this OuterLoop is closed"
REPLACED = "this OuterLoop gave way to another, which this process made later: use that one"
NOT_EACH_RANK = (
    "the checkpoint lacks what ranks owe after lossy pushes, or after 16 bits rounded what they pulled ({misfit}): "
    "each rank must save its own OuterLoop.state_dict(), and as many ranks, laid out alike, load it"
)
OWN_STATES = (
    "OuterLoop: state_dict has tensors of each rank's own (a lossy codec, or parameters of 16 bits): save that of "
    "every rank, or by torch.distributed.checkpoint; with rank 0's alone a resume pulls instead\n"
)
GIVEN_UP = (
    "the push that the script demanded was given up ({reason}): what the model holds of the training since the last "
    "push goes with the next one, and is lost if the script ends first"
)
NOT_SYNCED = "replicas differ until their next synchronisation (may_push said so): synchronise them before"
NOT_SYNCED_BESIDE = (
    "may_push: expected overlap: none in the cluster file: a version that is merged while training goes on would come "
    "between two synchronisations of the replicas"
)
LOAD_ORDER = "load model and optimizer after OuterLoop is made, which pulls, then call load_state_dict"

_loops: WeakSet[OuterLoop] = WeakSet()  # of this process; one that is not closed for each agent


class OuterLoop:
    """The outer loop of one rank of the training job."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        config: str | os.PathLike[str] | None = None,
        *,
        optimizer: Any = None,
        may_push: Callable[[], bool] | None = None,
    ) -> None:
        """Join the run and pull its newest version into `model`; returns when every rank holds it.

        model      plain, DDP, FSDP2 or HSDP (`fully_shard`), tensor parallel by DTensor, or Megatron-core; a list of
                   pipeline stages or model chunks counts as one model. Parameters with requires_grad are shared,
                   frozen ones are not, and of the buffers those in `shared.share_buffers`. Wrapped and sharded already:
                   its memory must not be replaced later
        config     the cluster file; None: the file the agent was started with
        optimizer  the inner optimizer, if it keeps fp32 masters: pushes read them, and a pull updates them. Or a
                   function that makes them from the parameters, called after every pull. Not needed otherwise
        may_push   for ranks that differ between synchronisations of their own (`MeshLoop.is_synced`): called by all
                   ranks before the agent is asked whether a push is due; while it returns False none is. Needs
                   `overlap: none`
        Without an agent, or with DIPS_ALONE=1, the script trains alone: calls are legal, nothing is pulled or pushed.
        A former OuterLoop of this process that was not closed is closed: its progress since the last push is lost.
        Errors     the same on every rank. ConfigError: a wrong file, a model of a kind or dtype that is not
                   supported, ranks that hold different models. DifferentModel: the model is not the run's; the first
                   differences are listed.
        """
        self._config, alone = joining.find_config(config), joining.is_alone(config)
        self._agent = None if alone else find_address(self._config)
        for former in [loop for loop in _loops if loop._agent == self._agent is not None]:
            former._give_way()
        self._unwatch = joining.watch_run(self._config, alone)
        self.resumed = False  # whether training goes on from what `load_state_dict` was given, not from a pull instead
        self._collectives = JobCollectives(self._config.collective_s)
        joining.compare_files(self._config, alone, self._collectives)
        self._agent_client = joining.find_agent(self._config, self._collectives, alone)
        self._may_push = may_push
        if may_push is not None and self._config.overlap != "none":
            raise ConfigError(NOT_SYNCED_BESIDE)
        layout = lay_out(model, self._collectives, optimizer, grouping=self._config.shared.grouping)
        if layout.adapter.loses_bits and self._collectives.rank == 0:
            joining.warn_of_coarse(layout.adapter.loses_bits)
        wrapped = [model] if isinstance(model, nn.Module) else model
        self._parts = parts = [unwrap_module(part) for part in wrapped]  # names in all clusters are those of the model
        self._optimizers = InnerOptimizers(parts, optimizer)
        self._trained_names = TrainedNames(parts, self._collectives)
        self._kept_weights = KeptWeights(parts, layout.adapter, self._optimizers, self._collectives, self._warn)
        self._buffer_watch = BufferWatch(parts, self._config.shared.share_buffers)
        kind = UntouchedMemory if alone else MEMORY[self._config.install]
        memory = kind(layout.adapter, layout.held, layout.plan, self._collectives)
        codecs = (Codec.FP32, Codec.FP32) if alone else (self._config.shared.codec, self._config.shared.pull_codec)
        if self._config.fragments > 1 and layout.adapter.hides_masters:
            raise ConfigError(HIDDEN_MASTERS)
        self._shard_transfer = ShardTransfer(
            memory,
            self._collectives,
            self._config.stall_s,
            *codecs,
            lambda: self._optimizers.steps,
            self._config.fragments,
            self._warn,
        )
        joining.tell_memory(
            self._collectives, self._shard_transfer.sum_host_bytes(self._config.overlap == "full"), alone
        )
        moving = self._shard_transfer
        keys = moving.public_keys if self._config.tls else ()  # plain lanes ask for none
        frozen = UNKNOWN if layout.adapter.staged else digest_frozen(parts, self._collectives)
        self._state = joining.attach_trainer(
            self._agent_client, self._config, layout.plan.manifest, moving.ranks, keys, frozen
        )
        self._inner, self._step_checks = InnerState(), StepChecks(self._collectives)
        self._outer_steps = OuterSteps(
            self._config, self._state, self._agent_client, self._shard_transfer, self._reset_optimizers
        )
        self._data_ranges = DataRanges(self._state, self._agent_client, self._outer_steps, self._tell_news)
        self._step_reports = StepReports(
            self._state, self._collectives, self._agent_client, pipelined=layout.adapter.staged
        )
        self._step_tokens = StepTokens(self._state, self._collectives, self._agent_client)
        self._pid, self._closed = os.getpid(), ""
        _loops.add(self)
        self._state.version = GENESIS if alone else None
        self._outer_steps.pull_newest()
        if self.version.version > 0:
            self._inner.begin_warmup()  # its optimizer is empty, until a checkpoint is loaded
        self._told_of_own = False
        self._log = OuterLog()
        self._log.begin(self.version, self._state.result)

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def version(self) -> VersionId:
        """The last installed version: the base of the next push."""
        assert self._state.version is not None  # the constructor does not return without one
        return self._state.version

    @property
    def progress(self) -> float:
        """The run's accepted tokens over its target, 0 to 1, the same on all ranks; use it to drive the learning-rate
        schedule.

        It changes when the cluster takes part in an outer step. 0 if the run has no token target.
        """
        return self._state.progress

    @property
    def inner_steps(self) -> int:
        """Inner steps since this object was created, plus those of the loaded checkpoint."""
        return self._inner.steps

    @property
    def lr_scale(self) -> float:
        """A factor for the inner learning rate: below 1 while a cluster that joined a running run warms up."""
        return self._inner.lr_scale

    @property
    def shared(self) -> Shared:
        """The options that all clusters of the run agree on: the section `shared` of the cluster file."""
        return self._config.shared

    @property
    def finished(self) -> bool:
        """Whether the run is over: leave the training loop. `step` does nothing from then on, and `ranges` ends."""
        return self._state.finished

    @property
    def accepted_pushes(self) -> int:
        """Pushes that were accepted since this object was made, the same on all ranks."""
        return self._log.accepted

    @property
    def moving(self) -> bool:
        """Whether a push or pull is in flight while training continues (`overlap: full`)."""
        return self._outer_steps.in_flight

    # ---- inner and outer steps ---------------------------------------------------------------------------------------

    def step(
        self, *, tokens: SupportsInt | None = None, local_tokens: SupportsInt | None = None, loss: Any = None
    ) -> None:
        """Report that one inner step is done; when an outer step is due, take part in it before this returns.

        With `install: lazy` the new version may not be completely copied into the model yet; see `install`.

        local_tokens  consumed in this step by this rank, of its own part of the batch: they are summed over the ranks.
                      Ranks that compute the same part (tensor, context, pipeline parallelism) pass it once, and else 0
        tokens        instead: consumed by the whole cluster, over all its ranks; rank 0's number counts
        loss          of this step, a float or a tensor of one element, or None; rank 0's counts. In a pipeline, whose
                      rank 0 has none, that of the first rank that passes one
        Numbers of tokens may be Python, numpy or torch numbers; a number on an accelerator is not waited for.
        Errors        Unavailable: the agent is gone. StaleIncarnation: another attempt of this trainer took over.
                      ConfigError: a parameter was unfrozen or added since this object was made.
                LocalProtocolError: an invalid number; with `install: lazy`, this step was taken on parameters of the
                      former version; or `follow_optimizer` was called, and this step is counted already
        """
        if self._optimizers.follows:
            raise LocalProtocolError("follow_optimizer was called, it counts each optimizer.step(): leave out step")
        self._take_step(tokens, local_tokens, loss)

    def follow_optimizer(
        self,
        optimizer: Any,
        *,
        tokens: SupportsInt | Callable[[], SupportsInt] | None = None,
        local_tokens: SupportsInt | Callable[[], SupportsInt] | None = None,
        loss: Callable[[], Any] | None = None,
    ) -> None:
        """Count every `optimizer.step()` from now on as a call of `step`, which the script then leaves out.

        A step that accumulates several micro-batches counts once; a step that a GradScaler skips does not count.

        optimizer     a torch optimizer, or its wrapper (accelerate, …); of several for one model, the one that steps
                      last
        local_tokens  of one optimizer step, as in `step`, over all its micro-batches on this rank. Or a function
                      that is called after each step and returns the tokens since its last call
        tokens        instead: the same over all ranks
        loss          a function that returns the loss of the step; None: no loss
        """
        count, count_local, read_loss = map(_make_call, (tokens, local_tokens, loss))
        self._optimizers.follow_steps(optimizer, lambda: self._take_step(count(), count_local(), read_loss()))

    def _take_step(self, tokens: SupportsInt | None, local_tokens: SupportsInt | None, loss: Any) -> None:
        self._check_usable()
        if self._state.finished:
            return
        known = self._step_tokens.count_step(tokens, local_tokens)
        self._shard_transfer.on_inner_step()
        self._inner.steps += 1
        self._state.steps_until_poll -= 1
        self._step_reports.report_step(known, loss)
        self._step_checks.on_step(self._optimizers.steps)
        self._log.count_step(known, loss)
        if self._state.steps_until_poll <= 0 and (self._may_push is None or self._may_push()):
            self._poll_outer_step(demanded=False)

    def remark(self, text: str) -> None:
        """Show a remark in the agent's log and in `dips status`. Only rank 0's call has an effect."""
        self._agent_client.notify_agent(messages.Remarked(self._state.attempt, text))

    def report_pipeline(self, *, gear: int, step_s: float, idle: float, stages: Sequence[Mapping[str, Any]]) -> None:
        """Show how the last step of a planned pipeline was played; `Pipeline` calls it. Only rank 0's call has an
        effect. The fields are those of PipelineReported, and of PlayedStage for each stage.
        """
        played = tuple(messages.PlayedStage(**stage) for stage in stages)
        self._agent_client.notify_agent(messages.PipelineReported(self._state.attempt, gear, step_s, idle, played))

    def report_change(self, what: str, why: str, restarts: bool = False) -> None:
        """Show a change inside the cluster; `Pipeline` and `MeshLoop` call it. Only rank 0's call has an effect.
        The fields are those of InsideChanged.
        """
        self._agent_client.notify_agent(messages.InsideChanged(self._state.attempt, what, why, restarts))

    def log_to(self, target: Any) -> None:
        """Write `dips/…` numbers at every outcome and version: mean loss since the last, progress, counts of outcomes.

        target  a torch SummaryWriter, a run of W&B, or a function of (numbers by name, inner steps). Usually on rank 0
        """
        self._log.add_writer(target)

    def on_version(self, function: OnVersion) -> None:
        """Call `function(version)` after every version that is pulled from now on, between two inner steps.

        Use it to evaluate the version: call this on all ranks, and let the function restore the model's mode. The model
        is that version; under `overlap: full` with the training done meanwhile. Numbers that it returns by name go to
        `log_to`.
        """
        self._log.add_function(function)

    def push(self) -> None:
        """Take part in an outer step now, regardless of the pace; all inner steps since the last push count.
        Collective. Under `overlap: full` this begins it, and training goes on.

        Waits up to ten minutes for a slot, for a master that is away, or while it refuses the push, as on a link that
        is too slow; a push that breaks, or whose round is skipped, is tried again meanwhile. Then it warns that nothing
        was pushed, and training may go on.
        """
        if self._settle_work("push"):
            self._poll_outer_step(demanded=True)

    def pull(self) -> None:
        """Replace the model by the run's newest version, for example after loading parameters from elsewhere. The
        training since the last push is lost; a push in flight is settled before. Waits until the version has come, also
        for a master that is away. Collective.
        """
        if self._settle_work("pull"):
            self._outer_steps.pull_newest()
            self._tell_news()

    def checksum(self) -> int:
        """Return a checksum of the parameters that the cluster would push now, the same on all ranks. Collective."""
        self._check_usable()
        self._shard_transfer.finish_install()
        return self._shard_transfer.checksum()

    def install(self) -> None:
        """Complete the install of the present version in the model; needed only with `install: lazy`.

        Call it before parameters are read or written in any way other than a forward of their module, a step of a torch
        optimizer, state_dict or load_state_dict, which call it themselves: for a moving average, a norm, a copy of the
        model. Not collective.
        """
        self._check_usable()
        self._shard_transfer.finish_install()

    def ranges(self) -> Iterator[int]:
        """Yield the data ranges leased to this cluster, the same on all ranks, until none is left or the run is over.

        A range counts as trained when the next one is requested, unless `mark_ranges` says otherwise. At the end of the
        data the progress since the last push is pushed and settled before this returns. Split a range's samples over
        your data-parallel ranks.

        Raises ConfigError if the run has no data ranges (`shared.data.ranges`).
        """
        if self._config.shared.data.ranges == 0:
            raise ConfigError(
                "shared.data.ranges is 0: this run leaves the data to its clusters; bring your own loader"
            )
        while not self._state.finished and not self._closed:
            self._check_usable()
            self._collectives.barrier("OuterLoop.ranges")
            self._check_synced("ranges")  # at their end it pushes
            self._settle_steps()
            number = self._data_ranges.next_range()
            self._tell_news()
            if number is None:
                return
            yield number

    @property
    def range_begun(self) -> BegunRange | None:
        """The trained part of the last range from `ranges`, by pushes that count or a loaded checkpoint; None: nothing
        of it.
        """
        return self._data_ranges.begun

    @property
    def range_recalls(self) -> int:
        """The number of recalls of given ranges because work was lost: when it rises, drop the rest of the ranges and
        take the next of `ranges`.
        """
        return self._state.recalls

    def mark_ranges(self, left: Sequence[int], begun: BegunRange | None = None) -> None:
        """Set how far the given ranges are trained once the next inner step is reported, as `dips.client.data.Feed`
        does.

        Then exactly this is settled with the push that includes the step, and requesting the next range uses up
        nothing.

        left   ranges that will still have samples to train, in the order in which they were given
        begun  the first of them, if a part of it will be trained
        """
        self._data_ranges.mark_position(left, begun)

    def _poll_outer_step(self, demanded: bool) -> None:
        if not self.moving:
            self._collectives.barrier("OuterLoop.step")
            self._trained_names.check_names()
            if self._agent is not None:  # a script alone has no pulls that could be undone
                self._kept_weights.check_optimizers()
            if told := self._buffer_watch.describe_changed():
                self._warn(told)
        self._settle_steps()
        self._step_reports.report_pipeline_losses()
        self._outer_steps.poll_outer_step(demanded)
        self._tell_news()

    def _check_synced(self, call: str) -> None:
        """Raise LocalProtocolError if a transfer now would mix what ranks hold."""
        if self._may_push is not None and not self._may_push():
            raise LocalProtocolError(f"OuterLoop.{call}: {NOT_SYNCED}")

    def _settle_work(self, call: str) -> bool:
        """Report the steps and end the transfer from before `call`; return whether the run goes on. Collective."""
        self._check_usable()
        self._check_synced(call)
        self._collectives.barrier(f"OuterLoop.{call}")
        self._settle_steps()
        if not self._state.finished:
            self._outer_steps.settle_transfers()
        return not self._state.finished

    def _settle_steps(self) -> None:
        """Report all inner steps until now to the agent. Collective."""
        self._step_reports.flush_reports()
        self._log.count_tokens(self._step_tokens.settle_tokens())

    def _tell_news(self) -> None:
        if self._state.given_up:
            self._warn(GIVEN_UP.format(reason=self._state.given_up))
            self._state.given_up = ""
        if self._log.wants_model(self.version):
            self._shard_transfer.finish_install()
        self._log.tell_news(self.version, self._state.result, self.progress, self.inner_steps)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the outer loop's part of a cluster's checkpoint, for `torch.save` or `torch.distributed.checkpoint`.

        Save it with the model and the optimizer, between two steps. Collective; the same on all ranks except for
        tensors of lossy runs and of 16-bit parameters, whose names end with the rank: then every rank saves its own. If
        a push is in flight (`overlap: full`) the state records it: a resume then loses the merge.
        """
        self._check_usable()
        self._collectives.barrier("OuterLoop.state_dict")
        self._settle_steps()
        self._shard_transfer.finish_install()
        if self._config.on_divergence is not DivergencePolicy.RESET:
            self._shard_transfer.check_finite("it is not saved over the last good checkpoint")
        saved = self._agent_client.ask_agent(messages.SaveWanted(self._state.attempt))
        if not isinstance(saved, messages.Saved):
            raise LocalProtocolError(f"expected Saved from the agent, got {saved!r}")
        own = self._shard_transfer.checkpoint_tensors(self._state.result)
        checksum = self._shard_transfer.checksum()
        (none,) = self._collectives.all_min([int(not own)])
        if not none:
            checksum ^= self._shard_transfer.layout  # no key of its own: a state of the release before lacks it
            self._tell_of_own()
        return make_state(saved, self.inner_steps, checksum, self._collectives.rank, own)

    def _tell_of_own(self) -> None:
        """Print once that rank 0's state is not complete."""
        if self._told_of_own or self._collectives.world_size == 1:
            return
        self._told_of_own = True
        if self._collectives.rank == 0:
            sys.stderr.write(OWN_STATES)

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Resume from a checkpoint whose model and optimizer have just been loaded; return a description of the result.

        Exact if no push of this cluster was settled since it was saved: same base, same tokens, same data ranges, the
        first of which may be partly trained. If the run is ahead of the checkpoint, its newest version is pulled into
        the model, and the returned text gives the reason, which is also warned and remarked. The same happens if other
        ranks saved the checkpoint, or rank 0 saved for all and ranks have their own tensors (`state_dict`). Call it
        before the first inner step. Collective.

        Errors  LocalProtocolError: inner steps were taken already; a checkpoint of another format.
        """
        self._check_usable()
        self.resumed = False
        saved = read_saved(state)
        self._collectives.barrier("OuterLoop.load_state_dict")
        own = read_tensors(state, self._collectives.rank)
        moving = self._shard_transfer
        sums = [moving.checksum(), moving.checksum(buffers=True)]  # the release before counts shared buffers, too
        fits = state["checksum"] in (*sums, *(checksum ^ moving.layout for checksum in sums))
        (all_fit,) = self._collectives.all_min([int(fits)])  # a crash between the saves of two ranks: of unlike steps
        if not all_fit:
            layout = ", or what ranks owe after lossy pushes is that of another layout" if own else ""
            return self._pull_instead(
                f"the model does not hold what the checkpoint was saved with: {LOAD_ORDER}{layout}"
            )
        if misfit := self._shard_transfer.find_misfit(own):
            return self._pull_instead(NOT_EACH_RANK.format(misfit=misfit))
        answer = self._agent_client.ask_until_answered(messages.Resume(self._state.attempt, saved))
        self._inner.warming_up = False
        if isinstance(answer, messages.Healed):
            return self._pull_instead(f"the checkpoint is overtaken: {answer.reason}")
        if not isinstance(answer, messages.Resumed):
            raise LocalProtocolError(f"expected Resumed or Healed from the agent, got {answer!r}")
        self._state.version = VersionId.parse(saved.base)
        self._shard_transfer.restore_tensors(self.version, own)
        self._inner.steps, self._state.steps_until_poll = int(state["steps"]), answer.steps
        self._log.begin(self.version, self._state.result)
        self.resumed = True
        return answer.reason

    def _pull_instead(self, why: str) -> str:
        """Pull instead of resuming, which loses the checkpoint's work since its last push; warn and return the
        reason.
        """
        self._outer_steps.pull_newest()
        self._tell_news()
        told = f"{why}; pulled {self.version}"
        self._warn(told)
        return told

    def _warn(self, text: str) -> None:
        """Emit rank 0's text as a warning and as a remark for `dips status`."""
        if self._collectives.rank == 0:
            warnings.warn(f"OuterLoop: {text}", stacklevel=4)
        self.remark(text)

    # ---- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run; the training since the last push does not count. An outer step that `push` has begun is
        settled before (`overlap: full`). Idempotent. Collective.
        """
        if self._closed:
            return
        self._check_usable()
        if self._outer_steps.is_demanded:
            self._settle_work("close")
            self._tell_news()
        self._unwatch()  # the agent may end as soon as it gets Detach, while other ranks still have work to do
        self._collectives.barrier("OuterLoop.close")
        self._settle_steps()
        self._shard_transfer.finish_install()
        self._outer_steps.cancel_transfers()
        self._agent_client.ask_agent(messages.Detach(self._state.attempt))
        self._closed = CLOSED
        self._shard_transfer.free()  # another loop of this process has its own, perhaps before this one is collected
        self._optimizers.close()
        self._agent_client.disconnect()
        self._collectives.close()

    def __enter__(self) -> OuterLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._optimizers.close()
            self._agent_client.disconnect()

    def _give_way(self) -> None:
        """Close without collectives or messages, because a newer OuterLoop of this process takes over."""
        if self._closed or self._pid != os.getpid():
            return  # in a process forked from the one that created the loop, which still uses it
        self._closed = REPLACED
        self._unwatch()
        self._optimizers.close()
        self._outer_steps.cancel_transfers()
        if not self._shard_transfer.torn:
            self._shard_transfer.finish_install()  # its hooks would write into the model after the next pull
        self._shard_transfer.free()
        self._agent_client.disconnect()
        self._collectives.close()

    def _reset_optimizers(self) -> None:
        """Drop the optimizers' state after a model that was not finite was replaced by the run's. Collective."""
        problem = self._optimizers.drop_state() if self._config.on_divergence is DivergencePolicy.RESET else ""
        (mended,) = self._collectives.all_min([int(not problem)])
        if not mended:
            raise Diverged(
                f"the model diverged, and on some rank a reset does not mend it: {problem or 'not this one'}"
            )
        self._inner.begin_warmup()

    def _check_usable(self) -> None:
        if self._closed:
            raise LocalProtocolError(self._closed)
        if self._state.torn or self._shard_transfer.torn:
            raise LocalProtocolError("the model is torn: an install failed half-way; restart the training job")
        if os.getpid() != self._pid:
            raise LocalProtocolError("an OuterLoop belongs to the process that made it, not to one forked from it")


def find_loop(parts: Sequence[nn.Module]) -> OuterLoop | None:
    """Return this process's open OuterLoop over one of these modules; None if there is none."""
    wanted = set(parts)
    open_loops = (loop for loop in list(_loops) if not loop._closed)
    return next((loop for loop in open_loops if any(m in wanted for p in loop._parts for m in p.modules())), None)


def _make_call(given: Any) -> Callable[[], Any]:
    return given if callable(given) else lambda: given


# ---- data ranges -----------------------------------------------------------------------------------------------------


class DataRanges:
    """Requests ranges from the agent; each request reports the former ranges as used up, except for those marked as
    left.
    """

    def __init__(
        self, state: OuterState, agent_client: AgentClient, outer_steps: OuterSteps, tell_news: Callable[[], None]
    ) -> None:
        self._state, self._agent_client, self._outer_steps = state, agent_client, outer_steps
        self._tell_news = tell_news  # of one outer step, before the next one hides them
        self._asked = 0
        self.begun: BegunRange | None = None  # the trained part of the last given range; None: nothing of it

    def next_range(self) -> int | None:
        """Return the next range; None at the end of the data or of the run, once all progress is settled.

        Also returns None if the remaining samples of the last ranges must be trained first. Collective.
        """
        self._asked += 1
        was_finished = False
        while True:
            answer = self._agent_client.ask_until_answered(
                messages.RangeWanted(self._state.attempt, self._asked, self._state.left)
            )
            if isinstance(answer, messages.RangeGiven):
                self.begun, self._state.recalls = answer.begun, answer.recalls
                return answer.range
            if not isinstance(answer, messages.RangesEnded):
                raise LocalProtocolError(f"expected RangeGiven or RangesEnded from the agent, got {answer!r}")
            if (self._state.left and not answer.finished) or self._settle_ranges(answer):
                # An end of the run that is not there any more, since it was extended meanwhile, is asked for again.
                if self._state.finished or not answer.finished or was_finished:
                    return None
                was_finished = True
            self._tell_news()

    def mark_position(self, left: Sequence[int], begun: BegunRange | None) -> None:
        """Set the position after the next inner step: only `left` have samples to train; `begun` is trained of the
        first.
        """
        self._state.left, self._state.begun = tuple(left), begun

    def _settle_ranges(self, ended: messages.RangesEnded) -> bool:
        """Push the progress since the last push; return whether none is left to settle."""
        was_in_flight = self._outer_steps.in_flight
        self._outer_steps.settle_transfers()
        if was_in_flight and not self._state.finished:
            return False  # its outcome may have settled everything, or returned ranges: ask again
        if not self._state.finished and (ended.finished or ended.unsettled):
            # In a finished run nothing is pushed; the final version is pulled.
            self._outer_steps.run_outer_step(demanded=ended.unsettled)
        return self._state.finished or not ended.unsettled
