"""`dips seed` begins a run at a master that has no ledger: the same run as `dips init` makes, or none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import structlog
from grpc.aio import AioRpcError
from structlog.testing import capture_logs

from dips.config import RunFile, host_port
from dips.errors import ConfigError, CorruptManifest, RemoteProtocolError, UnavailableMaster
from dips.master import waiting
from dips.master.genesis import BEGINNING, INITIAL_SHARED, INITIAL_VERSION, ledger_path, make_run
from dips.master.ledger import Ledger, hold_ledger
from dips.master.waiting import (
    BYTES_PER_LAYER,
    ModelAwaiting,
    _begin_run,
    _is_made,
    begin_run,
    check_repeated,
    propose_run,
    wait_for_ledger,
)
from dips.protocol.grouping import PLAIN_GROUPING
from dips.transport import control
from dips.transport.endpoints import master_peer
from dips.wire import messages
from dips.wire.generated import cluster_pb2, slave_pb2, status_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.operator_pb2_grpc import OperatorServiceStub
from dips.wire.generated.slave_pb2_grpc import SlaveServiceStub
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from tests.unit.master.test_genesis import model, run_file


def wall() -> float:
    return 0.0


def test_the_run_is_the_one_that_dips_init_makes(tmp_path: Path) -> None:
    """Digests, norms, placement and targets alike; only the model's bytes are not at the master."""
    made = make_run(run_file(tmp_path / "init"), model())
    config = run_file(tmp_path / "seed")
    (tmp_path / "seed" / BEGINNING).mkdir(parents=True)  # of a master that died over it
    assert begin_run(config, propose_run(model(), PLAIN_GROUPING), wall) == made
    ledger = Ledger.open(ledger_path(config), readonly=True)
    assert ledger.run_row() == made
    ledger.close()
    assert (tmp_path / "seed" / INITIAL_SHARED).exists() and not (tmp_path / "seed" / INITIAL_VERSION).exists()
    assert not (tmp_path / "seed" / BEGINNING).exists()


def test_nobody_is_told_to_seed_what_has_its_ledger(tmp_path: Path) -> None:
    """From Begin until the master serves is a moment, in which it answers still."""
    config = run_file(tmp_path)
    awaiting = ModelAwaiting(lambda: config)
    unready = pytest.raises(UnavailableMaster, match="run 'toy' waits for the first model: run `dips seed`")
    with unready:
        awaiting.put_event(None)
    for call in (awaiting.ask_core, awaiting.take_heartbeat):
        with unready:
            asyncio.run(call(None))
    begin_run(config, propose_run(model(), PLAIN_GROUPING), wall)
    with pytest.raises(UnavailableMaster, match="run 'toy' begins: its master cannot be reached for a moment"):
        awaiting.put_event(None)


def test_a_wrong_run_file_begins_no_run_and_is_not_read_for_each_call(tmp_path: Path) -> None:
    """The run began with what the file had said before it was edited; and each call of a cluster or slave read it,
    which takes 20 ms, and logged what is wrong with it.
    """
    files, reads = [run_file(tmp_path)], list[int]()

    def read() -> RunFile:
        reads.append(1)
        if not files:
            raise ConfigError("dips.yaml: not now")
        return files[0]

    awaiting = ModelAwaiting(read)
    before = awaiting.build_view()
    kept = files.pop()
    assert awaiting.build_view() == before and len(reads) == 3
    for _ in range(10):
        with pytest.raises(UnavailableMaster, match="run 'toy' waits"):
            awaiting.put_event(None)
    assert len(reads) == 3
    with pytest.raises(ConfigError, match="not now"):
        _begin_run(read, propose_run(model(), PLAIN_GROUPING))
    assert not ledger_path(kept).exists()


def test_a_run_begins_once(tmp_path: Path) -> None:
    """The same model again is no news, another one is refused by the names of its layers."""
    config, proposed = run_file(tmp_path), propose_run(model(), PLAIN_GROUPING)
    row = begin_run(config, proposed, wall)
    check_repeated(row, proposed)
    other = model()
    other["layers.0.b"] = other["layers.0.b"] + 1
    with pytest.raises(ConfigError, match=r"got another: they differ in layers\.0; a new run"):
        check_repeated(row, propose_run(other, PLAIN_GROUPING))
    with pytest.raises(ConfigError, match="a ledger is here already"):
        begin_run(config, proposed, wall)


