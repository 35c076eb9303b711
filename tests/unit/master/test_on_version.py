"""`master.on_version`: a process for every n-th version, whose numbers are in the ledger, and who harms nothing."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import yaml
from rich.console import Console

from dips.commands import export_lanes, version_process
from dips.commands.history import draw_rounds, round_as_data
from dips.config import OnVersionSection, RunFile, TrackSection, load_run
from dips.errors import ConfigError, UnavailableMaster
from dips.ids import GENESIS, VersionId
from dips.master import hooks
from dips.master.genesis import ledger_path, make_run
from dips.master.hooks import TrackProcesses, VersionProcesses, read_numbers
from dips.master.ledger import Ledger
from dips.master.runtime import MasterOutside
from dips.outer_step import nesterov_step
from dips.protocol.manifest import Manifest
from dips.protocol.records import (
    Record,
    RolledBack,
    RoundReserved,
    ScoreHistory,
    VersionCommitted,
    VersionDurable,
    VersionResult,
    VersionsRetired,
)
from dips.protocol.view import RunView, VersionProcessView
from dips.store.files import write_version
from dips.telemetry import logs
from tests.forkserver.fixtures import end_of_servers, forked_commands, real_commands  # noqa: F401  forks
from tests.run_files import write_run_file
from tests.waiting import eventually, is_alive, until

RESULT_S = 30.0  # a process that hangs must have been killed before

MODULE = """
import os, pathlib, subprocess, sys, time
from safetensors.numpy import load_file

def evaluate(model, version):
    w = load_file(model)["w"]
    print("so many lines")
    return {"loss": float(w.sum()), "bad": float("nan"), "steps": 3}

def fail(model, version):
    raise RuntimeError("no such benchmark")

def hang(model, version):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {child.pid}")
    os.rename("pids.tmp", "pids")
    time.sleep(600)
"""


CHATTY = "yes | head -c 1000; while test $(stat -L -c %s {log}) -gt 100; do sleep 0.01; done; echo '{{\"a\": 1}}'"


def call(function: str) -> list[str]:
    """A command that calls this function of MODULE, and prints the numbers that it returns."""
    begin = "import json, os, pathlib, module_of_on_version as module; path = pathlib.Path(os.environ['DIPS_MODEL'])"
    return [sys.executable, "-c", f"{begin}; print(json.dumps(module.{function}(path, os.environ['DIPS_VERSION'])))"]


class Place:
    """A run in a directory, with versions that its one slave has written down."""

    def __init__(self, directory: Path, **on_version: Any) -> None:
        (directory / "module_of_on_version.py").write_text(textwrap.dedent(MODULE))
        self.file = write_run_file(directory, ["s"], keep_every=2, on_version={"every": 2, **on_version})
        self.directory = directory
        self.config: RunFile = load_run(self.file)
        row = make_run(self.config, {"w": np.ones(3, np.float32)}, force=False, wall=lambda: 0.0)
        self.manifest = Manifest.from_json(row.manifest)
        self.ledger = Ledger.open(ledger_path(self.config))
        self.head, self.written = GENESIS, asyncio.Event()

    def commit(self, durable: bool = True, snapshot: bool = True) -> VersionId:
        """Make the next version, whose θ are its number."""
        version = VersionId(self.head.version + 1, self.head.round + 1)
        row = VersionCommitted(version, self.head, durable, (), (), nesterov_step(1.0, 0.7, 0.8), 1.0, False, (), (),
                               ScoreHistory((), ()), 0.0)  # fmt: skip
        self.ledger.write_records([RoundReserved(version.round, 0.0), row])
        if snapshot:
            path = self.directory / "s" / str(version)
            path.mkdir(parents=True)
            flat = [np.full(3, version.version, np.float32), np.zeros(3, np.float32)]
            write_version(path, ("r", "s", 1), version, self.manifest, [0], flat)
        self.head = version
        return version

    def begin(self) -> VersionProcesses:
        master, section = self.config.master, self.config.master.on_version
        assert section is not None
        log = logs.configure_log("master", "r")
        made = VersionProcesses(self.file, section, master.directory, self.find_due, self.write, log)
        made.start(pytest.fail)
        return made

    async def find_due(self, every: int) -> VersionId | None:
        return self.ledger.find_unprocessed(every)

    async def write(self, records: Sequence[Record]) -> None:
        self.ledger.write_records(records)
        self.written.set()

    async def run_one(self) -> VersionResult:
        """Start the processes, wait for the first result, and stop; return it."""
        processes = self.begin()
        try:
            await asyncio.wait_for(self.written.wait(), RESULT_S)
        finally:
            await processes.stop()
        view = processes.view()
        assert view.running is None and view.red is bool(view.reason)
        (round_,) = [r for r in self.ledger.read_history() if r.result is not None]
        result, version = round_.result, round_.version
        assert result is not None and version is not None and view.version == str(version)
        return VersionResult(version, result.ok, result.reason, tuple(result.numbers.items()), result.seconds)


MakePlace = Callable[..., Place]


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[MakePlace]:
    """Makes a place in the test's directory."""
    made: list[Place] = []

    def make(**on_version: Any) -> Place:
        made.append(Place(tmp_path, **on_version))
        return made[-1]

    yield make
    for place in made:
        place.ledger.close()


