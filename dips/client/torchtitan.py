"""The outer loop for torchtitan's Trainer: one call after the Trainer is built and before `trainer.train()`.

    trainer = config.build()
    outer = join_trainer(trainer)
    trainer.train()
    outer.close()

or without a script of one's own, with torchtitan's command line and its data loader:

    dips-client --config cluster.yaml -- torchrun … -m dips.client.torchtitan --module llama3 --config llama3_8b

The trainer's own train_step, loss, metrics, schedules and checkpoints stay. In addition each step is counted with the
tokens of all ranks, a finished run ends the loop, and the outer state is saved in each checkpoint and resumed after it
is loaded, from any source. FSDP, HSDP, tensor, expert and pipeline parallelism are supported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dips.client.data import Feed, RangeDataset, TokenBatches
from dips.client.rank.outer_loop import OuterLoop
from dips.data import DataSet
from dips.errors import ConfigError

STATE = "dips"  # key in the checkpointer's states; checkpoint.exclude_from_loading lists it to load others
OTHERS = "the checkpoint has no outer state for these ranks ({misfit}), so its θ does not count: pulled {}"
LOADED = "a checkpoint without outer state was loaded, which says nothing of θ: pulled {}"


def join_trainer(
    trainer: Any, config: str | PathLike[str] | None = None, *, learning_rate: Callable[[float], float] | None = None
) -> OuterLoop:
    """Make a torchtitan Trainer take part in the run; the caller closes the returned loop.

    config         the cluster file; None: the file the agent was started with
    learning_rate  maps the run's progress, 0 to 1, to a learning rate; None: torchtitan's schedule, which counts this
                   cluster's steps
    Errors         ConfigError for expert-parallel parameters that are no DTensors; also the errors of OuterLoop
    """
    parts = list(trainer.model_parts)
    for part in parts:
        check_experts(part)
    outer = OuterLoop(parts if trainer.parallel_dims.pp_enabled else parts[0], config)
    if isinstance(trainer.dataloader, LeasedTitanLoader):
        trainer.dataloader.lease_from(outer, trainer.gradient_accumulation_steps)
    _wrap_steps(trainer, outer, learning_rate)
    _wrap_checkpoints(trainer, outer)
    return outer


class LeasedTitanLoader:
    """A data set of `dips data build` for torchtitan: `config.dataloader = LeasedTitanLoader(path)`."""

    def __init__(self, directory: str | PathLike[str], workers: int = 2) -> None:
        self._directory, self._workers = Path(directory), workers

    def build(
        self, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> LeasedTitanLoader:
        """Take note of this rank's batches; torchtitan calls this once."""
        self._shape, self._place = (local_batch_size, seq_len), (dp_rank, dp_world_size)
        return self

    def lease_from(self, outer: OuterLoop, micro_batches: int) -> None:
        """Take the data ranges from this outer loop, for steps of so many micro-batches."""
        self._micro_batches, (size, length) = micro_batches, self._shape
        batches = TokenBatches(DataSet(self._directory), size * micro_batches, length, *self._place)
        loader: Any = torch.utils.data.DataLoader(
            RangeDataset(batches), batch_size=None, num_workers=self._workers, persistent_workers=self._workers > 0
        )
        self._feed = Feed(outer, loader)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for step in self._feed:  # i64[sequences, length + 1]
            # torchtitan drops a step that lacks a micro-batch: in the last one some sequences may be taken twice
            enough = step[torch.arange(max(len(step), self._micro_batches)) % len(step)]
            for tokens in enough.tensor_split(self._micro_batches):
                inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                positions = torch.arange(inputs.shape[1]).expand(inputs.shape).contiguous()  # for torchtitan's masks
                yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the range being trained and the position in it; the master knows which ranges are left."""
        return dict(self._feed.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a saved position; training continues in the middle of that range if it is leased to this cluster
        first.
        """
        self._feed.load_state_dict(state)


