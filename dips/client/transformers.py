"""The outer loop for Hugging Face's Trainer: two lines in a training script.

    from dips.client.transformers import OuterCallback                          # 1
    args = TrainingArguments(…, include_num_input_tokens_seen=True)
    Trainer(model=model, args=args, …, callbacks=[OuterCallback()]).train()      # 2

Start it under the agent, with torchrun or `accelerate launch`: `dips-client --config cluster.yaml -- torchrun …`. The
Trainer counts the tokens, over all ranks; the run ends when the outer loop's does (`shared.stop`), or at max_steps,
whichever comes first. Models as the adapters know them: plain, DDP, FSDP2 (accelerate's `fsdp_version: 2`), PEFT's
adapters alone, since only parameters with requires_grad are shared.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dips.client.rank.outer_loop import OuterLoop
from dips.errors import ConfigError


class OuterCallback(TrainerCallback):
    """Joins when training begins, takes part after each optimizer step, leaves when training ends."""

    def __init__(self, config: str | os.PathLike[str] | None = None) -> None:
        """`config`: the cluster file; None: the one that the agent was started with."""
        self._config = config
        self._tokens = 0  # of those that the Trainer has seen, counted here
        self._loss: float | None = None  # as the Trainer last logged it, until it is passed on
        self.outer: OuterLoop | None = None  # while training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Join the run and pull its newest version.

        Raise ConfigError if the Trainer does not count tokens, or does not know of the job's other ranks.
        """
        if args.include_num_input_tokens_seen in ("no", False):
            raise ConfigError("the Trainer must count tokens: TrainingArguments(include_num_input_tokens_seen=True)")
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if args.world_size != ranks:
            raise ConfigError(
                f"the job has {ranks} ranks, the Trainer trains on {args.world_size} of them, each for itself: "
                "on CPUs it wants TrainingArguments(use_cpu=True)"
            )
        self._tokens, self._loss = state.num_input_tokens_seen, None
        self.outer = OuterLoop(model, self._config)
        self._end_with_the_run(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step, on all ranks together; every H-th is followed by an outer step."""
        assert self.outer is not None, "the Trainer begins before it steps"
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        loss, self._loss = self._loss, None
        self.outer.step(tokens=int(tokens), loss=loss)
        self._end_with_the_run(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Keep the training loss: a mean over the Trainer's logging_steps."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave."""
        if self.outer is not None:
            self.outer.close()
            self.outer = None

    def _end_with_the_run(self, control: TrainerControl) -> None:
        assert self.outer is not None
        control.should_training_stop = control.should_training_stop or self.outer.finished
