"""Starts a program under torchrun on hosts that come and go, as srun does.

    start_on_hosts.py DIRECTORY WORDS...    torchrun WORDS... on each host that has a file in DIRECTORY

In the words {host} stands for the host's name, which is HOST in the environment. A host whose file comes is given a
torchrun, which joins the others; one whose file goes is killed with all its processes. All have ended when this ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"),
    *("--max-restarts", "0", "--local-addr", "127.0.0.1", "--rdzv-backend", "c10d"),
    *("--rdzv-conf", "last_call_timeout=3,join_timeout=60"),  # seconds; the first is what a late host is waited for
]
GRACE_S = 20.0  # for the torchruns of other hosts, after one has ended


def run_hosts(directory: Path, words: list[str]) -> int:
    """Run torchrun on each host until all have ended, or GRACE_S after the first; return 0 if all ended well."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    place, codes = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", port], list[int]()
    running, until = dict[str, subprocess.Popen[bytes]](), float("inf")
    while time.monotonic() < until and (running or not codes):
        there = {path.name for path in directory.iterdir()}
        for host in there - running.keys() if not codes else ():
            given = [word.replace("{host}", host) for word in words]
            running[host] = subprocess.Popen([*TORCHRUN, *place, *given], env={**os.environ, "HOST": host})
        for host in running.keys() - there:
            kill_host(running.pop(host))
        for host in [host for host, process in running.items() if process.poll() is not None]:
            codes.append(running.pop(host).returncode)
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    for process in running.values():
        kill_host(process)
    return int(any(codes))


def kill_host(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to torchrun and its ranks, as when a machine loses its power."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()


if __name__ == "__main__":
    raise SystemExit(run_hosts(Path(sys.argv[1]), sys.argv[2:]))
