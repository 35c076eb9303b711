"""A daemon in this process, from its start to its end: it serves what its section names, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import structlog
import yaml

from dips.config import RunFile, load_run
from dips.master import app as master_app
from dips.master import genesis, waiting
from dips.master.ledger import Ledger
from dips.slave import app as slave_app
from dips.transport import control
from dips.transport.endpoints import master_peer
from dips.wire import messages
from dips.wire.generated.operator_pb2_grpc import OperatorServiceStub
from tests.integration.cluster_harness import free_port
from tests.served import LONGEST_S, served
from tests.unit.master.test_ledger_mirror import TENSORS
from tests.waiting import eventually

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


async def test_a_slave_on_ipv6_is_called_by_an_address(config: RunFile) -> None:
    """It told the master `::1:PORT`, where nobody answers: it registered, and was lost at its first order."""
    section = config.slaves[0].model_copy(update={"listen": "[::1]:0", "lanes": 1, "http": None})
    async with served(lambda ready: slave_app.serve(config, section, LOG, ready)) as address:
        assert address.startswith("[::1]:")


async def test_a_master_that_waited_ends_at_once_while_it_reads_its_ledger(
    config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for its ledger, as a standby's, left SIGTERM to the kernel, which drops it for a first process."""
    path, addresses, handlers = genesis.ledger_path(config), list[str](), list[Any]()
    check = master_app._check_agrees

    def read(config: RunFile, ledger: Ledger) -> Any:
        handlers.append(signal.getsignal(signal.SIGTERM))
        return check(config, ledger)

    monkeypatch.setattr(master_app, "_check_agrees", read)
    monkeypatch.setattr("os.getpid", lambda: 1)
    former = signal.getsignal(signal.SIGTERM)
    try:
        aside = path.rename(tmp_path / "aside")
        serving = asyncio.create_task(SERVE["master"](config, tmp_path / "run.yaml", addresses.append))
        await eventually(lambda: addresses or serving.done())
        aside.rename(path)
        await eventually(lambda: addresses[1:] or serving.done())
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(serving, LONGEST_S) == 0
    finally:
        signal.signal(signal.SIGTERM, former)
    assert handlers != [signal.SIG_DFL]


async def test_a_hangup_ends_no_master_that_waits(config: RunFile, tmp_path: Path) -> None:
    """For its first ledger, or as a standby: SIGHUP, which hurries one that serves, ended it, and systemd takes that
    for an orderly end."""
    genesis.ledger_path(config).unlink()
    async with served(lambda ready: SERVE["master"](config, tmp_path / "run.yaml", ready)):
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGHUP)


async def test_a_hangup_ends_no_slave_that_starts(
    config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its kernels compile, for seconds, it was ended like a master that waits."""
    handlers = list[Any]()
    monkeypatch.setattr(slave_app.kernels, "warm_up", lambda: handlers.append(signal.getsignal(signal.SIGHUP)))
    async with served(lambda ready: SERVE["slave"](config, tmp_path / "run.yaml", ready)):
        assert handlers[0] is not signal.SIG_DFL


async def test_a_run_begins_with_the_run_file_of_its_beginning(config: RunFile, tmp_path: Path) -> None:
    """It was edited while the master waited, which ended with 78 over a file that was right, or began the run with what
    the file had said before."""
    file, path, addresses = tmp_path / "run.yaml", genesis.ledger_path(config), list[str]()
    path.unlink()
    content = yaml.safe_load(file.read_text())
    content["slaves"][0]["name"], content["shared"]["outer"] = "s1", {"lr": 0.5}
    serving = asyncio.create_task(SERVE["master"](config, file, addresses.append))
    await eventually(lambda: addresses or serving.done())
    file.write_text(yaml.safe_dump(content))
    async with control.open_channel(master_peer(addresses[0], None)) as channel:
        ask = messages.to_proto(waiting.propose_run(TENSORS, config.shared.grouping))
        assert (await OperatorServiceStub(channel).Begin(ask, timeout=10)).HasField("acknowledged")
    await eventually(lambda: addresses[1:] or serving.done())
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(serving, LONGEST_S) == 0
    with closing(Ledger.open(path, readonly=True)) as ledger:
        row = ledger.run_row()
    assert [name for name, _ in row.placement] == ["s1"]
    assert row.config_digest == load_run(file).shared.digest != config.shared.digest
