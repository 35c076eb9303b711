"""A rank whose agent is gone ends itself (docs/rationale.md#27): no other process may act for its cluster, so it must
not go on.

torchrun dies with the agent (launch.py) and ends its workers; but it may be killed together with the agent, or hang,
and on other hosts something else started it. So every rank watches its agent in a thread that sleeps in the kernel: by
a pidfd on the agent's machine, elsewhere by a connection that carries no messages and is closed when the agent ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dips.client.ipc.address import Address, OnThisHost
from dips.client.ipc.process import AGENT_HOME, AGENT_PID, process_home
from dips.client.rank.agent_connection import AgentConnection

FIND_S = 60.0  # hosts of one job do not start at the same moment
GRACE_S = 10.0  # between SIGTERM to this process and its end: time for exit handlers

_watched = False


def watch_agent(address: Address, poll_s: float) -> Callable[[], None]:
    """End this process when its agent ends; return a function that stops the watch.

    On another host than the agent's, raise Unavailable if it cannot be reached within FIND_S, Denied if it is not this
    job's.
    """
    if os.environ.get(AGENT_HOME) == process_home():
        _watch_process(int(os.environ[AGENT_PID]))
        return lambda: None  # the agent waits for the ranks' launcher, so it ends after them
    if isinstance(address, OnThisHost):
        return lambda: None  # its process is unknown here; rank 0 will find its connection closed
    connection, done = AgentConnection.connect_within(address, poll_s, FIND_S), threading.Event()

    def wait_for_end() -> None:
        connection.wait_until_closed()
        if not done.is_set():
            _end_process(f"at {address}")

    def stop_watching() -> None:
        done.set()
        connection.close()

    threading.Thread(target=wait_for_end, name="agent-watch", daemon=True).start()
    return stop_watching


def _watch_process(pid: int) -> None:
    """Start one watch for this process, however many OuterLoops it makes."""
    global _watched
    if _watched:
        return
    _watched = True
    try:
        agent = os.pidfd_open(pid)
    except ProcessLookupError:
        _end_process(f"(process {pid})")
        return

    def wait_for_exit() -> None:
        select.select([agent], [], [])
        _end_process(f"(process {pid})")

    threading.Thread(target=wait_for_exit, name="agent-watch", daemon=True).start()


def _end_process(which: str) -> None:
    """SIGTERM first; a rank that is blocked in a collective that never ends does not handle it, so then exit hard."""
    for stream in (sys.stderr, sys.stdout):  # standard error went through the agent
        with suppress(OSError):
            stream.write(f"dips: the agent {which} is gone: this rank ends\n")
            stream.flush()
            break
    threading.Thread(target=_exit_after_grace, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _exit_after_grace() -> None:
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)
