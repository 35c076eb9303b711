"""Processes of a run on this machine: killed as ordered, and none is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from dips.client.agent.trainer import list_descendants
from dips.errors import Busy, DipsError, UnavailableMaster
from dips.local import run
from dips.local.run import LocalProcesses, ProcessEnded
from dips.transport.endpoints import Endpoint
from tests.forkserver.fixtures import end_of_servers, forked_commands, real_commands  # noqa: F401  forks
from tests.waiting import is_alive, until

SLEEP = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
SAVE = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.05), sys.exit(7)))"
SAVES = [sys.executable, "-c", f"import signal, sys, time; {SAVE}; print('here', flush=True); time.sleep(60)"]
CHILD_AND_SELF = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("here", flush=True)
child.wait()
print("child gone", flush=True)
time.sleep(60)
"""
PARENT = [sys.executable, "-c", CHILD_AND_SELF]


def until_told(log: Path, word: str) -> None:
    until(lambda: log.exists() and word in log.read_text(), lambda: f"{log} says {word!r}: {log.read_text()}", 20)


def test_leaving_the_house_ends_everything(tmp_path: Path) -> None:
    """When the block is left, by an error too, every process has ended."""
    running = LocalProcesses()
    processes = [running.start(name, SAVES, tmp_path / name) for name in ("a", "b")]
    for process in processes:
        until_told(tmp_path / process.name, "here")
    with pytest.raises(RuntimeError, match="in the middle"), running:
        raise RuntimeError("in the middle")
    assert [process.exit_code() for process in processes] == [7, 7], "each has had its time to end"


def test_children_are_killed_and_the_parent_incarnations(tmp_path: Path) -> None:
    """kill_children takes what a process started, and leaves it to notice."""
    before = set(list_descendants(os.getpid()))  # of other tests: Python's own tracker of shared memory, say
    with LocalProcesses() as running:
        process = running.start("a", PARENT, tmp_path / "a")
        until_told(tmp_path / "a", "here")
        killed = process.kill_children()
        until_told(tmp_path / "a", "child gone")
        assert len(killed) == 1
        assert process.exit_code() is None
        assert not is_alive(killed[0])
    assert not [pid for pid in set(list_descendants(os.getpid())) - before if is_alive(pid)]


def test_who_does_not_end_in_time_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ignores SIGTERM, and so does its child: neither is left when the block is."""
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{CHILD_AND_SELF}"
    with LocalProcesses() as running:
        process = running.start("a", [sys.executable, "-c", deaf], tmp_path / "a")
        until_told(tmp_path / "a", "here")
        below = list_descendants(process.pid)
        assert below
    assert process.exit_code() == -signal.SIGKILL
    until(lambda: not any(is_alive(pid) for pid in below))  # SIGKILL was sent; the kernel takes its time


def test_what_a_process_shows_is_logged_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalProcesses() as running:
        running.start("a", [sys.executable, "-c", "print('a line')"], tmp_path / "a", show=True).wait(20)
    assert (tmp_path / "a").read_text() == capfd.readouterr().out == "a line\n"


def test_last_words_are_shown_before_the_block_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `dips up` ended before its training's last lines were on a slow terminal."""
    left, shown = threading.Event(), list[bytes]()

    def show(text: bytes, nl: bool) -> None:
        assert not left.wait(0.05), "the block was left before"
        shown.append(text)

    monkeypatch.setattr("dips.local.run.typer.echo", show)
    with LocalProcesses() as running:
        running.start("a", [sys.executable, "-c", "print('a line')"], tmp_path / "a", show=True).wait(20)
    left.set()
    assert b"".join(shown) == b"a line\n"


def test_a_process_has_the_environment_of_who_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of eight threads had one under `dips up`, and nothing said so; so had DIPS_LOG_FORMAT no effect."""
    told = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['DIPS_LOG_FORMAT'])"]
    for name in ("OMP_NUM_THREADS", "DIPS_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    with LocalProcesses() as running:
        running.start("a", told, tmp_path / "a").wait(20)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        monkeypatch.setenv("DIPS_LOG_FORMAT", "json")
        running.start("a", told, tmp_path / "a").wait(20)
    assert (tmp_path / "a").read_text() == "1 console\n8 json\n"


def test_what_is_no_whole_line_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A progress bar was not seen before its end, and was kept in memory for as long."""
    shown = "import time; print('50 %', end='\\r', flush=True); time.sleep(60)"
    with LocalProcesses() as running:
        running.start("a", [sys.executable, "-c", shown], tmp_path / "a", show=True)
        until_told(tmp_path / "a", "50 %")
    assert capfd.readouterr().out == "50 %\r"