async def test_numbers_of_a_version_are_in_the_ledger(make_place: MakePlace) -> None:
    """The function gets the exported model; finite numbers come back, and history and JSON show them."""
    place = make_place(command=call("evaluate"))
    place.commit()
    second = place.commit()
    result = await place.run_one()
    assert (result.version, result.ok, result.numbers) == (second, True, (("loss", 6.0), ("steps", 3.0)))
    shown = round_as_data(place.ledger.read_history()[-1])
    assert shown["result"]["numbers"] == {"loss": 6.0, "steps": 3.0}
    Console(file=(out := io.StringIO()), width=80).print(draw_rounds([shown]))
    assert "on_version: loss 6, steps 3" in out.getvalue()
    assert place.ledger.find_unprocessed(2) is None


async def test_numbers_have_any_names(make_place: MakePlace) -> None:
    """They were fields of a line of the log: one that is called like another of its fields was an error, red in the
    status, and the next version waited for a minute."""
    numbers = {"version": 2.0, "ok": 0.0, "event": 1.0}
    place = make_place(command=["echo", json.dumps(numbers)])
    place.commit()
    place.commit()
    processes = place.begin()
    try:
        await eventually(lambda: processes.view().version, RESULT_S)
    finally:
        await processes.stop()
    assert (processes.view().reason, processes.view().numbers) == ("", numbers)


async def test_a_run_file_behind_a_link_is_read_where_it_is_named(make_place: MakePlace) -> None:
    """As in a ConfigMap, whose next contents lie in a directory of their own: the command began in one that is gone,
    and relative paths were those beside the file that the link had led to."""
    place = make_place(command=["echo", '{"a": 1}'])
    place.commit()
    place.commit()
    for name in ("former", "next"):
        (place.directory / name).mkdir()
        (place.directory / name / "dips.yaml").write_text(place.file.read_text())
    (link := place.directory / "data").symlink_to("former")
    place.file.unlink()
    place.file.symlink_to("data/dips.yaml")
    outside = MasterOutside(place.ledger)
    outside.begin_processes(place.config, place.file, structlog.get_logger(), pytest.fail)
    link.unlink()
    link.symlink_to("next")
    shutil.rmtree(place.directory / "former")
    view = lambda: outside.complete_view(RunView()).on_version  # noqa: E731
    try:
        await eventually(lambda: view().version, RESULT_S)
    finally:
        await outside.close()
    assert (view().reason, view().numbers) == ("", {"a": 1.0})


