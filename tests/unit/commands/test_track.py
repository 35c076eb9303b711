"""`master.track`: what ends in the ledger is shown by TensorBoard and W&B, once, by processes that hold nobody up."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dips.commands import track_process
from dips.commands.track_process import Follower, TensorBoardSink, TrackPosition, WandbSink
from dips.config import TrackSection, load_run
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.master.genesis import ledger_path
from dips.master.hooks import TRACKER_LOG_BYTES, TrackProcesses
from dips.master.ledger import Ledger
from dips.master.runtime import MasterOutside
from dips.protocol.records import RoundReserved
from dips.protocol.view import RunView, TrackView
from dips.telemetry import logs
from tests.unit.commands.test_plot import V3, committed, run_with_a_story  # noqa: F401 (a fixture)

SHOWN_S = 60.0  # until a process has written what it found


class ListSink:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, dict[str, float]]] = []
        self.flushed = 0

    def write_point(self, step: int, wall: float, numbers: Mapping[str, float]) -> None:
        self.points.append((step, wall, dict(numbers)))

    def flush(self) -> None:
        self.flushed = len(self.points)

    def close(self) -> None:
        """Nothing is open."""


def follow(run_file: Path, position: TrackPosition) -> list[tuple[int, float, dict[str, float]]]:
    with closing(Ledger.open(ledger_path(load_run(run_file)), readonly=True)) as ledger:
        follower = Follower(ledger, sink := ListSink(), position)
        follower.write_new()
        assert follower.write_new() == 0 and sink.flushed == len(sink.points)
    return sink.points


def test_every_round_that_ended_is_written_once(run_file: Path) -> None:
    """Losses, gates and tokens of the lineage, then what versions' processes said; the next process goes on behind."""
    points = follow(run_file, position := TrackPosition())
    assert [(step, wall) for step, wall, _ in points] == [
        (1, 1060.5),
        (2, 1075.0),
        (3, 1090.0),
        (4, 1120.0),
        (4, 1130.0),
    ]
    first, skipped, undone, last, result = (numbers for *_, numbers in points)
    assert (first["loss/a"], first["run/tokens"]) == (1 / 3, 400.0) and first["loss/run"] == pytest.approx(1 / 3)
    assert "loss/b" not in first and (first["gated/a"], first["gated/c"], first["score/c"]) == (0.0, 1.0, 8.0)
    assert skipped["round/skipped"] == 1.0 and "norm/a" not in skipped
    assert undone["run/tokens"] == 450.0 and last["run/tokens"] == 800.0  # of the lineage, not of what was rolled back
    assert last["loss/run"] == (100 * 0.25 + 300 * 0.125) / 400
    assert result == {"on_version/validation_loss": 0.2, "on_version/accuracy": 0.75}
    assert position == TrackPosition(4, 4) and follow(run_file, position) == []
    with closing(Ledger.open(ledger_path(load_run(run_file)))) as ledger:
        ledger.write_records([committed(VersionId(3, 5), V3, ("a", 10, 0.1)), RoundReserved(6, 0.0)], 1150.0)
    assert [(step, numbers["run/tokens"]) for step, _, numbers in follow(run_file, position)] == [(5, 810.0)]


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    """Real event files: TensorBoard's own reader finds each number at its round and time."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.write_point(7, 1000.5, {"loss/run": 0.5, "run/tokens": 800.0})
    sink.flush()
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(e.step, e.wall_time, e.value) for e in found.Scalars("loss/run")] == [(7, 1000.5, 0.5)]
    sink.write_point(8, 1001.5, {"loss/run": 0.25})
    sink.close()
    found.Reload()
    assert [(e.step, e.wall_time, e.value) for e in found.Scalars("loss/run")][1:] == [(8, 1001.5, 0.25)]


def test_a_tracker_goes_on_where_the_one_before_ended(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position is kept; that of a run that was thrown away is not. What ended while it slept is written, too."""
    sink, ended, config = ListSink(), threading.Event(), load_run(run_file)
    monkeypatch.setattr(track_process, "_make_sink", lambda *_: sink)
    (config.master.directory / "track").mkdir()
    ended.set()
    newest = '{"round": 5, "result": 4}'  # as where no round is open
    for position, written in (("", 5), (None, 5), (newest, 5), ('{"round": 900, "result": 900}', 10)):
        if position is not None:
            (config.master.directory / "track" / "wandb.json").write_text(position)
        track_process.follow_run(config, "wandb", ended)
        assert len(sink.points) == written


