"""Starts a run's daemons on this machine, and runs the `dips` commands that make it, as an operator would."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from dips.client.agent.trainer import list_descendants
from dips.commands.status import ask_view
from dips.errors import Busy, DipsError, Unavailable
from dips.protocol.view import RunView
from dips.telemetry.logs import FORMAT
from dips.transport.endpoints import Endpoint

# ---- processes -------------------------------------------------------------------------------------------------------
# Every process ends with this one, even if this one is killed: `dips.client.agent.launch` asks the kernel for that.


GRACE_S = 15.0  # between SIGTERM and SIGKILL
TAIL_LINES = 15
BLOCK = 1 << 16  # bytes read at once from the end of a log


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit, so that the processes end in order; exit code 143."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class ProcessEnded(DipsError):
    """A process ended that should be running, or a command had an exit code other than 0."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class LocalProcess:
    """A started process and its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, may_end: bool = False, show: bool = False) -> None:
        """Start `command`, with one thread for its kernels if OMP_NUM_THREADS is not set; its output goes to `log`.

        may_end  the process may end before this one, with exit code 0
        show     its output is also written to our standard output
        """
        self.name, self.may_end, self._log = name, may_end, log
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            FORMAT: "console",
            **os.environ,
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dips.client.agent.launch", str(os.getpid()), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if show else output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which stops the others in order
            )
        self._copying = threading.Thread(target=self._copy_output, daemon=True) if show else None
        if self._copying:
            self._copying.start()

    def _copy_output(self) -> None:
        """Copy what the process shows, to its end: with nobody who reads it would be killed by its next line. Not by
        lines: a progress bar is one for hours.
        """
        assert self._process.stdout is not None
        said = False
        with self._log.open("ab", buffering=0) as log, self._process.stdout as shown:
            while text := os.read(shown.fileno(), BLOCK):
                try:
                    log.write(text)
                except OSError as error:
                    if not said:
                        typer.echo(f"{self._log} cannot be written: {error.strerror}", err=True)
                    said = True
                with suppress(OSError):  # of a pipe that nobody reads, as to a tee that Ctrl-C has ended
                    typer.echo(text, nl=False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the process to end; return the exit code. Raises ProcessEnded after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ProcessEnded(f"{self.name} did not end within {timeout_s:.0f} s; {self.log_tail()}") from error

    def kill(self) -> None:
        """Send SIGKILL to the process alone, as a crash would end it."""
        self._process.kill()
        self._process.wait()

    def kill_children(self) -> list[int]:
        """Send SIGKILL to everything that the process started, but not to the process itself; return the ids."""
        killed = list_descendants(self.pid)
        _kill_pids(killed)
        return killed

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        if self.exit_code() is None:
            self._process.terminate()

    def end_by(self, deadline: float) -> None:
        """Wait for the process to end until `deadline` (time.monotonic()), then kill it and its descendants."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        if self.exit_code() is None:
            below = list_descendants(self.pid)
            self.kill()
            _kill_pids(below)
        if self._copying:
            self._copying.join(1.0)  # not longer: a descendant may hold the pipe

    def log_tail(self) -> str:
        """Return the end of the log, for an error message."""
        lines, _ = read_tail(self._log, TAIL_LINES)
        return "\n  ".join([f"the end of {self._log}:", *(line.decode(errors="replace") for line in lines)])


class LocalProcesses:
    """All processes of a run; leaving the `with` block stops them, agents first and the master last."""

    def __init__(self) -> None:
        self.processes: dict[str, LocalProcess] = {}

    def start(
        self, name: str, command: Sequence[str], log: Path, may_end: bool = False, show: bool = False
    ) -> LocalProcess:
        """Start a process, or start it again under its name; for `may_end` and `show` see LocalProcess."""
        self.processes[name] = LocalProcess(name, command, log, may_end, show)
        return self.processes[name]

    def check_alive(self) -> None:
        """Raise ProcessEnded if a process has ended; those with `may_end` may end with exit code 0."""
        for process in self.processes.values():
            code = process.exit_code()
            if code is not None and not (code == 0 and process.may_end):
                raise ProcessEnded(f"{process.name} ended with exit code {code}; {process.log_tail()}")

    def close(self) -> None:
        """Stop all remaining processes, those started last first."""
        for process in reversed(self.processes.values()):
            process.ask_to_end()
        deadline = time.monotonic() + GRACE_S
        for process in reversed(self.processes.values()):
            process.end_by(deadline)

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        previous = [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]
        try:
            self.close()
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
                signal.signal(number, handler)


def _kill_pids(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_tail(log: Path, lines: int) -> tuple[list[bytes], int]:
    """Return the last lines of a log of any size, and the offset after them."""
    with log.open("rb") as file:
        size = begin = file.seek(0, os.SEEK_END)
        text = b""
        while begin > 0 and text.count(b"\n") <= lines:
            begin = max(0, begin - BLOCK)
            file.seek(begin)
            text = file.read(size - begin)
    return text.splitlines()[-lines:] if lines else [], size


LOGS = "logs"  # directory beside the run file with NAME.log of each process
STATUS_S = 2.0  # timeout of the master's answer


def log_file(run_file: Path, name: str) -> Path:
    return run_file.parent / LOGS / f"{name}.log"


def start_master(running: LocalProcesses, run_file: Path) -> LocalProcess:
    """Start or restart the master."""
    command = module_command("dips.master.app", "--config", str(run_file))
    return running.start("master", command, log_file(run_file, "master"))


def start_slave(running: LocalProcesses, run_file: Path, name: str) -> LocalProcess:
    """Start or restart a slave."""
    command = module_command("dips.slave.app", "--config", str(run_file), "--name", name)
    return running.start(name, command, log_file(run_file, name))


def start_cluster(
    running: LocalProcesses,
    run_file: Path,
    cluster_file: Path,
    name: str,
    command: Sequence[str],
    show: bool = False,
) -> LocalProcess:
    """Start a cluster's agent, which starts the training command; `show`: print their output, too."""
    agent = module_command("dips.client.app", "--config", str(cluster_file), "--", *command)
    return running.start(name, agent, log_file(run_file, name), may_end=True, show=show)


def module_command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def run_word(*arguments: str, directory: Path | None = None) -> str:
    """Run a `dips` command, in `directory` or here, and return its output. Raises ProcessEnded with its errors if it
    fails.
    """
    command = module_command("dips.cli", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    if done.returncode != 0:
        said = f"dips {' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr.strip()}"
        raise ProcessEnded(said, done.returncode)
    return done.stdout.strip()


def read_status(master: Endpoint) -> RunView | None:
    """Return the master's status; None if it does not answer, or is asked too much at once."""
    try:
        return asyncio.run(ask_view(master, deadline_s=STATUS_S))
    except (Unavailable, Busy):
        return None
