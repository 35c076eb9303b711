"""A daemon in this process, from its start to its end: it serves what its section names, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import structlog
import yaml

from dips.config import RunFile, load_run
from dips.master import app as master_app
from dips.master import genesis
from dips.slave import app as slave_app
from tests.integration.cluster_harness import free_port
from tests.served import LONGEST_S, served
from tests.unit.master.test_ledger_mirror import TENSORS

LOG = structlog.get_logger()
Serve = Callable[[RunFile, Path, Callable[[str], None]], Coroutine[Any, Any, int]]

SERVE: dict[str, Serve] = {
    "master": lambda config, file, ready: master_app.serve(config, file, LOG, ready),
    "slave": lambda config, file, ready: slave_app.serve(config, config.slaves[0], LOG, ready, file),
}


def read(url: str) -> bytes:
    with urlopen(url, timeout=LONGEST_S) as answer:
        body: bytes = answer.read()
    return body


@pytest.fixture(name="config")
def made_config(tmp_path: Path) -> RunFile:
    """A run that has begun."""
    http = {"http": f"127.0.0.1:{free_port()}", "listen": f"127.0.0.1:{free_port()}"}
    slave = {"name": "s0", "master": "127.0.0.1:1", "directory": "s0", "initial_model": "m/initial", **http}
    content = {"shared": {"run": "r"}, "master": {"directory": "m", **http}, "slaves": [slave], "tls": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    config = load_run(tmp_path / "run.yaml")
    genesis.make_run(config, TENSORS)
    return config


@pytest.mark.parametrize("daemon", SERVE)
async def test_a_daemon_serves_and_leaves_nothing(daemon: str, config: RunFile, tmp_path: Path) -> None:
    async with served(lambda ready: SERVE[daemon](config, tmp_path / "run.yaml", ready)) as address:
        assert b'run="r"' in await asyncio.to_thread(read, f"http://{config.master.http}/metrics")
        if daemon == "master":
            assert b'"run"' in await asyncio.to_thread(read, f"http://{config.master.http}/api/state")
    assert asyncio.all_tasks() == {asyncio.current_task()}
    host, port = address.rsplit(":", 1)
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):
        again.connect((host, int(port)))


async def test_a_hangup_ends_no_master_that_waits(config: RunFile, tmp_path: Path) -> None:
    """For its first ledger, or as a standby: SIGHUP, which hurries one that serves, ended it, and systemd takes that
    for an orderly end."""
    genesis.ledger_path(config).unlink()
    async with served(lambda ready: SERVE["master"](config, tmp_path / "run.yaml", ready)):
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGHUP)