def spelled(text: str) -> dict[str, Any]:
    """The changes that make a proposal of this manifest."""
    return {"packed": zlib.compress(text.encode()), "digest": hashlib.sha256(text.encode()).hexdigest()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"genesis": ("0" * 32,)}, "expected 4 digests and norms, got 1 and 4"),
        ({"genesis_norms": (1.0,)}, "expected 4 digests and norms, got 4 and 1"),
        ({"genesis": (*["0" * 32] * 3, "x" * 32)}, "32 hexadecimal digits"),
        ({"genesis_norms": (1.0, 1.0, 1.0, float("inf"))}, "finite"),
        (spelled('{"format": 1, "layers": []}'), "manifest"),
        (spelled('{"format": 1, "layers": [{"name": "a", "parameters": [["b.w", [2]]]}]}'), "groups parameters"),
        ({"packed": b"junk"}, "cannot be unpacked"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Before anything is written."""
    proposed = replace(propose_run(model(), PLAIN_GROUPING), **changes)
    with pytest.raises((RemoteProtocolError, CorruptManifest), match=said):
        begin_run(run_file(tmp_path / "m"), proposed, wall)
    assert not (tmp_path / "m").exists()


def test_more_slaves_than_layers(tmp_path: Path) -> None:
    """Refused as `dips init` does."""
    with pytest.raises(ConfigError):
        begin_run(run_file(tmp_path / "m", slaves=9), propose_run(model(), PLAIN_GROUPING), wall)
    assert not ledger_path(run_file(tmp_path / "m")).exists()


# ---- who waits ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def waiting_master(config: RunFile) -> AsyncIterator[tuple[str, asyncio.Task[str | None]]]:
    """A master without a ledger in this process: its address, and what ends with it; no task of it is left."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    wait = wait_for_ledger(lambda: config, None, None, structlog.get_logger(), ready.set_result, lambda *_: None)
    task = asyncio.create_task(wait)
    try:
        yield await ready, task
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_proposal_ends_the_wait_and_frees_the_port(tmp_path: Path) -> None:
    """The master goes on at the same address, so the server that waited must have left it."""
    config = run_file(tmp_path)
    config = config.model_copy(update={"master": config.master.model_copy(update={"listen": "127.0.0.1:0"})})
    async with waiting_master(config) as (address, task):
        async with control.open_channel(master_peer(address, None)) as channel:
            ask = messages.to_proto(propose_run(model(), PLAIN_GROUPING))
            assert (await OperatorServiceStub(channel).Begin(ask, timeout=10)).HasField("acknowledged")
        assert await asyncio.wait_for(task, 10) == address
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(host_port(address))
    assert ledger_path(config).exists()


async def test_a_master_that_waits_says_so_until_it_is_stopped(tmp_path: Path) -> None:
    """To clusters and slaves, to who looks and to who probes: not that it has no such service."""
    config, waits = run_file(tmp_path), "waits for the first model"
    update = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0"}
    config = config.model_copy(update={"master": config.master.model_copy(update=update)})
    with capture_logs() as logged:
        async with waiting_master(config) as (address, task):
            async with control.open_channel(master_peer(address, None)) as channel:
                joins = ClusterServiceStub(channel).Join(cluster_pb2.ClusterJoined(), timeout=10)
                registers = SlaveServiceStub(channel).Register(slave_pb2.SlaveRegistered(), timeout=10)
                for call in (joins, registers):
                    with pytest.raises(AioRpcError, match=f"run 'toy' {waits}"):
                        await call
                seen = await StatusServiceStub(channel).Status(status_pb2.StatusRequest(), timeout=10)
                assert waits in json.loads(seen.json)["waiting"]
            (port,) = (line["address"] for line in logged if line["event"] == "http")
            with pytest.raises(HTTPError) as unready:
                await asyncio.to_thread(urlopen, f"http://{port}/readyz", timeout=10)
            with unready.value as answer:
                assert waits in json.load(answer)["reason"]
            signal.raise_signal(signal.SIGTERM)
            assert await asyncio.wait_for(task, 10) is None


def test_a_ledger_is_there_when_its_maker_is_done(tmp_path: Path) -> None:
    """`dips init` holds it until it is whole."""
    config = run_file(tmp_path)
    assert not _is_made(config)
    with hold_ledger(ledger_path(config)):
        ledger_path(config).touch()
        assert not _is_made(config)
    assert _is_made(config)


def test_a_run_of_the_same_name_in_a_mirror_is_not_begun_over(tmp_path: Path) -> None:
    """And the mirror of one that begins has its options, as `dips init` leaves them."""
    (tmp_path / "mirror").mkdir()
    mirrored = [run_file(tmp_path / name) for name in ("first", "second")]
    mirrored = [c.model_copy(update={"master": c.master.model_copy(update={"mirror": str(tmp_path / "mirror")})})
                for c in mirrored]  # fmt: skip
    begin_run(mirrored[0], propose_run(model(), PLAIN_GROUPING), wall)
    assert list((tmp_path / "mirror").rglob("shared.json"))
    with pytest.raises(ConfigError, match="a run of the name 'toy' lies in"):
        begin_run(mirrored[1], propose_run(model(), PLAIN_GROUPING), wall)
    assert not ledger_path(mirrored[1]).exists()


def test_a_run_whose_begin_failed_begins_when_it_is_repeated(tmp_path: Path) -> None:
    """A disk that was full when the ledger was to be written: the mirror holds nothing yet that was a run."""
    (tmp_path / "mirror").mkdir()
    config = run_file(tmp_path / "m")
    config = config.model_copy(update={"master": config.master.model_copy(update={"mirror": str(tmp_path / "mirror")})})
    (tmp_path / "m").mkdir()
    (in_the_way := tmp_path / "m" / BEGINNING).touch()
    with pytest.raises(OSError, match=BEGINNING):
        begin_run(config, propose_run(model(), PLAIN_GROUPING), wall)
    in_the_way.unlink()
    begin_run(config, propose_run(model(), PLAIN_GROUPING), wall)
    assert ledger_path(config).exists() and list((tmp_path / "mirror").rglob("shared.json"))


def test_a_model_that_no_message_carries_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packed manifest and what is measured of each layer count; the limit itself is still sent."""
    proposed = propose_run(model(), PLAIN_GROUPING)
    nbytes = len(proposed.packed) + BYTES_PER_LAYER * len(proposed.genesis)
    monkeypatch.setattr(waiting, "MOST_PACKED", nbytes)
    assert propose_run(model(), PLAIN_GROUPING) == proposed
    monkeypatch.setattr(waiting, "MOST_PACKED", nbytes - 1)
    with pytest.raises(ConfigError, match=f"take more than {nbytes - 1} bytes packed"):
        propose_run(model(), PLAIN_GROUPING)
