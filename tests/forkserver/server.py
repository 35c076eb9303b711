"""The fork server, `python -m tests.forkserver.server FD DOOR SPACE`: it forks itself into what it is asked for.

It has one thread, so that a fork of it is a whole process, and imports what a program imports without running it. A
program is forked twice: its parent ends at once, and the kernel makes it a child of who asked, which adopts orphans.
So ids, exit codes, signals, sessions and the tree of processes are as if the command had been started.

Who is no child of the test, a command in a script of bash, asks at the door DOOR, a listening socket (shim.py). What is
forked for him is the child of a keeper, which tells him how it ended, and kills it when he is killed.

A program that starts others (the agent, the master, torchrun) gets a server of its own, a fork from before its first
thread. Every server ends when the process that it serves does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

from dips.client.agent import trainer
from tests.forkserver import command as commands
from tests.forkserver import process
from tests.forkserver.client import REQUEST_BYTES, ForkServer
from tests.forkserver.program import Become, end, run

STARTS_OTHERS = {"dips.cli", "dips.client.app", "dips.master.app", "torch.distributed.run"}
IMPORT_ONLY = ("dips.", "torch.")  # entry points that do nothing when they are imported
TEST = "PYTEST_CURRENT_TEST"
FREE_FROM = 256  # numbers of descriptors from here on are nobody's wish
_environment = dict(os.environ)  # of the first server: what libraries read when they were imported
_imported = set[Any]()


def main(connection: socket.socket, door: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trainer.list_descendants = process.descendants  # the agent kills whatever is left below it, but not its server
    request = serve(connection, door)
    while True:  # from here on in a forked program, or again in a server of it
        enter(request)
        program = commands.parse(request["words"])
        assert program is not None
        if program.entry in STARTS_OTHERS:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                ours.close()
                leave(request)
                request = serve(its)
                continue
            its.close()
            subprocess._fork_exec = ForkServer(ours, _environment).fork_exec  # type: ignore[attr-defined]
        try:
            run(program)
        except Become as other:
            request = {**request, "words": other.words, "fds": []}
            continue
        return


def serve(connection: socket.socket, door: socket.socket | None = None) -> dict[str, Any]:
    """Fork whoever is asked for; return, in each of them, what it was asked to be."""
    process.die_with_parent()
    process.set_name(process.SERVER_NAME)
    process.set_command_line([process.SERVER_NAME])
    os.setpgid(0, 0)  # no signal to the group of what we serve is for us
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        asker = connection
        if door is not None and connection not in select.select([connection, door], [], [])[0]:
            asker, _ = door.accept()
        message, fds, _, _ = socket.recv_fds(asker, REQUEST_BYTES, 64)
        if not message:
            os._exit(0)  # who asked is gone
        request: dict[str, Any] = json.loads(message)
        try:
            with chdir(request["cwd"]):  # of which a script's path may be
                prepare(request["words"])
            if (many := process.threads()) != 1:
                raise RuntimeError(f"{many} threads after the imports of {request['words']}: a fork would be broken")
            pid = fork_twice() if asker is connection else fork_kept(asker, fds)
        except Exception as error:  # noqa: BLE001  sent to who asked, where the test fails
            answer: dict[str, Any] = {"error": repr(error)}
        else:
            if pid == 0:
                connection.close()
                if door is not None:
                    door.close()
                return {**request, "fds": fds}
            answer = {"pid": pid}
        for fd in fds:
            os.close(fd)
        if asker is connection or "error" in answer:
            asker.send(json.dumps(answer).encode())
        if asker is not connection:
            asker.close()
            reap_keepers()


def fork_twice() -> int:
    """Return the id of a grandchild that is nobody's child but his who adopts it; in it, return 0."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        parent = os.getpid()
        grandchild = os.fork()
        if grandchild:
            os.write(write, str(grandchild).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        while os.getppid() == parent:
            time.sleep(0.0005)
        return 0
    os.close(write)
    pid = int(os.read(read, 32))
    os.close(read)
    os.waitpid(between, 0)
    return pid


def fork_kept(asker: socket.socket, fds: Sequence[int]) -> int:
    """Fork a keeper and a program below it; return the keeper's id, and 0 in the program."""
    if keeper := os.fork():
        return keeper
    if (pid := os.fork()) == 0:
        asker.close()
        return 0
    for fd in fds:
        os.close(fd)
    asker.send(json.dumps({"pid": pid}).encode())
    ended = os.pidfd_open(pid)
    if asker in select.select([asker, ended], [], [])[0]:  # it says no more: it was killed
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        asker.send(json.dumps({"code": code}).encode())
    os._exit(0)


def reap_keepers() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def prepare(words: Sequence[str]) -> None:
    """Import what the programs of a command line import, each once; what is missing they will miss themselves."""
    gc.disable()  # imports make much and leave little to collect
    for program in commands.programs(words):
        if program.script:
            wanted = list(commands.imported_by(Path(program.script)))
            if any(module == "torch" for module, _ in wanted):
                wanted.append(("torch._dynamo", ()))  # the first step of any optimizer imports it
        else:
            wanted = [(program.entry, ())] if program.entry.startswith(IMPORT_ONLY) else []
        for module, names in wanted:
            if (module, names) not in _imported:
                _imported.add((module, names))
                with suppress(ImportError):
                    _import(module, names)
    if "dips.outer.kernels" in sys.modules and "kernels" not in _imported:
        _imported.add("kernels")
        sys.modules["dips.outer.kernels"].warm_up()
    for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        finalizer.atexit = False  # else torch would take every operator of every library apart at each program's end
    gc.freeze()  # a collection in a fork would write to, and so copy, every page of every library
    gc.enable()


def _import(module: str, names: Sequence[str]) -> None:
    imported = importlib.import_module(module)
    for name in names:
        if not hasattr(imported, name):
            importlib.import_module(f"{module}.{name}")


def enter(request: dict[str, Any]) -> None:
    """Become what was asked for: name, session, directory, environment, descriptors, handlers of signals."""
    process.set_name("python")
    words = request["words"]
    process.set_command_line(words[4:] if words[:3] == commands.IN_NAMESPACE else words)
    if not request["fds"]:
        return  # it called exec: the rest is as it was
    if request["session"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"] if request["group"] != -1 else os.getpgid(os.getppid()))
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = commands.parse(request["words"])
    if program is not None and program.namespace:
        process.enter_namespace(program.namespace)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    coverage = sys.modules.get("coverage")  # loaded in the project's environment, started under `make coverage`
    if TEST in os.environ and coverage is not None and (measured := coverage.Coverage.current()):
        measured.switch_context(os.environ[TEST])
    set_descriptors(request["fds"], request["kept"])


def set_descriptors(fds: Sequence[int], kept: Sequence[int]) -> None:
    """Put what came to 0, 1, 2 and to the numbers in `kept`; close the fourth, by which `subprocess` sees us start."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FREE_FROM) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip([*high[:3], *high[4:]], [0, 1, 2, *kept], strict=True):
        os.dup2(fd, number)
    for fd in high:
        os.close(fd)


def leave(request: dict[str, Any]) -> None:
    """Let go of a program's descriptors: a pipe that we held would not end with it."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for number in (null, *request["kept"]):
        os.close(number)


if __name__ == "__main__":
    end(lambda: main(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])))
