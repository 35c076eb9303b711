"""A rank whose agent is gone ends by itself (why.md 27): nobody else may speak for its cluster, and it must not go on.

torchrun dies with the agent (launch.py) and ends its workers; but it may be killed together with the agent, or hang. So
every rank on the agent's machine holds the agent by a pidfd, in a thread that sleeps in the kernel. Ranks on other
machines are started by others and end with the job: their rank 0 finds the line closed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

AGENT_PID = "DIPS_AGENT_PID"
GRACE_S = 10.0  # between SIGTERM to ourselves and the end: an exit handler may write what it must

_watched = False


def watch_agent() -> None:
    """End this process when the agent named by DIPS_AGENT_PID ends; once for a process, nothing without the name."""
    global _watched
    named = os.environ.get(AGENT_PID, "")
    if _watched or not named.isdigit():
        return
    _watched = True
    try:
        agent = os.pidfd_open(int(named))
    except ProcessLookupError:
        _end(int(named))
        return
    threading.Thread(target=_wait, args=(agent, int(named)), name="agent-watch", daemon=True).start()


def _wait(agent: int, pid: int) -> None:
    select.select([agent], [], [])
    _end(pid)


def _end(pid: int) -> None:
    """SIGTERM first; a rank that stands in a collective that will never end does not hear it."""
    sys.stderr.write(f"dips: the agent (process {pid}) is gone: this rank ends\n")
    threading.Thread(target=_end_hard, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_hard() -> None:
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)