async def test_a_command_knows_its_version(make_place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside the run file, with the model's file and the version's name in its environment; a log that is full
    begins anew.
    """
    monkeypatch.setattr(hooks, "LOG_BYTES", 40)
    script = 'test -s "$DIPS_MODEL" && test -f dips.yaml && echo "{\\"rounds\\": ${DIPS_VERSION#*@r}}"'
    place = make_place(command=["sh", "-c", script])
    place.commit()
    place.commit()
    log = place.config.master.directory / "on_version" / "output.log"
    log.parent.mkdir()
    log.write_text("of others\n" * 5)
    assert (await place.run_one()).numbers == (("rounds", 2.0),)
    assert log.with_name("output.log.1").read_text() == "of others\n" * 5


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"command": call("fail")}, r"exit code 1: RuntimeError: no such benchmark"),
        ({"command": call("missing")}, r"exit code 1: AttributeError: .*missing"),
        (
            {"command": ["dips-there-is-no-such-command"]},
            r"exit code 127: cannot start 'dips-there-is-no-such-command'",
        ),
    ],
)
async def test_a_failure_is_a_row_with_its_reason(make_place: MakePlace, keys: dict[str, Any], reason: str) -> None:
    """A crash, a missing function or command: shown, and not tried again."""
    place = make_place(**keys)
    place.commit()
    place.commit()
    result = await place.run_one()
    assert not result.ok and result.numbers == ()
    assert re.match(reason, result.reason), result.reason
    assert place.ledger.find_unprocessed(2) is None


def test_what_was_printed_before_is_not_its_own(tmp_path: Path) -> None:
    """The log may end with the numbers of another process, or have been emptied since."""
    log = tmp_path / "output.log"
    log.write_text('{"loss": 1}\n')
    size = log.stat().st_size
    assert [hooks._read_lines(log, begin) for begin in (0, size, size + 1)] == [['{"loss": 1}'], [], ['{"loss": 1}']]


async def test_one_that_takes_too_long_is_killed(make_place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "LONGEST_S", 0.05)
    place = make_place(command=call("hang"))
    place.commit()
    place.commit()
    result = await place.run_one()
    assert (result.ok, result.numbers, result.reason) == (False, (), "not done after 0.05 s: killed")
    assert place.ledger.find_unprocessed(2) is None


async def test_one_that_dies_slowly_has_no_result_before(
    make_place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it may hang in a read for a while; the next one would begin beside it."""
    loop, killed = asyncio.get_running_loop(), list[hooks.Child]()

    def kill_later(child: hooks.Child) -> None:
        killed.append(child)
        loop.call_later(0.1, child.send_signal, signal.SIGKILL)

    monkeypatch.setattr(hooks, "LONGEST_S", 0.05)
    monkeypatch.setattr(hooks.Child, "kill_group", kill_later)
    place = make_place(command=["sleep", "600"])
    living, write = list[bool](), place.write

    async def note_and_write(records: Sequence[Record]) -> None:
        living.append(killed[0].alive)
        await write(records)

    monkeypatch.setattr(place, "write", note_and_write)
    place.commit()
    place.commit()
    assert not (await place.run_one()).ok
    assert living == [False]


async def test_one_that_prints_on_and_on_fills_no_disk(make_place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is cut while it runs, and its last line is read all the same."""
    monkeypatch.setattr(hooks, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(hooks, "LOG_BYTES", 100)
    place = make_place(command=["sh", "-c", CHATTY.format(log="m/on_version/output.log")])
    place.commit()
    place.commit()
    assert (await place.run_one()).numbers == (("a", 1.0),)


async def test_one_whose_log_cannot_be_cut_goes_on(make_place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: it was killed, perhaps after hours, and began anew each minute."""
    monkeypatch.setattr(hooks, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(hooks, "LOG_BYTES", 1)
    place = make_place(command=["sh", "-c", "echo begun; sleep 0.1; echo '{\"a\": 1}'"])
    (place.config.master.directory / "on_version" / "output.log.1").mkdir(parents=True)  # in the copy's place
    place.commit()
    place.commit()
    assert (await place.run_one()).numbers == (("a", 1.0),)


async def test_a_tracker_that_prints_on_and_on_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "TRACKER_LOOKS_S", 0.01)
    monkeypatch.setattr(hooks, "TRACKER_LOG_BYTES", 100)
    monkeypatch.setattr(hooks, "TRACKER_PROGRAM", "chatty")
    script = CHATTY.format(log=tmp_path / "track" / "wandb.log")
    (tmp_path / "chatty.py").write_text(f"import os; os.execlp('sh', 'sh', '-c', {script!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    track = TrackProcesses(tmp_path / "f", TrackSection(wandb="w"), tmp_path, logs.configure_log("master", "r"))
    track.start(pytest.fail)
    await eventually(lambda: track.view().red, RESULT_S)
    await track.stop()
    assert track.view().reason == 'wandb: exit code 0: {"a": 1}'


async def test_what_it_started_dies_with_it(make_place: MakePlace, tmp_path: Path) -> None:
    """A master that stops kills the whole process group; the version is due again for the next master."""
    place = make_place(command=call("hang"))
    place.commit()
    second = place.commit()
    processes = place.begin()
    await eventually((tmp_path / "pids").exists, RESULT_S)
    assert processes.view().running == str(second)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    await processes.stop()
    assert processes._child is not None and not processes._child.alive, "it waits for that"
    await eventually(lambda: not any(is_alive(pid) for pid in pids), RESULT_S)
    assert place.ledger.find_unprocessed(2) == second


async def test_the_ledger_is_asked_now_and_then(tmp_path: Path) -> None:
    """And not as often as the loop turns: each question is a read of the master's own ledger."""
    asked = list[int]()

    async def find_due(every: int) -> VersionId | None:
        asked.append(every)
        await asyncio.sleep(0)  # as one that reads the ledger in a thread
        return None

    section = OnVersionSection(every=2, command=["true"])
    processes = VersionProcesses(tmp_path / "f", section, tmp_path, find_due, unwritten, structlog.get_logger())
    processes.start(pytest.fail)
    for _ in range(5):
        await asyncio.sleep(0)
    await processes.stop()
    assert asked == [2]


async def unwritten(records: Sequence[Record]) -> None:
    raise AssertionError(records)


async def test_who_has_run_nothing_stops_at_once(make_place: MakePlace) -> None:
    processes = make_place(command=["true"]).begin()
    await processes.stop()
    assert processes.view() == VersionProcessView(every=2)


MASTER = """
import subprocess, sys, time
from dips.master.hooks import PROGRAM, _spell_command
words = _spell_command(PROGRAM, *sys.argv[1:])
subprocess.Popen(words, start_new_session=True)
time.sleep(600)
"""


def test_it_dies_with_a_master_that_is_killed(make_place: MakePlace, tmp_path: Path) -> None:
    """The kernel tells it, and it ends its process group: the next master finds nothing running."""
    place = make_place(command=call("hang"))
    words = [str(place.file), str(place.commit()), str(tmp_path / "x"), "--", *call("hang")]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": path}
    master = subprocess.Popen([sys.executable, "-c", MASTER, *words], cwd=tmp_path, env=environment)
    while not (tmp_path / "pids").exists():
        assert master.poll() is None
        time.sleep(0.01)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    master.kill()
    master.wait()
    until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize("whose", ["nobody", "another version", "another slave", "another run"])
def test_a_directory_without_the_version_is_not_the_slaves(
    make_place: MakePlace, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """The slave has moved and left it, or the path is another process's here, as in pods: the lanes are asked."""
    place = make_place(command=["true"])
    version = place.commit(snapshot=whose != "nobody")
    (place.directory / "s").mkdir(exist_ok=True)
    path, config = place.directory / "s" / str(version), place.config
    match whose:
        case "another version":
            path.rename(path.with_name("v9@r9"))
        case "another slave":
            config = config.model_copy(update={"slaves": (config.slaves[0].model_copy(update={"name": "t"}),)})
        case "another run":
            config = config.model_copy(update={"shared": config.shared.model_copy(update={"run": "q"})})
    monkeypatch.setattr(version_process, "TRIES", 1)
    with pytest.raises(UnavailableMaster):  # nobody serves this run
        version_process._write_model(config, version, place.directory / "model.safetensors")


def test_a_pull_that_no_slave_answers_is_tried_again(make_place: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause, in which a slave that restarts comes back; what has come is not pulled again."""
    place, calls = make_place(command=["true"]), list[Path | float]()
    version = place.commit(snapshot=False)

    def export(_: object, exported: VersionId, output: Path, name: str) -> None:
        assert (exported, name) == (version, version_process.PULLED_AS)
        calls.append(output)
        if len(calls) == 1:
            raise UnavailableMaster("nobody answers")

    monkeypatch.setattr(export_lanes, "export_over_lanes", export)
    monkeypatch.setattr(version_process, "time", SimpleNamespace(sleep=calls.append))
    version_process._write_model(place.config, version, model := place.directory / "model.safetensors")
    assert calls == [model, version_process.RETRY_S, model]


def test_versions_are_due_in_their_order(make_place: MakePlace) -> None:
    """Every n-th that is durable and neither undone nor retired, oldest first; what has a result is done."""
    place = make_place(command=["true"])
    made = [place.commit(durable=n != 3, snapshot=False) for n in range(8)]
    assert [v.version for v in made] == list(range(1, 9))
    ledger = place.ledger
    ledger.write_records([VersionsRetired((made[1],))])
    assert ledger.find_unprocessed(2) == made[5]  # v4 is not durable yet
    ledger.write_records([VersionDurable(made[3], (), 0.0)])
    assert ledger.find_unprocessed(2) == made[3]
    ledger.write_records([VersionResult(made[3], False, "why", (), 1.0)])
    ledger.write_records([RolledBack(made[6], (made[7],), "why", 0.0)])
    assert ledger.find_unprocessed(2) == made[5]
    ledger.write_records([VersionResult(made[5], True, "", (), 1.0), VersionResult(made[5], True, "", (), 2.0)])
    assert ledger.find_unprocessed(2) is None
    assert os.path.exists(ledger_path(place.config))


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ('{"a": 1, "b": 2.5}', (("a", 1.0), ("b", 2.5))),
        ('{"a": Infinity, "b": true, "c": "x", "d": null, "e": 1e999}', ()),
        ('{"a": 1e300, "b": NaN}', ()),
        ("[1, 2]", ()),
        ("done.", ()),
        ("", ()),
        ('{"a": 1' + "0" * 400 + "}", ()),
    ],
)
def test_only_finite_numbers_are_taken(line: str, numbers: tuple[tuple[str, float], ...]) -> None:
    """The last line is somebody else's: what is no number of a sane size is left out."""
    assert read_numbers(line) == numbers


@pytest.mark.parametrize(
    ("on_version", "key"),
    [
        ({"every": 2}, "on_version.command: missing"),
        ({"every": 2, "command": []}, "on_version.command: .*at least 1 item"),
        ({"every": 3, "command": ["x"]}, "keep_every: expected 3"),
    ],
)
def test_wrong_sections_are_refused(make_place: MakePlace, on_version: dict[str, Any], key: str) -> None:
    """No command, an empty one, versions that would be gone before their turn."""
    place = make_place(command=["true"])
    content = yaml.safe_load(place.file.read_text())
    content["master"]["on_version"] = on_version
    place.file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=key):
        load_run(place.file)
