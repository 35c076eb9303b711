"""Ends a rank whose agent is gone (docs/rationale.md#27): no other process may act for its cluster, so it must
not continue.

torchrun is signalled when the agent dies (launch.py) and ends its workers; but it may be killed with it, or hang,
and on other hosts the agent did not start it. So every rank watches its agent in a thread that sleeps in the kernel: by
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

FIND_S = 60.0  # time to reach the agent: hosts of one job do not start at the same moment
GRACE_S = 10.0  # between SIGTERM to this process and its end: time for exit handlers

_watched = False


def watch_agent(address: Address, poll_s: float) -> Callable[[], None]:
    """End this process when its agent ends; return a function that stops the watch.

    On a host other than the agent's, raises Unavailable if it cannot be reached within FIND_S, Denied if it is not this
    job's.
    """
    if os.environ.get(AGENT_HOME) == process_home():
        _watch_process(int(os.environ[AGENT_PID]))
        return lambda: None  # the agent waits for the ranks' launcher, so it ends after them
    if isinstance(address, OnThisHost):
        return lambda: None  # the agent's process is unknown here; rank 0 will find its connection closed
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
    """Start the watch, once per process for any number of OuterLoops."""
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
    """Send SIGTERM to this process, then exit hard after GRACE_S: a rank blocked in a collective does not handle the
    signal.
    """
    for stream in (sys.stderr, sys.stdout):  # standard error may be a pipe to the agent that is gone
        with suppress(OSError):
            stream.write(f"dips: the agent {which} is gone: this rank ends\n")
            stream.flush()
            break
    threading.Thread(target=_exit_after_grace, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _exit_after_grace() -> None:
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)