def test_a_log_without_room_ends_no_training(capfd: pytest.CaptureFixture[str]) -> None:
    """It was only copied there: the process writes on, and what it writes is shown."""
    lines, line = 200, "a" * 1000  # more than a pipe holds
    with LocalProcesses() as running:
        shown = f"for _ in range({lines}): print('{line}')\nraise SystemExit(3)"
        process = running.start("a", [sys.executable, "-c", shown], Path("/dev/full"), show=True)
        assert process.wait(20) == 3
    out, err = capfd.readouterr()
    assert out == f"{line}\n" * lines and err.count("/dev/full cannot be written: No space left on device") == 1


def test_an_output_that_nobody_reads_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dips up … | tee log` and Ctrl-C, which ends tee first: the script lost its checkpoint at the second line that it
    wrote while it saved.
    """

    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("dips.local.run.typer.echo", fail)
    shown = "for _ in range(200): print('a' * 1000)\nraise SystemExit(3)"
    with LocalProcesses() as running:
        assert running.start("a", [sys.executable, "-c", shown], tmp_path / "a", show=True).wait(20) == 3
    assert (tmp_path / "a").read_text() == 200 * f"{'a' * 1000}\n"


def test_the_end_of_a_log_is_read_from_its_end(tmp_path: Path) -> None:
    """Of two terabytes, which are a hole, the last lines alone are read; of a short log all, and of none none."""
    log = tmp_path / "a"
    with LocalProcesses() as running:
        process = running.start("a", [sys.executable, "-c", "pass"], log)
        process.wait(20)
        assert process.log_tail() == f"the end of {log}:"
        log.write_text("one\ntwo\n")
        assert process.log_tail() == f"the end of {log}:\n  one\n  two"
        with log.open("r+") as file:
            file.seek(2 << 40)
            file.write("\n" + "\n".join(map(str, range(20))))
        assert process.log_tail().splitlines()[1:] == [f"  {n}" for n in range(5, 20)]


def test_sigterm_unwinds_what_was_begun() -> None:
    """Whoever started processes ends them in order, and is seen to have ended by a signal."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        run.exit_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    """check names who ended, how, and what it said last; one that may end well may."""
    with LocalProcesses() as running:
        running.start("good", [sys.executable, "-c", ""], tmp_path / "good", may_end=True).wait(20)
        running.check_alive()
        failed = [sys.executable, "-c", "raise SystemExit(3)"]
        running.start("failed", failed, tmp_path / "failed", may_end=True).wait(20)
        with pytest.raises(ProcessEnded, match="failed ended with exit code 3"):
            running.check_alive()
        running.start("failed", [sys.executable, "-c", ""], tmp_path / "failed", may_end=True).wait(20)
        bad = running.start(
            "bad", [sys.executable, "-c", "print('no such thing'); raise SystemExit(78)"], tmp_path / "bad"
        )
        assert bad.wait(20) == 78
        with pytest.raises(ProcessEnded, match=r"bad ended with exit code 78.*\n.*no such thing"):
            running.check_alive()
        running.start("bad", [sys.executable, "-c", ""], tmp_path / "bad").wait(20)
        with pytest.raises(ProcessEnded, match=r"bad ended with exit code 0"):
            running.check_alive()


def test_waiting_has_an_end(tmp_path: Path) -> None:
    """A process that does not end in time is named, with its log."""
    with LocalProcesses() as running:
        process = running.start("a", SLEEP, tmp_path / "a")
        until_told(tmp_path / "a", "here")
        with pytest.raises(ProcessEnded, match=r"a did not end within 0 s.*\n.*here"):
            process.wait(0.1)


@pytest.mark.parametrize("error", [UnavailableMaster("away"), Busy("too many connections")])
def test_a_status_that_does_not_come_ends_nothing(monkeypatch: pytest.MonkeyPatch, error: DipsError) -> None:
    """It is a line for people: where somebody asked a master too much, `dips up` ended the training, too."""

    async def ask(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run, "ask_view", ask)
    assert run.read_status(Endpoint("the master", "127.0.0.1:1")) is None
