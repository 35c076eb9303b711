"""`subprocess` that asks a fork server: a plain Python command costs a fork where it cost seconds of imports.

`subprocess.Popen` ends in one call, `_fork_exec`, which gets all that a child is made of and returns its id. While
forking is on, that call is ours: it hands the same to the server and returns the id of a real child of this process.
What the server cannot do as the real command would (flags, `python -c`, bash, other environments) goes the old way.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forkserver import command as commands
from tests.forkserver.process import adopt_orphans, present_umask

ROOT = Path(__file__).parents[2]
REQUEST_BYTES = 1 << 20
_start_really = subprocess._fork_exec  # type: ignore[attr-defined]


class ForkServer:
    """Our end of the socket to one server."""

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        door: str = "",
        python: str = sys.executable,
    ) -> None:
        """`environment`: what the server had when it imported its libraries; `door`: see shim.py; `python`: its own."""
        self.served, self.door, self.python, self._environment = 0, door, python, environment
        self._connection, self._lock, self._pid = connection, threading.Lock(), os.getpid()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, REQUEST_BYTES)
        adopt_orphans()

    def fork_exec(self, *all_: Any) -> int:
        """Stand for `_posixsubprocess.fork_exec`; see CPython's subprocess.py for what each argument is."""
        (args, _, close_fds, keep, cwd, env_list, p2cread, _, _, c2pwrite, _, errwrite, _, errpipe_write,
         _, start_new_session, process_group, gid, gids, uid, umask, preexec_fn, _) = all_  # fmt: skip
        words = [os.fsdecode(word) for word in args]
        if env_list is None:
            environment = dict(os.environ)
        else:
            environment = dict(os.fsdecode(pair).split("=", 1) for pair in env_list)
        cwd = os.fsdecode(cwd) if cwd is not None else os.getcwd()
        plain = close_fds and (gid, gids, uid, preexec_fn) == (None, None, None, None)
        if (
            not plain
            or os.getpid() != self._pid  # a fork of ours without a server of its own
            or not os.path.isdir(cwd)
            or commands.parse(words, self.python) is None
            or not commands.agrees(environment, self._environment)
        ):
            return int(_start_really(*all_))
        standard = [fd if fd != -1 else own for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        kept = [fd for fd in keep if fd != errpipe_write]
        request = {
            "words": words, "environment": environment, "cwd": cwd, "kept": kept,
            "session": bool(start_new_session), "group": process_group,
            "umask": umask if umask != -1 else present_umask(),
        }  # fmt: skip
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [*standard, errpipe_write, *kept])
            answer = json.loads(self._connection.recv(REQUEST_BYTES) or b'{"error": "it ended"}')
        if "error" in answer:
            raise RuntimeError(f"the fork server: {answer['error']}")
        self.served += 1
        return int(answer["pid"])

    def close(self) -> None:
        self._connection.close()


def start(python: str = sys.executable, root: Path = ROOT) -> tuple[ForkServer, subprocess.Popen[bytes]]:
    """Start a server with nothing imported yet; it imports what a command needs when it is first asked for one.

    python  the interpreter whose commands it serves
    root    a directory with `tests`, which is in front of its environment's packages
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"dips-forkserver-{uuid.uuid4().hex}"
    door.bind(f"\0{name}")  # in no directory
    door.listen()
    space = "." * 4096  # for the command lines of its children, see set_command_line
    # Threads would not be forked: no OpenMP's, and not that of pyarrow's allocator, which transformers imports.
    single = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    environment = {**os.environ, **single, "PYTHONPATH": str(root)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # it serves others, too, and `make coverage` names them by it
    process = subprocess.Popen(
        [python, "-m", "tests.forkserver.server", str(its.fileno()), str(door.fileno()), space],
        cwd=root, env=environment, stdin=subprocess.DEVNULL, pass_fds=[its.fileno(), door.fileno()],
    )  # fmt: skip
    its.close()
    door.close()
    return ForkServer(ours, environment, name, python), process


@contextmanager
def forking(server: ForkServer) -> Iterator[None]:
    """Within, plain commands of the server's interpreter are forked; others are started as before."""
    before = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_exec(*all_: Any) -> int:
        ours = server.python in map(os.fsdecode, all_[0])  # by `ip netns exec`, it is not the first word
        return int((server.fork_exec if ours else before)(*all_))

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


@contextmanager
def real_commands() -> Iterator[None]:
    """Within, every command is started as it stands."""
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = _start_really  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]
