"""The outer loop for Hugging Face's Trainer: two lines in a training script, a third for the run's own data.

    from dips.client.transformers import OuterCallback, lease_ranges           # 1
    outer = OuterCallback()
    trainer = Trainer(model=model, args=args, …, callbacks=[outer])             # 2
    lease_ranges(trainer, outer)                                                # 3, with `shared.data.ranges`
    trainer.train()

Start it under the agent, with torchrun or `accelerate launch`: `dips-client --config cluster.yaml -- torchrun …`.
Models: plain, DDP, FSDP2 (accelerate's `fsdp_version: 2`), and PEFT's adapters alone, since only parameters with
requires_grad are shared. The callback does this for the Trainer:

* `max_steps` is set, unless the script has: the training ends with the run (`shared.stop`). The Trainer's epochs do not
  count. A `max_steps` set by the script ends this cluster's training earlier; its last steps are pushed.
* Tokens are counted over all ranks (`include_num_input_tokens_seen`, "all" unless the script says "non_padding").
* The learning rate follows `lr_scheduler_type` over the run's tokens, not over max_steps.
* Checkpoints hold the outer loop's state; `train(resume_from_checkpoint=…)` goes on from it.

Load the model in float32 (`dtype=torch.float32`; the default "auto" may give bfloat16) and train it with `bf16=True`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from dips.client.data import Feed, RangeDataset, RowBatches
from dips.client.learning_rate import NO_TARGET
from dips.client.rank.agent_client import check_all_ranks
from dips.client.rank.joining import find_config, is_alone
from dips.client.rank.outer_loop import OuterLoop
from dips.errors import ConfigError
from dips.files import sync_path, write_aside

__all__ = ["OuterCallback", "lease_ranges"]

NOT_AT_INIT = (
    "max_steps is not set, so the Trainer would end after its epochs and not with the run: give OuterCallback to "
    "Trainer(callbacks=[…]), which sets it, or set max_steps"
)
NO_LOSS = "the Trainer logs its loss every {every} steps and a push comes after {pace}: set logging_steps to see it"
OWN_DATA = (
    "the run has data ranges, and this Trainer reads its own data, which may be trained twice: "
    "lease_ranges(trainer, callback)"
)
COARSE_TYPES = (torch.bfloat16, torch.float16)
COARSE = "{name} has 16 bits and no fp32 master: load the model with dtype=torch.float32 and train it with bf16=True"


class OuterCallback(TrainerCallback):
    """A Trainer callback that joins the run when training begins, steps the outer loop, and leaves when training
    ends.
    """

    def __init__(self, config: str | os.PathLike[str] | None = None) -> None:
        """Create the callback; `config` is the cluster file, None: the file the agent was started with."""
        self.config = config
        self.outer: OuterLoop | None = None  # None outside of training
        self.loader: LeasedLoader | None = None  # with `lease_ranges`
        self.resumed_feed: dict[str, int] = {}  # position in the data of the checkpoint being resumed; empty: none
        self._rate: RunRate | None = None
        self._tokens = 0  # tokens the Trainer has seen that were already passed to the outer loop
        self._loss: float | None = None  # the last logged loss, until it is passed to the outer loop
        self._over = False  # the Trainer was told to stop

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let the run end the training instead of max_steps. Raises ConfigError for intervals given as a share of
        max_steps.
        """
        if is_alone(self.config):
            return
        for key in ("logging_steps", "eval_steps", "save_steps"):
            if 0 < (getattr(args, key) or 0) < 1:
                raise ConfigError(f"{key}: a share of max_steps, which the run decides: give a number of steps")
        if args.max_steps <= 0:
            args.max_steps = NO_LIMIT

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Join the run and pull its newest version, or resume from a checkpoint.

        Raises ConfigError if the Trainer does not know the job's other ranks, or would not end with the run.
        """
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if args.world_size != ranks:
            raise ConfigError(
                f"the job has {ranks} ranks, the Trainer trains on {args.world_size} of them, each for itself: "
                "on CPUs it wants TrainingArguments(use_cpu=True)"
            )
        alone = is_alone(self.config)
        if args.max_steps <= 0 and not alone:
            raise ConfigError(NOT_AT_INIT)
        if args.include_num_input_tokens_seen in ("no", False):
            args.include_num_input_tokens_seen = "all"
        self._tokens, self._loss, self._over = state.num_input_tokens_seen, None, False
        held = HeldParameters(model) if state.global_step else None
        self.outer = OuterLoop(model, self.config)
        if held is not None:
            self._resume(self.outer, held, args, state)
        self._rate = RunRate(self.outer, args)
        if not alone:
            told = [self._rate.take_over(lr_scheduler, optimizer), *self._find_faults(args, state)]
            self._tell(self.outer, told, find_coarse(model))
        self._end_with_run(args, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step; every H-th is followed by an outer step. Collective."""
        assert self.outer is not None and self._rate is not None, "the Trainer begins before it steps"
        tokens, self._tokens = int(state.num_input_tokens_seen - self._tokens), state.num_input_tokens_seen
        loss, self._loss = self._loss, None
        self.outer.step(tokens=tokens, loss=loss)
        self._rate.record_step(tokens)
        self._end_with_run(args, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Keep the logged training loss, a mean over the Trainer's logging_steps."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the outer loop's state into the checkpoint that the Trainer has just saved. Collective.

        Also saves at the end of the run, since `dips set` may extend it.
        """
        if self.outer is None or args.save_only_model:
            return  # such a checkpoint cannot be resumed
        feed = self.loader.state_dict() if self.loader is not None else {}
        write_outer_state(checkpoint_path(args, state), self.outer.state_dict(), feed)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Push the last steps if the run goes on, then leave the run."""
        if self.outer is None:
            return
        assert self._rate is not None, "the Trainer begins before it ends"
        if self._rate.pending and not self.outer.finished and not args.load_best_model_at_end:
            self.outer.push()  # the best model would be an older one
        self.outer.close()
        self.outer = self._rate = self.loader = None

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop training if the run ended when it leased its last data range, after the last step."""
        self._end_with_run(args, control)

    def _resume(self, outer: OuterLoop, held: HeldParameters, args: TrainingArguments, state: TrainerState) -> None:
        """Resume from the checkpoint that the Trainer has loaded and that OuterLoop's pull has overwritten."""
        path = checkpoint_path(args, state)
        found = read_outer_state(path)
        if not check_all_ranks(found is not None) or found is None:
            self._tell(outer, [MISSING.format(path=path.with_name(FILE.format(rank="RANK")))])
            return
        outer_state, feed = found
        outer.install()
        held.put_back()
        outer.load_state_dict(outer_state)
        if outer.resumed:
            self.resumed_feed = feed

    def _find_faults(self, args: TrainingArguments, state: TrainerState) -> list[str]:
        """Return remarks on settings that make the run worse without failing."""
        config, faults = find_config(self.config), list[str]()
        pace = config.pace.steps or config.pace.aligned
        logs = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        if pace and logs == "steps" and state.logging_steps > pace:
            faults.append(NO_LOSS.format(every=state.logging_steps, pace=pace))
        if config.shared.data.ranges and self.loader is None:
            faults.append(OWN_DATA)
        return faults

    def _tell(self, outer: OuterLoop, texts: list[str], warned: str = "") -> None:
        """Emit remarks as warnings on rank 0 and send them to `dips status`; `warned` was emitted as a warning
        already.
        """
        found = [text for text in texts if text]
        if int(os.environ.get("RANK", "0")) == 0:
            for text in found:
                warnings.warn(text, stacklevel=3)
        if warned or found:
            outer.remark("; ".join([*found, *filter(None, [warned])]))

    def _end_with_run(self, args: TrainingArguments, control: TrainerControl) -> None:
        assert self.outer is not None, "the Trainer begins before it steps"
        if self.outer.finished and not self._over:
            # As the Trainer itself does at its max_steps.
            self._over = True
            strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
            control.should_save = control.should_save or strategy == "steps"
            control.should_training_stop = True


def find_coarse(model: nn.Module) -> str:
    """Return a remark on 16-bit parameters without fp32 masters, which lose small steps and rounded pulls; "" if there
    are none.
    """
    trained = (name for name, p in model.named_parameters() if p.requires_grad and p.dtype in COARSE_TYPES)
    name = next(trained, "")
    return COARSE.format(name=name) if name else ""


# ---- trainer checkpoint ----------------------------------------------------------------------------------------------
# The Trainer loads model and optimizer before it calls a callback, and the OuterLoop that the callback creates pulls
# over them. So the loaded parameters are kept aside and put back, and the outer loop resumes from the saved state
# (docs/architecture.md#silent-failures).


FILE = "outer_state_{rank}.pt"
MISSING = (
    "{path} is not there on each rank: the checkpoint was saved without the outer loop, by fewer ranks, or elsewhere "
    "than in output_dir. The run's newest version was pulled"
)


def checkpoint_path(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the path of this rank's outer state in the checkpoint of the Trainer's current step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / FILE.format(rank=args.process_index)


def write_outer_state(path: Path, outer: dict[str, Any], feed: dict[str, int]) -> None:
    """Save the outer loop's state and this rank's position in its data."""
    with write_aside(path) as aside:
        torch.save({"outer": outer, "feed": feed}, aside)
        sync_path(aside)


def read_outer_state(path: Path) -> tuple[dict[str, Any], dict[str, int]] | None:
    """Return the outer loop's state and the position in the data, or None if there is no such file."""
    if not path.exists():
        return None
    found = torch.load(path, weights_only=True)
    return found["outer"], found["feed"]


class HeldParameters:
    """A copy on the host of what a pull may replace: a rank's part of the trainable parameters, and all buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = {name: p.to("cpu", copy=True) for name, p in _local_tensors(model)}

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy what is held back into the model."""
        for name, tensor in _local_tensors(self._model):
            tensor.copy_(self._held[name])


def _local_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    trained = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
    held = [*trained, *model.named_buffers()]
    return [(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor) for name, tensor in held]


# ---- trainer rate ----------------------------------------------------------------------------------------------------
# Clusters have no common step count, and the run ends by tokens. So the curve of `lr_scheduler_type` spans the tokens
# that the run has accepted plus those that this cluster has trained on since. The warm-up counts the Trainer's steps
# (`warmup_steps`), or is a share of the run (a number below 1). `outer.lr_scale` slows a cluster that joins late.


# Curves with a beginning and an end; all others are defined by step counts, which mean nothing to the run.
CURVES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "constant", "constant_with_warmup",
)  # fmt: skip
CURVE_STEPS = 1_000_000  # steps of the curve from the run's beginning to its end
OWN_STEPS = (
    "the learning rate follows the Trainer's own steps, not the run's progress: {why}; take one of the "
    "lr_scheduler_types " + ", ".join(CURVES)
)


class RunRate:
    """The run's progress, and the learning-rate factor at this progress."""

    def __init__(self, outer: OuterLoop, args: TrainingArguments) -> None:
        self._outer, self._args, self._tokens = outer, args, 0
        self._target = outer.shared.stop.tokens
        self._curve: Callable[[float], float] = lambda share: 1.0
        self._here = (outer.version, outer.accepted_pushes)  # progress rises with the pushes of others, too

    @property
    def share(self) -> float:
        """The share of the run's token target that is trained: accepted tokens and this cluster's tokens since; 0
        to 1.
        """
        return min(1.0, self._outer.progress + (self._tokens / self._target if self._target else 0.0))

    @property
    def pending(self) -> bool:
        """Whether this cluster has trained since it pulled its version."""
        return self._tokens > 0 and self._here == (self._outer.version, self._outer.accepted_pushes)

    def record_step(self, tokens: int) -> None:
        """Count the tokens of one optimizer step; call it after the outer step that may follow."""
        here = (self._outer.version, self._outer.accepted_pushes)
        self._tokens = self._tokens + tokens if here == self._here else 0
        self._here = here

    def take_over(self, scheduler: Any, optimizer: Any) -> str:
        """Make the scheduler follow the run from its next step on, and set the current step's rate.

        Returns the reason why the scheduler cannot follow the run, to be shown as a warning, or "".
        """
        kind = str(getattr(self._args.lr_scheduler_type, "value", self._args.lr_scheduler_type))
        if not isinstance(scheduler, LambdaLR):
            return OWN_STEPS.format(why=f"{type(scheduler).__name__} has no curve")
        if not all(_is_of_transformers(curve) for curve in scheduler.lr_lambdas):
            return OWN_STEPS.format(why="its scheduler is the script's own")
        if kind in CURVES and self._target:
            self._curve = _read_curve(kind, self._args)
            curves: list[Callable[[int], float]] = [self._rate_at for _ in scheduler.lr_lambdas]
        else:
            curves = [partial(self._slow_down, curve) for curve in scheduler.lr_lambdas]
        scheduler.lr_lambdas = [_as_function(curve) for curve in curves]  # schedulers save objects, not functions
        rates = [base * curve(scheduler.last_epoch) for base, curve in zip(scheduler.base_lrs, curves, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else group["lr"].fill_(rate)
        scheduler._last_lr = rates  # what the Trainer logs for this step
        if not self._target:
            return NO_TARGET.replace("schedule()", "the Trainer's learning rate")
        return "" if kind in CURVES else OWN_STEPS.format(why=f"{kind} counts steps")

    def _rate_at(self, step: int) -> float:
        return min(self._warmup_at(step), self._outer.lr_scale) * self._curve(self.share)

    def _slow_down(self, curve: Callable[[int], float], step: int) -> float:
        return curve(step) * self._outer.lr_scale

    def _warmup_at(self, step: int) -> float:
        """Return the warm-up factor: as in the Trainer, 0 at the first step if there is a warm-up."""
        steps = float(self._args.warmup_steps)
        if steps >= 1:
            return min(1.0, step / steps)
        share = steps or float(getattr(self._args, "warmup_ratio", 0.0) or 0.0)  # transformers below 5 has this key
        return min(1.0, self.share / share) if share else 1.0


def _read_curve(kind: str, args: TrainingArguments) -> Callable[[float], float]:
    """Return the Trainer's curve, without its warm-up, as a function of the share of the run."""
    none = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)  # some curves read the optimizer's rate
    kwargs: Any = args.lr_scheduler_kwargs or None
    made = get_scheduler(
        kind, none, num_warmup_steps=0, num_training_steps=CURVE_STEPS, scheduler_specific_kwargs=kwargs
    )
    (curve,) = made.lr_lambdas
    return lambda share: curve(round(share * CURVE_STEPS))


def _is_of_transformers(curve: Any) -> bool:
    return str(getattr(getattr(curve, "func", curve), "__module__", "")).startswith("transformers.")


def _as_function(curve: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: curve(step)


# ---- trainer data ----------------------------------------------------------------------------------------------------
# Every cluster gives its Trainer the same `train_dataset`; its rows are dealt into `shared.data.ranges` ranges, and the
# Trainer reads the rows of the ranges leased to the outer loop. A range counts as trained after its last optimizer
# step.


NO_LIMIT = 1_000_000_000  # max_steps of a Trainer whose training ends with the run


class RangeTaker(Protocol):
    """The attributes of OuterCallback that this module uses."""

    config: str | os.PathLike[str] | None
    outer: OuterLoop | None
    loader: LeasedLoader | None
    resumed_feed: dict[str, int]


def lease_ranges(trainer: Trainer, callback: RangeTaker, seed: int = 0) -> None:
    """Make the Trainer train on the ranges that `callback` leases; has no effect if the run has no data ranges.

    seed  decides which rows form a range; must be the same in all clusters

    Call it before `train`. The Trainer's collator and number of workers are kept; its sampler is not used.
    """
    make_loader = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        ranges = find_config(callback.config).shared.data.ranges
        if not ranges:
            return make_loader()
        layout = getattr(trainer.accelerator, "parallelism_config", None)
        if (together := getattr(layout, "non_data_parallel_size", 1)) > 1:
            raise ConfigError(
                f"lease_ranges: expected ranks with rows of their own (DDP, FSDP2), got {together} ranks that compute "
                "one batch together (tensor, context or sequence parallelism): each would read other rows"
            )
        trainer.args.ignore_data_skip = True  # the outer state holds the position
        if trainer.args.max_steps <= 0:
            trainer.args.max_steps = NO_LIMIT  # the number of ranges that this cluster will lease is unknown
        callback.loader = LeasedLoader(trainer, callback, make_loader(), ranges, seed)
        return callback.loader

    trainer.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]


class LeasedLoader:
    """One rank's micro-batches, in the order of the leased ranges; stops the Trainer when there are no more ranges."""

    def __init__(self, trainer: Trainer, callback: RangeTaker, plain: DataLoader[Any], ranges: int, seed: int) -> None:
        """Wrap `plain`, the Trainer's own loader. Raises ConfigError if its rows are not numbered or its ranges too
        small.
        """
        self._trainer, self._callback, args = trainer, callback, trainer.args
        if not hasattr(plain.dataset, "__len__"):
            raise ConfigError("train_dataset: expected rows with numbers (__len__, __getitem__), to deal into ranges")
        rows, size = len(plain.dataset), args.train_batch_size * args.gradient_accumulation_steps
        if rows // ranges < size * args.world_size:
            raise ConfigError(
                f"train_dataset: {rows} rows in shared.data.ranges {ranges} are fewer than one optimizer step takes, "
                f"{size * args.world_size}: make fewer ranges"
            )
        batches = RowBatches(
            _Examples(plain.dataset), ranges, size, seed, rank=args.process_index, world=args.world_size
        )
        self._loader = DataLoader(
            RangeDataset(batches),
            batch_size=None,
            collate_fn=CollateStep(plain.collate_fn, args.gradient_accumulation_steps),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
        )
        self._feed: Feed | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, for a checkpoint."""
        return self._feed.state_dict() if self._feed is not None else {}

    def __iter__(self) -> Iterator[Any]:
        assert self._callback.outer is not None, "the Trainer begins before it reads"
        if self._feed is None:  # else the Trainer begins another epoch: a callback may end one
            self._feed = Feed(self._callback.outer, self._loader)
            if self._callback.resumed_feed:
                self._feed.load_state_dict(self._callback.resumed_feed)
        for micro_batches in self._feed:
            yield from micro_batches
        self._trainer.control.should_training_stop = True


class _Examples:
    """A data set that returns lists of rows by their numbers, as a collator expects them."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, numbers: Sequence[int]) -> list[Any]:
        return [self._table[number] for number in numbers]


class CollateStep:
    """Splits the rows of an optimizer step into the number of micro-batches that the Trainer expects."""

    def __init__(self, collate: Callable[[list[Any]], Any], count: int) -> None:
        self._collate, self._count = collate, count

    def __call__(self, rows: list[Any]) -> list[Any]:
        """Return micro-batches of nearly equal size; if the last step has too few rows, some rows are repeated."""
        enough = [rows[i % len(rows)] for i in range(max(len(rows), self._count))]
        ends = [len(enough) * i // self._count for i in range(self._count + 1)]
        return [self._collate(enough[a:b]) for a, b in pairwise(ends)]
