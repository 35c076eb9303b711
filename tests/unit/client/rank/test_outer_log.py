"""`outer.log_to` and `outer.on_version`: a script's own board and its evaluation, told once of each outer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dips.client.ipc.messages import PushResult
from dips.client.rank.outer_log import OuterLog
from dips.ids import VersionId

V1, V2 = VersionId(1, 1), VersionId(2, 3)


def accepted(seq: int, kind: str = "accepted") -> PushResult:
    return PushResult(1, seq, kind, "")


def make_log(target: Any) -> OuterLog:
    log = OuterLog()
    log.begin(V1, accepted(1))
    log.add_writer(target)
    return log


def test_each_outcome_and_version_is_written_once() -> None:
    """The mean loss since the last, and what came of pushes; the same news again are none."""
    told: list[tuple[dict[str, float], int]] = []
    log = make_log(lambda numbers, step: told.append((dict(numbers), step)))
    log.tell_news(V1, accepted(1), 0.0, 0)
    assert told == []
    for loss in (2.0, torch.tensor(1.0), float("nan"), None):
        log.count_step(8, loss)
    log.tell_news(V1, accepted(2, "skipped"), 0.25, 4)
    log.tell_news(V1, accepted(2, "skipped"), 0.25, 5)
    log.tell_news(V2, accepted(3), 0.5, 8)
    common = {"dips/accepted": 0.0, "dips/gated": 0.0, "dips/skipped": 1.0, "dips/dropped": 0.0}
    first = {"dips/version": 1.0, "dips/progress": 0.25, "dips/tokens": 32.0, "dips/loss": 1.5, **common}
    assert told[0] == (first, 4) and len(told) == 2
    assert told[1][0]["dips/version"] == 2.0 and told[1][0]["dips/accepted"] == 1.0 and "dips/loss" not in told[1][0]


def test_a_function_hears_of_every_new_version() -> None:
    """Not of an outcome alone; its numbers go where the others do, and what it raises ends the job."""
    told: list[dict[str, float]] = []
    log = make_log(lambda numbers, _: told.append(dict(numbers)))
    heard: list[VersionId] = []

    def evaluate(version: VersionId) -> dict[str, float]:
        heard.append(version)
        return {"validation_loss": 3.0}

    log.add_function(evaluate)
    assert not log.wants_model(V1) and log.wants_model(V2)
    log.tell_news(V1, accepted(2, "gated"), 0.0, 1)
    log.tell_news(V2, accepted(3), 0.0, 2)
    assert heard == [V2] and told[-1] == {"dips/validation_loss": 3.0} and len(told) == 3
    log.add_function(lambda version: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        log.tell_news(VersionId(3, 4), accepted(4), 0.0, 3)


def test_a_logger_that_fails_is_left_out() -> None:
    """A full disk under TensorBoard must not cost the job; the others go on."""

    def fail(numbers: Any, step: int) -> None:
        raise OSError("no space left on device")

    told: list[int] = []
    log = make_log(fail)
    log.add_writer(lambda numbers, step: told.append(step))
    with pytest.warns(UserWarning, match="no space left"):
        log.tell_news(V2, accepted(2), 0.0, 1)
    log.tell_news(V2, accepted(3), 0.0, 2)
    assert told == [1, 2]


def test_a_run_of_wandb_and_what_is_neither() -> None:
    """W&B's run has `log`; its own step is left alone. Anything else is refused by name."""

    class Run:
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def log(self, numbers: dict[str, float]) -> None:
            self.logged.append(numbers)

    log = make_log(run := Run())
    log.tell_news(V2, accepted(2), 0.0, 7)
    assert run.logged[0]["dips/inner_steps"] == 7 and run.logged[0]["dips/version"] == 2.0
    with pytest.raises(TypeError, match="expected a SummaryWriter, a run of W&B or a function"):
        log.add_writer("runs/")


def test_a_real_summary_writer(tmp_path: Path) -> None:
    """torch's own, read by TensorBoard's own reader."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        log = make_log(writer)
        log.count_step(8, 2.5)
        log.tell_news(V2, accepted(2), 0.5, 7)
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("dips/loss")] == [(7, 2.5)]
