"""Reports of outer steps to the training script: numbers for its own TensorBoard or W&B, and a call on every new
version.

Each rank has its own log: usually rank 0 logs and all ranks evaluate. It reports between inner steps, after the outer
step is over on this rank. A logger that fails is removed with a warning, and training goes on. An error in a function
of `on_version` ends the job, since other ranks may wait for this one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from dips.client.ipc.messages import PushResult
from dips.client.rank.steps import finite_or_none
from dips.ids import VersionId

PREFIX = "dips/"  # of all names that are written
Numbers = Mapping[str, float]
WriteNumbers = Callable[[Numbers, int], object]
OnVersion = Callable[[VersionId], Numbers | None]
OUTCOMES = ("accepted", "gated", "skipped", "dropped")  # outcomes that are counted


def writer_of(target: Any) -> WriteNumbers:
    """Return the function that writes numbers to a SummaryWriter, a W&B run or a function. Raises TypeError for
    anything else.

    W&B gets the step as a number: its own step counts the script's logs and cannot go back.
    """
    if callable(scalar := getattr(target, "add_scalar", None)):
        return lambda numbers, step: [scalar(name, x, step) for name, x in numbers.items()]
    if callable(log := getattr(target, "log", None)):
        return lambda numbers, step: log({**numbers, f"{PREFIX}inner_steps": step})
    if callable(target):
        write: WriteNumbers = target
        return write
    raise TypeError(f"log_to: expected a SummaryWriter, a run of W&B or a function of (numbers, step), got {target!r}")


class OuterLog:
    """One rank's writers and functions, and the numbers not yet reported to them."""

    def __init__(self) -> None:
        self._writers: list[WriteNumbers] = []
        self._functions: list[OnVersion] = []
        self._loss, self._losses, self._tokens = 0.0, 0, 0  # since the last report
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._result: PushResult | None = None
        self._version: VersionId | None = None

    @property
    def accepted(self) -> int:
        """Pushes that were accepted since `begin`."""
        return self._counts["accepted"]

    def begin(self, version: VersionId, result: PushResult | None) -> None:
        """Set the version and result known before training begins; they are not reported."""
        self._version, self._result = version, result

    def add_writer(self, target: Any) -> None:
        self._writers.append(writer_of(target))

    def add_function(self, function: OnVersion) -> None:
        self._functions.append(function)

    def count_step(self, tokens: int, loss: Any) -> None:
        """Count one inner step; its loss is read only if there is a writer."""
        if not self._writers:
            return
        self.count_tokens(tokens)
        value = finite_or_none(loss)
        if value is not None:
            self._loss, self._losses = self._loss + value, self._losses + 1

    def count_tokens(self, tokens: int) -> None:
        """Add tokens of steps that were counted before their tokens were known."""
        self._tokens += tokens

    def wants_model(self, version: VersionId) -> bool:
        """Return whether a function is about to be called that needs the whole version in the model."""
        return bool(self._functions) and version != self._version

    def tell_news(self, version: VersionId, result: PushResult | None, progress: float, step: int) -> None:
        """Report a new outcome or a newly installed version, if there is one."""
        is_new_version, is_new_result = version != self._version, result != self._result
        if not is_new_version and not is_new_result:
            return
        self._version, self._result = version, result
        if is_new_result and result is not None and result.kind in self._counts:
            self._counts[result.kind] += 1
        if self._writers:
            self._write_numbers(self._gather(version, progress), step)
        if is_new_version:
            for function in self._functions:
                said = function(version)
                self._write_numbers({f"{PREFIX}{name}": float(x) for name, x in (said or {}).items()}, step)

    def _gather(self, version: VersionId, progress: float) -> dict[str, float]:
        numbers = {"version": float(version.version), "progress": progress, "tokens": float(self._tokens)}
        numbers |= {name: float(count) for name, count in self._counts.items()}
        if self._losses:
            numbers["loss"] = self._loss / self._losses
        self._loss, self._losses, self._tokens = 0.0, 0, 0
        return {f"{PREFIX}{name}": x for name, x in numbers.items() if math.isfinite(x)}

    def _write_numbers(self, numbers: Numbers, step: int) -> None:
        for write in list(self._writers) if numbers else ():
            try:
                write(numbers, step)
            except Exception as error:  # noqa: BLE001 (whatever a logger raises, training goes on)
                self._writers.remove(write)
                warnings.warn(f"log_to: {error!r}: nothing more is written there", stacklevel=2)
