"""What Linux can tell and do about processes: names, command lines, who is below whom."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dips.client.agent import trainer

SERVER_NAME = "dips-forkserver"  # at most 15 bytes, in /proc/PID/comm
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")  # where `ip netns add` puts them
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
MARK = "DIPS_TEST_RUN"  # in the environment of whatever a test starts

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of what is left behind below this process; a forked program's real parent exits at once."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_namespace(name: str) -> None:
    """Go on in a network namespace that `ip netns add` made; its sysfs is not mounted, nothing here reads that."""
    with (NAMESPACES / name).open("rb") as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def set_name(name: str) -> None:
    _libc.prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()), 0, 0, 0)


def set_command_line(words: Sequence[str]) -> None:
    """Write over the memory that /proc/self/cmdline shows; what is longer than the first command line is cut."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    text = b"\0".join(word.encode() for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def present_umask() -> int:
    """Of this process; `os.umask` could only be asked by changing it, for all threads."""
    return int(Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0], 8)


def is_server(pid: int) -> bool:
    """Whether a process forks for others; it is no part of what is under test."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip() == SERVER_NAME
    except OSError:
        return False


def without_servers(below: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
    """The same list of processes below one, but for fork servers."""
    return lambda root: [pid for pid in below(root) if not is_server(pid)]


descendants = without_servers(trainer.list_descendants)


def reap_servers() -> None:
    """Collect dead fork servers of processes that were killed; they became our children."""
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        with suppress(OSError):
            state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" and is_server(pid):
                os.waitpid(pid, os.WNOHANG)