def check_experts(model: nn.Module) -> None:
    """Raise ConfigError for expert parameters that are sharded without being DTensors: a rank's part would be taken for
    all.
    """
    for path, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        for name, parameter in module.named_parameters(recurse=False) if count and "expert" in path else ():
            if parameter.ndim == 3 and parameter.shape[0] != count:
                raise ConfigError(
                    f"{path}.{name}: this rank holds {parameter.shape[0]} of {count} experts as a plain tensor: "
                    "--parallelism.spmd_backend partial_dtensor (or a torch that shards by spmd_types)"
                )


def _wrap_steps(trainer: Any, outer: OuterLoop, learning_rate: Callable[[float], float] | None) -> None:
    dims = trainer.parallel_dims
    copies = dims.dp_replicate * dims.dp_shard * dims.cp  # number of ranks that count their own tokens
    train_step, log, goes_on = trainer.train_step, trainer.metrics_processor.log, trainer.should_continue_training
    logged: list[float] = []  # the step's loss, if torchtitan logs this step

    def log_and_keep(step: int, global_avg_loss: float, *words: Any, **options: Any) -> Any:
        logged.append(global_avg_loss)
        return log(step, global_avg_loss, *words, **options)

    def train_and_count(batches: Any) -> None:
        if learning_rate is not None:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(outer.progress) * outer.lr_scale
        before = trainer.ntokens_seen
        train_step(batches)
        outer.step(tokens=(trainer.ntokens_seen - before) * copies, loss=logged[-1] if logged else None)
        logged.clear()

    trainer.metrics_processor.log = log_and_keep
    trainer.train_step = train_and_count
    trainer.should_continue_training = lambda: goes_on() and not outer.finished


def _wrap_checkpoints(trainer: Any, outer: OuterLoop) -> None:
    """Register the outer state with the checkpointer and resume from it after the model is loaded.

    A checkpoint's model is loaded last and overwrites the pulled parameters; the outer state is held until then.
    """
    checkpointer = trainer.checkpointer
    if not checkpointer.enable:
        return
    held = HeldState(outer)
    checkpointer.states[STATE] = held
    load = checkpointer.load

    def load_and_resume(*words: Any, **options: Any) -> bool:
        misfit = ""
        try:
            loaded = bool(load(*words, **options))
        except CheckpointException as error:
            if not (misfit := _find_misfit(error)):
                raise
            del checkpointer.states[STATE]
            try:
                loaded = bool(load(*words, **options))
            finally:
                checkpointer.states[STATE] = held
        state, held.state = held.state, {}
        if loaded and state:
            outer.load_state_dict(state)
        elif loaded:  # a checkpoint without outer state, of other ranks, or of a finished run
            outer.pull()
            outer.remark((OTHERS if misfit else LOADED).format(outer.version, misfit=misfit))
        return loaded

    checkpointer.load = load_and_resume


def _find_misfit(error: CheckpointException) -> str:
    """Return what a checkpoint lacks for some rank's outer state; "" if it cannot be loaded for another reason."""
    told = (str(why) for why, _ in error.failures.values())
    return next((text for text in told if f" {STATE}." in text), "")


class HeldState:
    """The outer state as torch.distributed.checkpoint saves it: one JSON text, and this rank's own tensors if it has
    any.
    """

    def __init__(self, outer: OuterLoop) -> None:
        self._outer = outer
        self.state: dict[str, Any] = {}  # the loaded state, until the model is loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state; empty if the run is finished, since nothing can be resumed then. Collective."""
        if self._outer.finished:
            return {"text": ""}
        state = self._outer.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return {"text": json.dumps({n: v for n, v in state.items() if n not in tensors}), **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold a loaded state until the model is loaded."""
        tensors = {name: value for name, value in state.items() if name != "text"}
        self.state = {**json.loads(state["text"]), **tensors} if state["text"] else {}


def main() -> None:
    """Run torchtitan's command line, as `python -m torchtitan.train` does, with the outer loop."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = ConfigManager().parse_args().build()
    try:
        outer = join_trainer(trainer)
        trainer.train()
        outer.close()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
