"""A real Slurm of one node on this machine: munged, slurmctld and slurmd, each ended by its own process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from benchmarks.harness import end_process
from tests.integration.cluster_harness import free_port
from tests.waiting import until

PROGRAMS = {
    "munged": "munge",
    "mungekey": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
MUNGE = {"key-file": "key", "socket": "sock", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
READY_S, END_S, LOOK_S = 30.0, 20.0, 0.2
COMMAND_S = 30.0

_CONFIG = """\
ClusterName=dips
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.sock
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find_missing() -> str | None:
    """What this machine lacks, or None."""
    if os.geteuid() != 0:
        return "only root may be slurmd"
    missing = sorted({package for tool, package in PROGRAMS.items() if shutil.which(tool) is None})
    return f"apt install {' '.join(missing)}" if missing else None


class Slurm:
    """`with Slurm(directory) as slurm: slurm.submit(...)`."""

    def __init__(self, directory: Path) -> None:
        """`directory` is short: a Unix socket lies in it."""
        self._directory, self._processes = directory, list[subprocess.Popen[bytes]]()
        self._environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> Slurm:
        d = self._directory
        for name in ("state", "spool"):
            (d / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        (d / "slurm.conf").write_text(
            _CONFIG.format(host=host, directory=d, control=free_port(), daemon=free_port(), cores=os.cpu_count())
        )
        try:
            self._run("mungekey", "--create", "--keyfile", str(d / "munge.key"))
            self._start("munged", "--foreground", "--force", *(f"--{o}={d}/munge.{end}" for o, end in MUNGE.items()))
            self._until(lambda: (d / "munge.sock").exists(), "munged listens")
            self._start("slurmctld", "-D", "-c")
            self._until(lambda: "UP" in self._run("scontrol", "ping", check=False), "slurmctld answers")
            self._start("slurmd", "-D")
            self._until(lambda: "idle" in self._run("sinfo", "--noheader"), "the node is idle")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in reversed(self._processes):
            end_process(process, END_S)

    def submit(self, *words: str, environment: dict[str, str]) -> int:
        """sbatch; return the job's number."""
        said = self._run("sbatch", "--parsable", *words, environment=environment)
        return int(said.split(";")[0])

    def await_end(self, job: int, seconds: float) -> int:
        """The exit code of a job that ends within so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            fields = self.show(job)
            if fields["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return int(fields["ExitCode"].split(":")[0])
            time.sleep(LOOK_S)
        raise AssertionError(f"job {job} has not ended within {seconds:g} s: {self.show(job)}")

    def show(self, job: int) -> dict[str, str]:
        """The fields of a job."""
        shown = self._run("scontrol", "--oneliner", "show", "job", str(job))
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def signal(self, job: int, name: str) -> None:
        """Signal the batch script alone, as `--signal=B:` does."""
        self._run("scancel", "--batch", f"--signal={name}", str(job))

    def cancel(self, job: int) -> None:
        self._run("scancel", str(job))

    def _start(self, *command: str) -> None:
        with (self._directory / f"{command[0]}.out").open("ab") as out:
            self._processes.append(
                subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self._environment)
            )

    def _run(self, *command: str, check: bool = True, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False,
            env={**self._environment, **(environment or {})},
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _until(self, condition: Callable[[], object], what: str) -> None:
        logs = self._directory.glob("*.out")
        until(
            condition, lambda: "\n".join([what, *(f"{p.name}: {p.read_text()[-800:]}" for p in logs)]), READY_S, LOOK_S
        )
