"""Starts the trainer so that it does not outlive its agent: `python -m dips.client.agent.launch AGENT_PID -- COMMAND…`.

The agent has threads (gRPC), so it must not run Python between fork and exec; this process does, and then becomes the
command. The kernel sends SIGTERM when the agent dies for any reason, and torchrun then ends its workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_START = 127  # exit code, as a shell's


def set_process_attribute(option: int, value: int) -> None:
    """Set an attribute of this process by prctl. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")


def main(argv: list[str]) -> None:
    agent, dashes, command = int(argv[1]), argv[2], argv[3:]
    assert dashes == "--" and command
    set_process_attribute(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != agent:  # the agent died before prctl
        raise SystemExit(128 + signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: cannot start {command[0]!r}: {error.strerror}\n")
        raise SystemExit(CANNOT_START) from error


if __name__ == "__main__":
    main(sys.argv)
