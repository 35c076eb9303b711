"""Destinations of a tracker's numbers: TensorBoard's event files, or a run of Weights & Biases. Di-PS needs neither.

Both are written a step at a time, the step being the round; numbers have reached their reader after `flush`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dips.errors import ConfigError


class TrackSink(Protocol):
    """One destination."""

    def write_point(self, step: int, wall: float, numbers: Mapping[str, float]) -> None:
        """Write numbers by name; `wall` is Unix seconds."""

    def flush(self) -> None:
        """Return when the numbers have left this process's buffers."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardSink:
    """Event files in a directory, written by TensorBoard's own writer, which needs no torch and no TensorFlow."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(f"master.track.tensorboard: {error}: pip install 'di-ps[track]'") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(directory))

    def write_point(self, step: int, wall: float, numbers: Mapping[str, float]) -> None:
        value = self._summary.Value
        summary = self._summary(value=[value(tag=name, simple_value=x) for name, x in numbers.items()])
        self._writer.add_event(self._event(wall_time=wall, step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One run of W&B for the whole run of Di-PS, resumed by its id; WANDB_MODE=offline keeps it on this disk."""

    def __init__(self, project: str, run: str, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"master.track.wandb: {error}: pip install wandb") from error
        self._run: Any = wandb.init(
            project=project, id=f"dips-{run}", name=run, resume="allow", dir=str(directory), job_type="dips-master"
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")  # results of versions come later than their rounds

    def write_point(self, step: int, wall: float, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "round": step, "unix_seconds": wall})

    def flush(self) -> None:
        """Do nothing: W&B's own process has the numbers already."""

    def close(self) -> None:
        self._run.finish()
