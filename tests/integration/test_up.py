"""`dips new`, `dips up`, `dips stop`, `dips logs`: a run of one's own on this machine, in two commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from dips.config import load_run
from dips.master.genesis import ledger_path
from dips.master.ledger import Ledger
from tests.forkserver.process import SERVER_NAME
from tests.integration.cluster_harness import ROOT, free_port
from tests.waiting import until

TRAIN = ["--", sys.executable, "train.py"]
STEPS = 4  # H
END_S = 60
GUIDE = ROOT / "docs/guides/first-run.md"
DAEMONS = {"dips-master": "dips.master.app", "dips-slave": "dips.slave.app"}


def say(directory: Path, *words: str, code: int = 0) -> str:
    """Run a command in the directory and return all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "dips.cli", *words],
        cwd=directory, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def edit(path: Path, *changes: tuple[str, str]) -> None:
    """Replace words that must be there."""
    text = path.read_text()
    for old, new in changes:
        assert old in text, f"{path.name} has no {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A new run, small enough for a test."""
    say(tmp_path, "new", "My first run", "--listen", f"127.0.0.1:{free_port()}")
    directory = tmp_path / "My first run"
    edit(directory / "cluster.yaml", ("aligned: 64 ", f"aligned: {STEPS} "))
    edit(directory / "train.py", ("SHOW_EVERY = 100 ", "SHOW_EVERY = 1 "), ("SEQUENCES = 8 ", "SEQUENCES = 2 "))
    edit(
        directory / "model.py",
        ("= 256, 96, 2, 4, 96", "= 256, 16, 1, 1, 16"),
    )
    return directory


