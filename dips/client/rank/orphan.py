"""A rank whose agent is gone ends by itself (why.md 27): nobody else may speak for its cluster, and it must not go on.

torchrun dies with the agent (launch.py) and ends its workers; but it may be killed together with the agent, or hang,
and on other hosts somebody else started it. So every rank holds its agent in a thread that sleeps in the kernel: by a
pidfd on the agent's machine, elsewhere by a line on which nothing is said and which ends with the agent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from dips.client.ipc.address import Address, OnThisHost
from dips.client.ipc.process import AGENT_HOME, AGENT_PID, home
from dips.client.rank.line import Line

FIND_S = 60.0  # hosts of one job do not start at the same moment
GRACE_S = 10.0  # between SIGTERM to ourselves and the end: an exit handler may write what it must

_watched = False


def watch_agent(address: Address, poll_s: float) -> Callable[[], None]:
    """End this process when its agent ends; return what ends the watch, for a rank that is done with its agent.

    On another host than the agent's, raise Unavailable if it cannot be found there within FIND_S, Denied if it is not
    ours.
    """
    if os.environ.get(AGENT_HOME) == home():
        _watch_process(int(os.environ[AGENT_PID]))
        return lambda: None  # it outlives its ranks: it waits for their launcher
    if isinstance(address, OnThisHost):
        return lambda: None  # nobody says which process it is; rank 0 finds the line closed
    line, done = Line.wait_for(address, poll_s, FIND_S), threading.Event()

    def wait() -> None:
        line.outlive()
        if not done.is_set():
            _end(f"at {address}")

    def stop() -> None:
        done.set()
        line.close()

    threading.Thread(target=wait, name="agent-watch", daemon=True).start()
    return stop


def _watch_process(pid: int) -> None:
    """Once for a process."""
    global _watched
    if _watched:
        return
    _watched = True
    try:
        agent = os.pidfd_open(pid)
    except ProcessLookupError:
        _end(f"(process {pid})")
        return

    def wait() -> None:
        select.select([agent], [], [])
        _end(f"(process {pid})")

    threading.Thread(target=wait, name="agent-watch", daemon=True).start()


def _end(which: str) -> None:
    """SIGTERM first; a rank that stands in a collective that will never end does not hear it."""
    sys.stderr.write(f"dips: the agent {which} is gone: this rank ends\n")
    threading.Thread(target=_end_hard, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_hard() -> None:
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)
