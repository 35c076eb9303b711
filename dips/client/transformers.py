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
* The learning rate follows `lr_scheduler_type` over the run's tokens, not over max_steps (trainer_rate.py).
* Checkpoints hold the outer loop's state; `train(resume_from_checkpoint=…)` goes on from it (trainer_checkpoint.py).

Load the model in float32 (`dtype=torch.float32`; the default "auto" may give bfloat16) and train it with `bf16=True`.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dips.client.rank.joining import find_config, is_alone
from dips.client.rank.outer_loop import OuterLoop
from dips.client.trainer_checkpoint import (
    MISSING,
    HeldParameters,
    checkpoint_path,
    read_outer_state,
    write_outer_state,
)
from dips.client.trainer_data import NO_LIMIT, LeasedLoader, lease_ranges
from dips.client.trainer_rate import RunRate
from dips.errors import ConfigError

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
        if self.outer is None or self._rate is None:
            return
        if self._rate.pending and not self.outer.finished and not args.load_best_model_at_end:
            self.outer.push()  # the best model would be an older one
        self.outer.close()
        self.outer = self._rate = self.loader = None

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop training if the run ended when it leased its last data range, after the last step."""
        if self.outer is not None:
            self._end_with_run(args, control)

    def _resume(self, outer: OuterLoop, held: HeldParameters, args: TrainingArguments, state: TrainerState) -> None:
        """Resume from the checkpoint that the Trainer has loaded and that OuterLoop's pull has overwritten."""
        path = checkpoint_path(args, state)
        found = read_outer_state(path)
        if found is None:
            self._tell(outer, [MISSING.format(path=path)])
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
        assert self.outer is not None
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
