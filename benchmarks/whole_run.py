"""A whole run for a benchmark: init, `dips-master`, `dips-slave`s and clusters as real processes on loopback.

    with WholeRun(directory, manifest, clusters=2, versions=7) as run:
        run.finish()                       # every cluster's process has ended well

Each cluster is an agent whose trainer is outer_rank.py; a subclass may name another (`_words`, `_keys`). With `hosts`
(namespaces.py) each process is on the host of its name; master and slaves that have none are on the host SITE. What a
process prints lies in `<name>.log`; each is ended by its own pid on exit. It measures nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks.harness import end_process
from benchmarks.namespaces import End
from benchmarks.record import ROOT
from dips.client.agent.trainer import list_descendants
from dips.config import load_run
from dips.identity.names import PeerRole
from dips.master import genesis
from dips.protocol.manifest import Manifest
from dips.telemetry import timeline
from tests.enrolled import enroll_all

END_S = 30.0
STEPS = 20  # inner steps between two pushes, with `inner_s`
SITE = "site"
LOCAL = End("", "127.0.0.1")


class Processes:
    """Starts commands with their output in files; ends all of them, the last first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._running.append((name, process))
        return process

    def newest(self, name: str) -> subprocess.Popen[bytes]:
        """What was started last under a name."""
        return next(process for known, process in reversed(self._running) if known == name)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process and to all below it."""
        process = self.newest(name)
        for pid in (process.pid, *list_descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> float:
        """SIGKILL of a process and all below it; return when (Unix seconds)."""
        at = time.time()
        self.signal(name, signal.SIGKILL)
        self.newest(name).wait()
        return at

    def peak_memory(self, name: str) -> int:
        """Bytes that a process and all below it had resident at their peaks, summed."""
        peaks = 0
        for pid in (root := self.newest(name).pid, *list_descendants(root)):
            with suppress(OSError):  # it has ended meanwhile
                lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
                peaks += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
        return peaks

    def wait(self, name: str, process: subprocess.Popen[bytes], within_s: float) -> None:
        """Wait for an end with code 0; raise RuntimeError, with the last of its log, on any other."""
        end = time.monotonic() + within_s
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if process.poll() != 0:
            log = (self.directory / f"{name}.log").read_text(errors="replace")
            raise RuntimeError(f"{name} ended with {process.poll()} within {within_s:g} s:\n{log[-4000:]}")

    def end(self) -> None:
        """SIGTERM, then SIGKILL for those that do not end."""
        for _, process in reversed(self._running):
            end_process(process, END_S)


class WholeRun:
    """One run of `versions` outer steps; every cluster takes part in each, unless they train each for itself."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        clusters: int,
        slaves: int,
        versions: int,
        lanes: int = 1,
        slots: int | None = None,
        window_s: float | None = 60.0,
        inner_s: float = 0.0,
        hosts: Mapping[str, End] | None = None,
        secure: bool = False,
    ) -> None:
        """`slots` None: one for each cluster; `window_s` is closed early, when every cluster is in.

        inner_s  seconds that each cluster trains before each push; 0: all meet, and push together
        secure   with certificates, so that lanes are encrypted
        """
        self.directory, self._manifest = directory, manifest
        self.clusters = [f"c{i}" for i in range(clusters)]
        self._slots, self._window_s, self._inner_s = slots or clusters, window_s, inner_s
        self._hosts = {} if hosts is None else hosts
        self.slaves = [f"ps{i}" for i in range(slaves)]
        self._lanes = lanes
        self._address = f"{self._host('master').ip}:{free_port()}"
        self._shared: dict[str, Any] = {
            "run": "bench",
            "stop": {"versions": versions},
            "penalty": {"gates": []},
        }
        self._processes = Processes(directory)
        self._secure = secure
        self._tls: dict[str, Any] = {"tls": False}

    def __enter__(self) -> Self:
        self.meeting.mkdir(parents=True)
        if self._secure:
            peers = [("master", PeerRole.MASTER), *((name, PeerRole.SLAVE) for name in self.slaves)]
            peers += [(name, PeerRole.CLUSTER) for name in self.clusters]
            (certificates := self.directory / "certs").mkdir()
            self._tls = enroll_all(certificates, str(self._shared["run"]), peers)
        file = self.directory / "dips.yaml"
        file.write_text(yaml.safe_dump(self._run_file()))
        genesis.make_run(load_run(file), self._tensors())
        try:
            for name in ("master", *self.slaves):
                self.start(name)
            self._agents = {name: self.start(name) for name in self.clusters}
        except BaseException:
            self._processes.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._processes.end()

    @property
    def meeting(self) -> Path:
        """Where the clusters meet, and write what they saw."""
        return self.directory / "meeting"

    def timeline(self, who: str) -> Path:
        """Of `master` or a cluster."""
        return self.directory / who / "timeline.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a cluster's rank wrote."""
        return list(timeline.read_marks(self.meeting / f"{name}.jsonl"))

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start the master, a slave or a cluster, once more if it was killed."""
        if name in self.clusters:
            return self._start_cluster(name)
        words = ["dips.master.app"] if name == "master" else ["dips.slave.app", "--name", name]
        return self._start(name, self._host(name), *words, "--config", str(self.directory / "dips.yaml"))

    def kill(self, name: str) -> float:
        """SIGKILL of a process and all below it; return when (Unix seconds)."""
        return self._processes.kill(name)

    def finish(self, within_s: float) -> None:
        """Wait until the run is over and every cluster has ended."""
        for name, agent in self._agents.items():
            self._processes.wait(name, agent, within_s)

    def _start_cluster(self, name: str) -> subprocess.Popen[bytes]:
        file = self.directory / f"{name}.yaml"
        cluster = {
            "shared": self._shared, "cluster": name, "master": self._address, "directory": name,
            "max_restarts": 0, **self._tls, **self._keys(name),
        }  # fmt: skip
        file.write_text(yaml.safe_dump(cluster))
        trainer = [sys.executable, "-m", *self._words(name)]
        return self._start(name, self._host(name), "dips.client.app", "--config", str(file), "--", *trainer)

    def _tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """θ of v0@r0."""
        return {p.name: np.zeros(p.shape, np.float32) for layer in self._manifest.layers for p in layer.parameters}

    def _keys(self, name: str) -> dict[str, Any]:
        """Of the cluster's file."""
        return {"pace": {"steps": STEPS if self._inner_s else 1}}

    def _words(self, name: str) -> list[str]:
        """The trainer: a module and its words."""
        layers = self._manifest.layers
        shape = [str(len(self.clusters)), str(len(layers)), str(layers[0].numel)]
        return ["benchmarks.outer_rank", name, *shape, str(self.meeting), str(self._inner_s / STEPS)]

    def _host(self, name: str) -> End:
        return self._hosts.get(name, self._hosts.get(SITE, LOCAL))

    def _start(self, name: str, host: End, *words: str) -> subprocess.Popen[bytes]:
        return self._processes.start(name, host.command(sys.executable, "-m", *words))

    def _run_file(self) -> dict[str, Any]:
        slave = {
            "initial_model": str(Path("master") / genesis.INITIAL), "master": self._address, "slots": self._slots,
        }  # fmt: skip
        listen = {name: f"{self._host(name).ip}:0" for name in self.slaves}
        return {
            "shared": self._shared,
            "master": {
                "listen": self._address, "directory": "master", "timing": {"window_s": self._window_s},
            },
            "slaves": [
                {"name": name, "directory": name, "listen": at, "lanes": [at] * self._lanes, **slave}
                for name, at in listen.items()
            ],
            **self._tls,
        }  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
