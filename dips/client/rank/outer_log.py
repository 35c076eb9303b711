"""What a training script hears of outer steps: numbers for its own TensorBoard or W&B, and a call on every new version.

Each rank has its own: usually rank 0 logs and all ranks evaluate. It speaks between inner steps, after the outer step
is over on this rank. A logger that fails is left out with a warning: training does not end by it. What a function of
`on_version` raises does end the job, since other ranks may wait for this one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from dips.client.ipc.messages import PushResult
from dips.client.rank.losses import finite_or_none
from dips.ids import VersionId

PREFIX = "dips/"  # of all names, beside those of the script's own
Numbers = Mapping[str, float]
WriteNumbers = Callable[[Numbers, int], object]
OnVersion = Callable[[VersionId], Numbers | None]
OUTCOMES = ("accepted", "gated", "skipped", "dropped")  # counted from the first on


def writer_of(target: Any) -> WriteNumbers:
    """How numbers are written to a SummaryWriter, a run of W&B or a function of (numbers, step); TypeError if to none.

    W&B gets its step as a number: its own counts what the script logs, and goes back for nobody.
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
    """One rank's listeners, and what they have not been told."""

    def __init__(self) -> None:
        self._writers: list[WriteNumbers] = []
        self._functions: list[OnVersion] = []
        self._loss, self._losses, self._tokens = 0.0, 0, 0  # since they were last told
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._result: PushResult | None = None
        self._version: VersionId | None = None

    def begin(self, version: VersionId, result: PushResult | None) -> None:
        """What is known before training begins is no news."""
        self._version, self._result = version, result

    def add_writer(self, target: Any) -> None:
        self._writers.append(writer_of(target))

    def add_function(self, function: OnVersion) -> None:
        self._functions.append(function)

    def count_step(self, tokens: int, loss: Any) -> None:
        """One inner step is done; its loss is read only if somebody is told."""
        if not self._writers:
            return
        self.count_tokens(tokens)
        value = finite_or_none(loss)
        if value is not None:
            self._loss, self._losses = self._loss + value, self._losses + 1

    def count_tokens(self, tokens: int) -> None:
        """Tokens of steps that were counted, which were not known then."""
        self._tokens += tokens

    def wants_model(self, version: VersionId) -> bool:
        """Whether a function is about to be called, which needs the whole version in the model."""
        return bool(self._functions) and version != self._version

    def tell_news(self, version: VersionId, result: PushResult | None, progress: float, step: int) -> None:
        """Tell of an outcome, or of a version that was installed; nothing if there is none."""
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