@pytest.fixture
def started(place: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """What a test starts has ended with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def start_up(place: Path, started: list[subprocess.Popen[str]], words: Sequence[str] = TRAIN) -> subprocess.Popen[str]:
    output = (place / "up.txt").open("a")
    process = subprocess.Popen(
        [sys.executable, "-m", "dips.cli", "up", *words], cwd=place, stdout=output, stderr=subprocess.STDOUT, text=True
    )
    output.close()
    started.append(process)
    return process


def await_line(path: Path, pattern: str) -> None:
    until(
        lambda: re.search(pattern, path.read_text()),
        lambda: f"{path} says {pattern!r}:\n{path.read_text()[-4000:]}", END_S,
    )  # fmt: skip


def guide_lines(section: str) -> list[list[str]]:
    """The commands of a section of the first run's guide, in words."""
    (text,) = re.findall(rf"^## {re.escape(section)}$(.*?)^## ", GUIDE.read_text(), re.M | re.S)
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def type_daemons(
    place: Path, started: list[subprocess.Popen[str]], lines: Sequence[Sequence[str]]
) -> tuple[list[subprocess.Popen[str]], list[list[str]]]:
    """Start the daemons of these lines, each with an output NAME.txt; return them, and the words of `dips`."""
    daemons, commands = list[subprocess.Popen[str]](), list[list[str]]()
    for program, *words in lines:
        if program == "dips":
            commands.append(words)
        elif program in DAEMONS:
            with (place / f"{words[-1]}.txt").open("w") as output:
                command = [sys.executable, "-m", DAEMONS[program], *words]
                daemons.append(subprocess.Popen(command, cwd=place, stdout=output, stderr=subprocess.STDOUT, text=True))
    started += daemons
    return daemons, commands


def versions_of(place: Path) -> int:
    ledger = Ledger.open(ledger_path(load_run(place / "dips.yaml")), readonly=True)
    try:
        return len([r for r in ledger.read_history(1000) if r.version])
    finally:
        ledger.close()


@pytest.mark.timeout(240)
def test_a_run_of_ones_own_in_two_commands(place: Path) -> None:
    """It trains to its target, what the script prints is seen, logs are kept, and the same command restores a ledger
    that was lost from its mirror.
    """
    (place / "mirror").mkdir()
    edit(place / "dips.yaml", ("master:\n", "master:\n  mirror: mirror\n"))
    edit(place / "shared.yaml", ("tokens: 1500000 ", f"tokens: {2 * 16 * STEPS * 3} "))
    said = say(place, "up", *TRAIN)
    assert "made run my-first-run" in said and "step 1  loss" in said and "next: dips history" in said
    assert versions_of(place) == 3
    assert {p.stem for p in (place / "logs").iterdir()} == {"master", "slave-0", "slave-1", "my-cluster"}
    logged = say(place, "logs", "master", "slave-0", "-n", "5")  # gRPC may write a line of its own at the end
    assert re.findall(r"^(\S+) +\| .*stopped", logged, re.M) == ["master", "slave-0"]
    say(place, "logs", "nobody", code=78)

    shutil.rmtree(ledger_path(load_run(place / "dips.yaml")).parent)
    said = say(place, "up", *TRAIN)
    assert "made run" not in said and versions_of(place) == 3
    assert "step 0" not in said, "a run that has ended trains no more"


def test_the_first_model_is_found_beside_the_run_file(place: Path) -> None:
    """From whatever directory the command is typed; the training command's own paths are of that one."""
    say(place.parent, "up", "--config", f"{place.name}/dips.yaml", "--", "true")
    assert ledger_path(load_run(place / "dips.yaml")).exists()


@pytest.mark.timeout(240)
def test_stop_lets_the_run_end_with_its_next_version(place: Path, started: list[subprocess.Popen[str]]) -> None:
    """Asked in the middle of a run without an end. Then it goes on by the lines of the guide: daemons, a new target."""
    edit(place / "shared.yaml", ("tokens: 1500000 ", "tokens: 0 "))
    process = start_up(place, started)
    await_line(place / "up.txt", r"from v2@")
    last = int(re.search(r"ends with version (\d+)", say(place, "stop", "--config", "dips.yaml"))[1])  # type: ignore[index]
    assert process.wait(END_S) == 0, (place / "up.txt").read_text()
    assert versions_of(place) == last
    daemons, commands = type_daemons(place, started, guide_lines("The end, and the model"))
    for name in ("slave-0", "slave-1"):
        await_line(place / f"{name}.txt", "ready")
    (command,) = (words for words in commands if words[0] == "set")
    assert f"it was finished at v{last}@" in say(place, *command)
    for daemon in daemons:
        daemon.terminate()
        assert daemon.wait(END_S) == 0


@pytest.mark.timeout(240)
def test_a_signal_ends_everything_in_order(place: Path, started: list[subprocess.Popen[str]]) -> None:
    """The agent takes leave of the master before that ends; no process is left, and the same command goes on."""
    process = start_up(place, started)
    await_line(place / "up.txt", r"from v2@")
    below = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() != SERVER_NAME]
    assert len(below) >= 5  # master, two slaves, an agent and its trainer
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S) == 128 + signal.SIGTERM
    assert not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert "could not take leave" not in (place / "logs" / "my-cluster.log").read_text()
    before = versions_of(place)
    process = start_up(place, started)
    await_line(place / "up.txt", rf"from v{before + 1}@")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(END_S) == 128 + signal.SIGINT


@pytest.mark.timeout(120)
def test_what_is_missing_is_said(place: Path, tmp_path: Path) -> None:
    """No run file, no model, no such command, a port that is taken, another model than the run's: each a sentence, and
    the last word; nothing is left running.
    """
    assert "`dips new DIRECTORY` writes one" in say(tmp_path, "up", *TRAIN, code=78)
    assert "the training command 'no-such'" in say(place, "up", "--", "no-such", code=78)
    (place / "model.py").rename(place / "other.py")
    assert "expected --factory MODULE:FUNCTION" in say(place, "up", *TRAIN, code=78)
    (place / "other.py").rename(place / "model.py")
    said = say(place, "up", "--model", "nowhere.safetensors", *TRAIN, code=78)
    assert "nowhere.safetensors: expected a safetensors file" in said
    assert "--factory" not in said, "the model.py beside the run file is for who names none"
    import socket

    with socket.socket() as taken:
        host, port = load_run(place / "dips.yaml").master.listen.split(":")
        taken.bind((host, int(port)))
        taken.listen()
        assert "master ended with exit code 78" in say(place, "up", *TRAIN, code=78)
    (place / "model.py").write_text((place / "model.py").read_text().replace("256, 16, 1, 1, 16", "256, 8, 1, 1, 16"))
    said = say(place, "up", *TRAIN, code=78)
    assert "this model is not the run's" in said and "next: " not in said
