"""A real `dips-slave` process under a master that is a script: for benchmarks of one slave and nothing else.

    with LoneSlave(directory, manifest, slots=2) as slave:
        push = slave.next_push("west")
        grant = slave.open_push(push)
        transfer.push(grant, slave.base(push), pieces)
        slave.await_staged(push)
        slave.order(Measure(1, push, slave.head))

The slave is configured, registers, loads v0@r0 (zeros, a sparse file), heartbeats and obeys as ever; the script gives
it orders in any order that a Coordinator might, and lists nothing as dead. It decides nothing and keeps no ledger.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import xxhash
import yaml

from benchmarks.record import ROOT
from dips.client.rank.transfer import TransferIdentity
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.master.runtime import SlaveLink
from dips.outer.pool import MemorySum
from dips.protocol import effects as e
from dips.protocol.events import Answer, OrderAnswered, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import LiveTransfers, SlaveHeartbeatAnswer
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.machine import COPIES_BYTES, TRANSIT_BYTES
from dips.store.files import make_manifest, write_manifest
from dips.store.version import LayerRecord, layer_file, layer_header
from dips.transport import control
from dips.wire.generated.slave_pb2_grpc import SlaveServiceServicer, add_SlaveServiceServicer_to_server
from dips.wire.messages import from_proto, to_proto

RUN, NAME = "bench", "ps0"
WAIT_S = 120.0
SINC = TERM = 1
T = TypeVar("T")


def equal_layers(numel: int, layers: int) -> Manifest:
    """A model of `layers` equal layers, one parameter each."""
    return Manifest(
        tuple(Layer(f"layers.{i}", (Parameter(f"layers.{i}.weight", (numel // layers,)),)) for i in range(layers))
    )


class _Master(SlaveServiceServicer):
    """Answers what a slave says; Register leads to v0@r0 and Hold."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        zeros = {layer.numel: _digest_of_zeros(layer.numel) for layer in manifest.layers}
        self._genesis = tuple(zeros[layer.numel] for layer in manifest.layers)
        self.registered: Future[SlaveRegistered] = Future()  # done when the slave holds v0@r0
        self.staged: dict[PushId, Future[None]] = {}

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        said = from_proto(request, SlaveRegistered, req=0)
        order: e.SlaveOrder = e.LoadVersion(GENESIS) if said.memory is None else e.Hold()
        if said.memory is not None and not self.registered.done():
            self.registered.set_result(said)
        layers = tuple(range(len(self._manifest.layers)))
        return to_proto(e.Registered(TERM, SINC, order, GENESIS, layers, self._genesis, self._manifest.to_json()))

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        # As of number 0: nothing that was ever ordered is older, so nothing is dropped.
        return to_proto(SlaveHeartbeatAnswer(TERM, 60.0, False, 0, LiveTransfers(1, (), ())))

    async def Staged(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.staged[from_proto(request, PushStaged).push].set_result(None)
        return to_proto(e.Acknowledged())

    async def Refused(self, request: Any, context: Any) -> Any:  # noqa: N802
        refused = from_proto(request, PushRefused)
        self.staged[refused.push].set_exception(RuntimeError(f"the slave refused {refused.push}: {refused.reason}"))
        return to_proto(e.Acknowledged())


class LoneSlave:
    """Starts on entry, ends on exit; `options` are keys of the slave's section in the run file."""

    def __init__(self, directory: Path, manifest: Manifest, *, chunk_bytes: int = 1 << 20, **options: Any) -> None:
        self._directory, self.manifest = directory, manifest
        self._chunk_bytes, self._options = chunk_bytes, {"slots": 1, "pinned": 0, "lanes": ["127.0.0.1:0"], **options}
        self._numbers, self._seqs = itertools.count(1), itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="script", daemon=True)
        self._popen: subprocess.Popen[bytes] | None = None
        self.log = directory / "slave.log"

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._master = _Master(self.manifest)
            address = self._await(self._serve())
            self._start(address)
            said = self._hold()
            self._lanes = said.lanes
            self._link = self._await(self._connect(said.address))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._popen is not None:
            self._popen.send_signal(signal.SIGTERM)
            self._popen.wait()
        self._await(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- orders ------------------------------------------------------------------------------------------------------

    def order(self, body: e.OrderBody) -> Answer:
        """Have an order carried out; raise RuntimeError with the slave's reason if it is not."""
        said = self._await(self._link.execute_order(e.Order(NAME, SINC, TERM, next(self._numbers), body, WAIT_S)))
        if not isinstance(said, OrderAnswered):
            raise RuntimeError(f"{type(body).__name__}: {said}")
        return said.answer

    def next_push(self, cluster: str = "west") -> PushId:
        return PushId(cluster, 1, next(self._seqs))

    def next_pull(self, cluster: str = "west") -> PullId:
        return PullId(cluster, 1, next(self._seqs))

    def base(self, name: PushId | PullId) -> TransferIdentity:
        """Who transfers: one rank."""
        return TransferIdentity(RUN, name.cluster, name.inc, name.seq, 0)

    def open_push(self, push: PushId) -> e.Grant:
        """Have a slot reserved; the grant is the one rank's."""
        self._master.staged[push] = Future()
        self.order(e.OpenPush(push, 1, WAIT_S))
        return self._grant(GENESIS)

    def open_pull(self, pull: PullId, version: VersionId = GENESIS) -> e.Grant:
        """Have a version pinned for a pull."""
        self.order(e.OpenPull(pull, version))
        return self._grant(version)

    def await_staged(self, push: PushId) -> None:
        self._master.staged[push].result(WAIT_S)

    # ---- what is seen from outside -----------------------------------------------------------------------------------

    @property
    def memory_sum(self) -> MemorySum:
        """The sum as this benchmark works it out; `printed_sum` is what the slave wrote."""
        return MemorySum(
            self.manifest.numel, self._options["slots"], self._options["pinned"], TRANSIT_BYTES + COPIES_BYTES
        )

    def printed_sum(self) -> str:
        """The line that the slave printed at start."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return next(str(line["sum"]) for line in lines if line.get("event") == "memory")

    def resident(self) -> int:
        """Bytes of the process that are in memory now, and the most that ever were."""
        return self._status("VmRSS")

    def peak(self) -> int:
        """The most bytes of the process that ever were in memory."""
        return self._status("VmHWM")

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def _status(self, key: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(key))

    def _grant(self, version: VersionId) -> e.Grant:
        layers = tuple(range(len(self.manifest.layers)))
        return e.Grant(version, (e.SlaveAddress(NAME, SINC, self._lanes, layers),), WAIT_S)

    def _start(self, master: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        model = self._directory / "zeros"
        write_zeros(model / str(GENESIS), self.manifest)
        section = {
            "name": NAME, "master": master, "directory": str(self._directory / NAME), "initial_model": str(model),
            **self._options,
        }  # fmt: skip
        run = {
            "shared": {"run": RUN},
            "master": {"listen": master, "directory": str(self._directory / "master")},
            "slaves": [section],
            "tls": False,
        }
        config = self._directory / "dips.yaml"
        config.write_text(yaml.safe_dump(run))
        code = f"from dips.slave import app; app.CHUNK_BYTES = {self._chunk_bytes}; app.main()"
        with self.log.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(config), "--name", NAME],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def _hold(self) -> SlaveRegistered:
        assert self._popen is not None
        for _ in range(int(WAIT_S / 0.5)):
            try:
                return self._master.registered.result(0.5)
            except TimeoutError:
                if self._popen.poll() is not None:
                    break
        raise RuntimeError(f"dips-slave did not come up:\n{self.log.read_text()[-4000:]}")

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * WAIT_S)

    async def _serve(self) -> str:
        self._server = control.make_server(lambda method, error: print(f"{method}: {error!r}", file=sys.stderr))
        add_SlaveServiceServicer_to_server(self._master, self._server)
        port = control.bind_server(self._server, "127.0.0.1:0", "benchmark")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def _connect(self, address: str) -> SlaveLink:
        return SlaveLink(NAME, address)

    async def _close(self) -> None:
        if hasattr(self, "_link"):
            await self._link.close()
        if hasattr(self, "_server"):
            await self._server.stop(None)


def write_zeros(path: Path, manifest: Manifest) -> None:
    """v0@r0 of zeros that takes no room on disk: the tail of each layer's file is a hole."""
    path.mkdir(parents=True, exist_ok=True)
    zeros = {numel: _digest_of_zeros(numel) for numel in {layer.numel for layer in manifest.layers}}
    records = []
    for index, layer in enumerate(manifest.layers):
        header = layer_header(RUN, GENESIS, layer, momentum=False)
        size = len(header) + layer.nbytes
        with (path / layer_file(index)).open("wb") as file:
            file.write(header)
            file.truncate(size)
        records.append(LayerRecord(index, layer, zeros[layer.numel], "", size))
    write_manifest(path, make_manifest((RUN, "", 0), GENESIS, manifest, records).to_json())


def _digest_of_zeros(numel: int) -> str:
    digest, block = xxhash.xxh3_128(), np.zeros(1 << 20, np.float32)
    for begin in range(0, numel, block.size):
        digest.update(cast(Any, block[: min(block.size, numel - begin)].data))
    return digest.hexdigest()
