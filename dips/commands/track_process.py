"""The tracker process of `master.track`, `python -m dips.commands.track_process RUN_FILE KIND`, and its sinks."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dips.config import RunFile, load_run
from dips.errors import ConfigError
from dips.files import write_aside
from dips.master.genesis import ledger_path
from dips.master.ledger import Ledger
from dips.telemetry import exits
from dips.view.points import PointMaker, name_numbers, name_results

# ---- track sinks ----------------------------------------------------------------------------------------------------
# Destinations of a tracker's numbers: TensorBoard's event files, or a run of Weights & Biases. Di-PS needs neither.
#
# Both are written a step at a time, the step being the round; numbers have reached their reader after `flush`.


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


# ---- track process --------------------------------------------------------------------------------------------------
# The tracker process of `master.track`: `python -m dips.commands.track_process RUN_FILE tensorboard|wandb`.
#
# The process reads the ledger through SQLite's WAL, so that no writer waits for it, and writes the rounds that have
# ended since its last read. Its position is stored in `track/`, where the next process continues; after a kill the last
# rounds may be written twice. The process ends with its master.


LOOK_EVERY_S = 2.0  # pause between two reads
PAGE = 256  # rounds per read


@dataclass
class TrackPosition:
    """The last round, and the last round with a result, that are written."""

    round: int = 0
    result: int = 0


class Follower:
    """Writes the ledger's rounds to a tracker's sink."""

    def __init__(self, ledger: Ledger, sink: TrackSink, position: TrackPosition) -> None:
        self._ledger, self._sink, self.position = ledger, sink, position
        self._maker = PointMaker()
        self._read = 0  # rounds that it has seen: a new process counts tokens from the first on

    def write_new(self) -> int:
        """Write all that has ended since the last call; return the number of points."""
        written = self._write_rounds() + self._write_results()
        if written:
            self._sink.flush()
        return written

    def _write_rounds(self) -> int:
        written = 0
        while rounds := self._ledger.read_rounds_after(self._read, PAGE):
            for r in rounds:
                if r.ended is None and r is rounds[-1]:
                    return written  # it is open: the next look finds its end, or a later round
                self._read = r.round
                point = self._maker.make_point(r)
                if point is not None and r.round > self.position.round:
                    written += self._write_numbers(r.round, point.wall, name_numbers(point))
                self.position.round = max(self.position.round, r.round)
        return written

    def _write_results(self) -> int:
        written = 0
        while rounds := self._ledger.read_rounds_after(self.position.result, PAGE, with_result=True):
            for r in rounds:
                written += self._write_numbers(r.round, r.result.wall if r.result else 0.0, name_results(r))
                self.position.result = r.round
        return written

    def _write_numbers(self, number: int, wall: float, numbers: Mapping[str, float]) -> int:
        if numbers:
            self._sink.write_point(number, wall, numbers)
        return int(bool(numbers))


def main(argv: list[str]) -> None:
    """Follow the ledger until SIGTERM, which the kernel sends when the master dies."""
    run_file, kind = argv[1:]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    exits.run_command(lambda: follow_run(load_run(Path(run_file)), kind, ended))


def follow_run(config: RunFile, kind: str, ended: threading.Event) -> None:
    """Write new rounds into a sink of this kind until `ended` is set."""
    directory, last = config.master.directory / "track", False
    path = directory / f"{kind}.json"
    position = _read_position(path)
    with (
        closing(Ledger.open(ledger_path(config), readonly=True)) as ledger,
        closing(_make_sink(config, kind, directory)) as sink,
    ):
        newest = ledger.read_history(1)
        if position.round > (newest[-1].round if newest else 0):
            position = TrackPosition()  # the old position was of a run deleted by `dips init --force`
        follower = Follower(ledger, sink, position)
        while True:
            if follower.write_new():
                with write_aside(path) as aside:
                    aside.write_text(json.dumps(asdict(position)))
            if last:
                return
            last = ended.wait(LOOK_EVERY_S)


def _read_position(path: Path) -> TrackPosition:
    """Return the position of the last process; the beginning if there was none, or its file is damaged."""
    try:
        told = json.loads(path.read_text())
        return TrackPosition(int(told["round"]), int(told["result"]))
    except (OSError, ValueError, KeyError, TypeError):
        return TrackPosition()


def _make_sink(config: RunFile, kind: str, directory: Path) -> TrackSink:
    match kind, getattr(config.master.track, kind, None):
        case "tensorboard", Path() as events:
            return TensorBoardSink(events)
        case "wandb", str() as project:
            return WandbSink(project, config.shared.run, directory)
    raise ConfigError(f"master.track.{kind}: this run file does not have it any more: start the master again")


if __name__ == "__main__":
    main(sys.argv)