def test_a_tracker_that_the_run_file_lacks(run_file: Path) -> None:
    """It was taken out while the master ran."""
    content = yaml.safe_load(run_file.read_text())
    content["master"]["track"] = {"wandb": "project"}
    run_file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"master\.track\.tensorboard: this run file does not have it any more"):
        track_process.follow_run(load_run(run_file), "tensorboard", threading.Event())


@pytest.mark.slow  # wandb starts a service of its own
def test_wandb_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, as a machine without a way out has it: a run lies in the directory."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink("project", "my-run", tmp_path)
    sink.write_point(7, 1000.5, {"loss/run": 0.5})
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*dips-my-run/*.wandb"))


def test_wandb_shows_all_numbers_by_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of versions come later than their rounds, and W&B's own steps only grow; what is called is recorded."""
    called: list[object] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric=None: called.append((name, step_metric)),
        log=called.append,
        finish=lambda: called.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    sink = WandbSink("project", "my-run", tmp_path)
    sink.write_point(7, 1000.5, {"loss/run": 0.5})
    sink.close()
    assert called == [("round", None), ("*", "round"), {"loss/run": 0.5, "round": 7, "unix_seconds": 1000.5}, "finish"]


async def test_a_process_follows_the_ledger(run_file: Path, tmp_path: Path) -> None:
    """The master's process writes the event files beside it, knows how far it came, and ends with its master."""
    pytest.importorskip("tensorboard")
    content = yaml.safe_load(run_file.read_text())
    content["master"]["track"] = {"tensorboard": "board"}
    run_file.write_text(yaml.safe_dump(content))
    track = TrackProcesses(
        run_file, TrackSection(tensorboard=tmp_path / "board"), tmp_path / "m", logs.configure_log("master", "r")
    )
    position = tmp_path / "m" / "track" / "tensorboard.json"
    position.parent.mkdir()
    position.write_text('{"round": 900, "result": 900}')  # of a run that was thrown away
    track.start(pytest.fail)
    async with asyncio.timeout(SHOWN_S):
        while "900" in position.read_text():
            assert track.view() == TrackView(("tensorboard",))
            await asyncio.sleep(0.02)
    assert json.loads(position.read_text()) == {"round": 4, "result": 4}
    with closing(Ledger.open(ledger_path(load_run(run_file)))) as ledger:
        ledger.write_records([committed(VersionId(3, 5), V3, ("a", 10, 0.1)), RoundReserved(6, 0.0)], 1150.0)
    await track.stop()
    assert json.loads(position.read_text()) == {"round": 5, "result": 4}, "it has time to write its last numbers"
    assert [path.name for path in (tmp_path / "board").iterdir() if path.name.startswith("events.out.")]


async def test_what_is_not_installed_is_red(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master goes on; its status says what is to be installed. A log that is full begins anew with each try."""
    (tmp_path / "none" / "wandb").mkdir(parents=True)
    (tmp_path / "none" / "wandb" / "__init__.py").write_text("raise ImportError('no wandb here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'none'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    content = yaml.safe_load(run_file.read_text())
    content["master"]["track"] = {"wandb": "project"}
    run_file.write_text(yaml.safe_dump(content))
    config = load_run(run_file)
    tracker_log = config.master.directory / "track" / "wandb.log"
    tracker_log.parent.mkdir(parents=True)
    tracker_log.write_bytes(b"\n" * (TRACKER_LOG_BYTES + 1))
    with closing(Ledger.open(ledger_path(config))) as ledger:
        outside = MasterOutside(ledger)
        outside.begin_processes(config, run_file, logs.configure_log("master", "r"), pytest.fail)
        async with asyncio.timeout(SHOWN_S):
            while not (track := outside.complete_view(RunView()).track) or not track.red:
                await asyncio.sleep(0.02)
        await outside.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    reason = track.reason
    assert "wandb: exit code 78" in reason and "pip install wandb" in reason
    assert tracker_log.stat().st_size < TRACKER_LOG_BYTES


def test_track_names_a_place(run_file: Path) -> None:
    """An empty section says nothing; a directory is relative to the file."""
    content = yaml.safe_load(run_file.read_text())
    for track in ({}, {"wandb": ""}):
        run_file.write_text(yaml.safe_dump(content | {"master": content["master"] | {"track": track}}))
        with pytest.raises(ConfigError, match="expected tensorboard: DIRECTORY or wandb: PROJECT"):
            load_run(run_file)
    content["master"]["track"] = {"tensorboard": "board"}
    run_file.write_text(yaml.safe_dump(content))
    section = load_run(run_file).master.track
    assert section is not None and section.tensorboard == run_file.parent / "board"
