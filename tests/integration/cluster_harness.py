"""A whole run as real processes on loopback: init, master, slaves, clusters; each ended by its own pid.

    with Run(tmp_path, tensors, shared={"stop": {"versions": 3}}) as run:
        run.start_servers(); west = run.start_cluster("west", [sys.executable, "train.py"])
        run.wait(west, 60)

Daemons, torchrun and scripts are forks of a server (tests/forkserver), but in tests marked `real_commands`.

Ports are ephemeral: the master's is taken from the kernel and handed to everybody's file before it starts, those of the
slaves are 0. What a process prints is in `<name>.log` below the directory, and in the message when something fails.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from dips.config import load_run
from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.view.points import RoundHistory
from tests.waiting import until

ROOT = Path(__file__).parents[2]
END_S = 30.0  # for a process to end after SIGTERM
EVER = 1_000_000  # rounds
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4  # of those that test side by side
_ports = list(range(15_000 + 4_000 * WORKER, 19_000 + 4_000 * WORKER))  # below those that connections are given
random.SystemRandom().shuffle(_ports)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def daemon(role: str) -> list[str]:
    """What the console script `dips-<role>` does, with this interpreter."""
    return [sys.executable, "-c", f"from dips.{role}.app import main; main()"]


def free_port() -> int:
    """A port that nobody listens on, each once: while a process is dead its port is free, and still its own."""
    while True:
        port = _ports.pop()
        with socket.socket() as s, suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
            return port


class Process:
    """One daemon or cluster, in a session of its own so that a test that kills it kills nothing else."""

    def __init__(self, name: str, command: Sequence[str], log: Path, root: Path = ROOT) -> None:
        """`root` is in front of the packages of the command's interpreter."""
        self.name, self.log = name, log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command, cwd=root, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """Its exit code, None while it lives."""
        return self._popen.poll()

    def wait_for_end(self, within_s: float) -> None:
        """Wait until it has ended by itself; fail showing its log."""
        try:
            self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {within_s:g} s\n{self.tail()}") from None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._popen.kill()
        self._popen.wait()

    def terminate(self, within_s: float = END_S) -> int:
        """SIGTERM; return its exit code, or fail if it does not end."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {within_s} s of SIGTERM\n{self.tail()}") from None

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return f"--- {self.log}\n" + "\n".join(text[-lines:])


class Run:
    """One run in one directory."""

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, npt.NDArray[np.float32]],
        *,
        shared: Mapping[str, Any] | None = None,
        timing: Mapping[str, Any] | None = None,
        slaves: int = 2,
        slave: Mapping[str, Any] | None = None,
        master: Mapping[str, Any] | None = None,
        security: Mapping[str, Any] | None = None,
    ) -> None:
        """`tensors`: θ of v0@r0; `shared`, `timing`, `slave` (of each), `master`: what differs from the defaults.

        security  keys of run file and cluster files that say how they talk; default in plain text
        """
        self._slave, self._master, self.security = (
            dict(slave or {}),
            dict(master or {}),
            dict(security or {"tls": False}),
        )
        self.directory, self.processes = directory, list[Process]()
        self.commands = {role: daemon(role) for role in ("master", "slave", "client")}
        self.address = f"127.0.0.1:{free_port()}"
        self.shared = {"run": "test", "heartbeat_s": 0.5, **(shared or {})}
        self.slaves = [f"ps{i}" for i in range(slaves)]
        self.file = directory / "dips.yaml"
        self._timing = {"window_s": 0.3, **(timing or {})}
        self.write_run_file()
        self._make_run(tensors)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in reversed(self.processes):
            try:
                process.terminate()
            except AssertionError:
                if kind is None:
                    raise
        if error is not None:
            error.add_note("\n".join(process.tail() for process in self.processes))

    def write_run_file(self) -> None:
        """Write the run file of `slaves`."""
        self._write(self.file, self._run_file(self._timing))

    def start_master(self) -> Process:
        return self._start("master", [*self.commands["master"], "--config", str(self.file)])

    def start_slave(self, name: str) -> Process:
        return self._start(name, [*self.commands["slave"], "--config", str(self.file), "--name", name])

    def start_slaves(self) -> list[Process]:
        return [self.start_slave(name) for name in self.slaves]

    def start_servers(self) -> None:
        self.start_master()
        self.start_slaves()

    def make_ready(self) -> None:
        """Start master and slaves; return when all slaves have layers and serve."""
        self.start_master()
        for slave in self.start_slaves():
            self.until(lambda s=slave: '"ready"' in s.log.read_text(), 60, f"{slave.name} is ready")

    def write_cluster_file(self, name: str, **options: Any) -> Path:
        file = self.directory / f"{name}.yaml"
        own = {"cluster": name, "master": self.address, "pace": {"steps": 1}, "directory": name}
        self._write(file, {"shared": self.shared, **own, **self.security, **options})
        return file

    def start_cluster(self, name: str, command: Sequence[str], *, steps: int = 1, **options: Any) -> Process:
        """Start an agent with `command` as its trainer, empty: others start it; `options`: keys of the cluster file."""
        file = self.write_cluster_file(name, **{"pace": {"steps": steps}, "max_restarts": 0, **options})
        return self._start(
            name, [*self.commands["client"], "--config", str(file), *(["--", *command] if command else [])]
        )

    def wait(self, process: Process, within_s: float, code: int = 0) -> None:
        """Wait for a process to end with `code`, while all others live."""
        self.until(lambda: process.code is not None, within_s, f"{process.name} ends")
        assert process.code == code, f"{process.name} ended with {process.code}, expected {code}\n{process.tail()}"

    def until(self, holds: Callable[[], Any], within_s: float, what: str) -> None:
        """Poll until something holds; fail naming `what` and showing all logs."""
        until(holds, what, within_s, pause_s=0.05)

    def ledger(self) -> closing[Ledger]:
        """The ledger, for reading; a living master keeps it."""
        return closing(Ledger.open(self.directory / "master" / genesis.LEDGER, readonly=True))

    def history(self) -> list[RoundHistory]:
        """All rounds, the oldest first."""
        with self.ledger() as ledger:
            return ledger.read_history(EVER)

    def versions(self) -> list[RoundHistory]:
        """The rounds that made a version."""
        return [row for row in self.history() if row.version is not None]

    def skipped(self) -> list[str]:
        """Why each round that was skipped was."""
        return [row.reason for row in self.history() if row.kind == "skipped"]

    def lineage(self) -> list[VersionId]:
        with self.ledger() as ledger:
            return [row.version for row in ledger.read_state().versions]

    def head(self) -> VersionId:
        return self.lineage()[-1]

    def export(self, output: Path) -> None:
        """Export the newest version, as `dips export` does."""
        subprocess.run(
            [sys.executable, "-m", "dips.cli", "export", "--config", str(self.file), "--output", str(output)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60,
        )  # fmt: skip

    def timeline(self, cluster: str) -> Path:
        return self.directory / cluster / "timeline.jsonl"

    def _start(self, name: str, command: Sequence[str]) -> Process:
        process = self._make_process(name, command, self.directory / f"{name}.log")
        self.processes = [p for p in self.processes if p.code is None or p.name != name] + [process]
        return process

    def _make_run(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        genesis.make_run(load_run(self.file), tensors)

    def _make_process(self, name: str, command: Sequence[str], log: Path) -> Process:
        return Process(name, command, log)

    def _run_file(self, timing: Mapping[str, Any]) -> dict[str, Any]:
        model = str(Path("master") / genesis.INITIAL)
        small = {"initial_model": model, "master": self.address, **self._slave}
        return {
            "shared": self.shared,
            "master": {"listen": self.address, "directory": "master", "timing": dict(timing), **self._master},
            "slaves": [{"name": name, "directory": name, **small} for name in self.slaves],
            **self.security,
        }

    @staticmethod
    def _write(path: Path, content: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dict(content)))
