"""Fixtures: forked commands for a whole file, real ones for a test or a file that says so."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.forkserver import client
from tests.forkserver.process import MARK, reap_servers

GUARD, SHIM = (Path(__file__).with_name(name) for name in ("guard.py", "shim.py"))


@contextmanager
def guarded() -> Iterator[None]:
    """Whatever is started within is killed when this process, or the pytest that leads it, is gone."""
    os.environ[MARK] = uuid.uuid4().hex
    leaders = [os.getppid()] if "PYTEST_XDIST_WORKER" in os.environ else []
    read, write = os.pipe()
    words = [str(read), f"{MARK}={os.environ[MARK]}", *map(str, leaders)]
    guard = subprocess.Popen(
        [sys.executable, "-S", "-E", str(GUARD), *words],
        env={}, pass_fds=[read], stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        guard.wait()


_started: list[tuple[client.ForkServer, subprocess.Popen[bytes]]] = []


def _server() -> client.ForkServer:
    """Started with the first file that needs one."""
    if not _started:
        _started.append(client.start())
    return _started[0][0]


@pytest.fixture(scope="session")
def end_of_servers() -> Iterator[None]:
    yield
    while _started:
        server, process = _started.pop()
        server.close()
        process.wait()


@pytest.fixture(scope="module", autouse=True)
def forked_commands(request: pytest.FixtureRequest, end_of_servers: None) -> Iterator[None]:
    """Plain Python commands of a file are forks; not if it is marked `real_commands`."""
    real = request.node.get_closest_marker("real_commands")
    with nullcontext() if real else client.forking(_server()):
        yield
    reap_servers()


@pytest.fixture
def python_of_scripts(request: pytest.FixtureRequest) -> str:
    """What a script of bash writes for `python`, if its plain commands are to be forks, too."""
    if request.node.get_closest_marker("real_commands"):
        return sys.executable
    return shlex.join([sys.executable, "-S", "-E", str(SHIM), _server().door, sys.executable])


@pytest.fixture(autouse=True)
def real_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test with the mark `real_commands` starts every command as it stands."""
    with client.real_commands() if request.node.get_closest_marker("real_commands") else nullcontext():
        yield
