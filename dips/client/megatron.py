"""The outer loop for Megatron-LM's own training loop, `megatron.training.pretrain`: two lines in a training script.

    from dips.client.megatron import OuterPretrain                                      # 1
    with OuterPretrain():                                                               # 2
        pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

Inside the block three functions of `megatron.training.training` are wrapped, under the names that its loop calls:

    train_step        after each inner step, `step`, with the tokens of all data-parallel ranks; a finished run ends the
                      loop as Megatron's own reasons do
    load_checkpoint   joins the run first, then resumes, so that a checkpoint is loaded over what was pulled
    save_checkpoint   saves the outer state first, under <save>/dips/iter_0000100/

A loop that calls `train_step` in another module passes that module. Megatron's arguments give the tokens of a step:
global batch × sequence length.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from dips.client.rank.agent_client import check_all_ranks
from dips.client.rank.outer_loop import OuterLoop
from dips.errors import ConfigError
from dips.files import sync_path, write_aside

WRAPPED = ("train_step", "load_checkpoint", "save_checkpoint")
SHOULD_EXIT = 3  # index of should_exit in the tuple that train_step returns


class OuterPretrain:
    """A context manager that takes part in the run while its block lasts; `outer` is the loop, None before the first
    step.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        *,
        learning_rate: Callable[[float], float] | None = None,
        training: Any = None,
    ) -> None:
        """Prepare the wrapping; nothing changes before the block is entered.

        config         the cluster file; None: the file the agent was started with
        learning_rate  maps the run's progress, 0 to 1, to a learning rate; None: Megatron's scheduler, which counts the
                       steps of this cluster
        training       the module whose `train_step` is called; None: megatron.training.training
        """
        self._config, self._learning_rate, self._training = config, learning_rate, training
        self._before: dict[str, Any] = {}  # the functions that are wrapped, by name
        self._stepped = False  # a step was taken, or the run was already finished
        self.outer: OuterLoop | None = None

    def __enter__(self) -> OuterPretrain:
        if self._training is None:
            from megatron.training import training

            self._training = training
        if missing := [name for name in WRAPPED if not callable(getattr(self._training, name, None))]:
            raise ConfigError(f"{self._training.__name__}: expected the functions of Megatron-LM, has no {missing[0]}")
        for name in WRAPPED:
            self._before[name] = getattr(self._training, name)
            setattr(self._training, name, getattr(self, f"_{name}"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, before in self._before.items():
            setattr(self._training, name, before)
        if self.outer is None:
            return
        # Megatron leaves its loop by sys.exit(), after training and also if training cannot begin.
        if kind is None or (self._stepped and isinstance(error, SystemExit) and not error.code):
            self.outer.close()
        else:
            self.outer.__exit__(kind, error, trace)

    def _train_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Sequence[nn.Module],
        optimizer: Any,
        *words: Any,
        **options: Any,
    ) -> tuple[Any, ...]:
        outer = self._join(model, optimizer)
        if not outer.finished:
            self._set_learning_rate(outer, optimizer)  # Megatron's scheduler sets it behind each step, and at the start
            found = self._before["train_step"](forward_step_func, data_iterator, model, optimizer, *words, **options)
            losses = found[0]
            outer.step(tokens=self._count_tokens(), loss=next(iter(losses.values()), None))
            self._set_learning_rate(outer, optimizer)  # for Megatron's log
        else:  # before the first step
            found = ({}, 0, False, False, 0, None, None, 0)
        self._stepped = True
        if outer.finished:
            outer.close()
            found = (*found[:SHOULD_EXIT], True, *found[SHOULD_EXIT + 1 :])
        return found

    def _load_checkpoint(
        self, model: Sequence[nn.Module], optimizer: Any, *words: Any, **options: Any
    ) -> tuple[Any, ...]:
        load: Callable[..., tuple[Any, ...]] = self._before["load_checkpoint"]
        if optimizer is None or self.outer is not None:  # not the trained model: a teacher, or a dense model to upcycle
            return load(model, optimizer, *words, **options)
        outer, saved = self._join(model, optimizer), self._directory("load")
        pulled = outer.checksum()
        found = load(model, optimizer, *words, **options)
        file = _state_file(saved, int(found[0])) if saved is not None else None
        if file is not None and check_all_ranks(file.is_file()):
            outer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif outer.checksum() != pulled:  # with --finetune, and of a release, the iteration is 0 as if none were loaded
            outer.pull()
            outer.remark(f"{file}: the checkpoint has no outer state, so its θ does not count: pulled {outer.version}")
        return found

    def _save_checkpoint(self, iteration: int, *words: Any, **options: Any) -> Any:
        directory = self._directory("save")
        if self.outer is not None and not self.outer.finished and directory is not None:
            state = self.outer.state_dict()
            with write_aside(_state_file(directory, iteration)) as aside:
                torch.save(state, aside)
                sync_path(aside)
            _remove_stale(directory, iteration)
        return self._before["save_checkpoint"](iteration, *words, **options)

    def _join(self, model: Sequence[nn.Module], optimizer: Any) -> OuterLoop:
        if self.outer is None:
            self.outer = OuterLoop(model, self._config, optimizer=optimizer)
        return self.outer

    def _count_tokens(self) -> int:
        """Return the cluster's tokens in one step: ranks of tensor, pipeline and context parallelism share their
        sequences.
        """
        training, args = self._training, self._arguments()
        sequences = training.get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        return int(sequences * args.seq_length)

    def _arguments(self) -> Any:
        return self._training.get_args()

    def _set_learning_rate(self, outer: OuterLoop, optimizer: Any) -> None:
        if self._learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate(outer.progress) * outer.lr_scale

    def _directory(self, argument: str) -> Path | None:
        given = getattr(self._arguments(), argument, None)
        return Path(given) / "dips" if given else None


def _state_file(directory: Path, iteration: int) -> Path:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return directory / f"iter_{iteration:07d}" / f"rank_{rank:05d}.pt"


def _remove_stale(directory: Path, iteration: int) -> None:
    """Remove outer states whose Megatron checkpoint no longer exists; done by rank 0 only."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    for path in directory.glob("iter_*"):
        number = path.name.removeprefix("iter_")
        if number.isdigit() and int(number) < iteration and not (directory.parent / path.name).is_dir():
            shutil.rmtree(path, ignore_errors=True)
