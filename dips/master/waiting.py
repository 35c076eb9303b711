"""A master without a ledger: it waits for `dips seed`, or for a ledger that `dips init` or an operator makes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from math import isfinite
from typing import Any, NoReturn

from dips import daemon
from dips.config import RunFile
from dips.errors import ConfigError, RemoteProtocolError, UnavailableMaster
from dips.http import HttpSubject
from dips.master import genesis
from dips.master.ledger import hold_ledger
from dips.master.runtime import ClusterServicer, OperatorServicer, SlaveServicer, StatusServicer
from dips.protocol.events import RunProposed
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.records import RunRow
from dips.protocol.seeding import WAITS, describe_other_model
from dips.protocol.view import RunView
from dips.telemetry.logs import Log
from dips.transport import control
from dips.transport.gate import Guard, Report
from dips.transport.tls import TlsSource
from dips.wire.generated.cluster_pb2_grpc import add_ClusterServiceServicer_to_server
from dips.wire.generated.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from dips.wire.generated.slave_pb2_grpc import add_SlaveServiceServicer_to_server
from dips.wire.generated.status_pb2_grpc import add_StatusServiceServicer_to_server
from dips.wire.packed_manifest import MOST_PACKED, pack_manifest, unpack_manifest

# ---- begin ----------------------------------------------------------------------------------------------------------


BYTES_PER_LAYER = 42  # of a RunProposed: a digest of 32 digits with its head, and a norm
_DIGEST = re.compile("[0-9a-f]{32}")


def propose_run(tensors: Mapping[str, genesis.Tensor], grouping: Grouping) -> RunProposed:
    """Measure a model; raise ConfigError if it cannot be a run's: see `genesis.make_run`."""
    manifest = genesis.manifest_of(tensors, grouping)
    digests = tuple(genesis.layer_digest(layer, tensors) for layer in manifest.layers)
    norms = tuple(genesis.layer_norm(layer, tensors) for layer in manifest.layers)
    packed = pack_manifest(manifest)
    nbytes = len(packed) + BYTES_PER_LAYER * len(manifest.layers)
    if not packed or nbytes > MOST_PACKED:
        raise ConfigError(
            f"the names and shapes of this model, and what is measured of its {len(manifest.layers)} layers, take more "
            f"than {MOST_PACKED} bytes packed, which is all that one message brings: make the run by `dips init` "
            "where the master is, then `dips seed` brings the parameters"
        )
    return RunProposed(packed, manifest.digest, digests, norms)


def begin_run(config: RunFile, proposed: RunProposed, wall: Callable[[], float]) -> RunRow:
    """Write the ledger of a new run; return its first row.

    Errors  RemoteProtocolError, CorruptManifest: the proposal is no model; ConfigError: a ledger exists, a mirror holds
            a run of this name, more slaves than layers
    """
    genesis.find_mirrors(config, force=False)
    manifest = _check_proposed(config, proposed)
    row = genesis.make_row(config, manifest, proposed.genesis, proposed.genesis_norms)
    with genesis.hold_beginning(genesis.ledger_path(config)):
        genesis.write_shared(config, config.master.directory)
        genesis.write_ledger(config, row, wall)
        genesis.mirror_initial(config)  # last: what lies in a mirror is believed to be a run
    return row


def check_repeated(row: RunRow, proposed: RunProposed) -> None:
    """Raise ConfigError unless the run, which has begun, began with this model."""
    if problem := describe_other_model(Manifest.from_json(row.manifest), row.genesis, proposed.genesis):
        raise ConfigError(f"{problem}; a new run takes another shared.run and empty directories")


def _check_proposed(config: RunFile, proposed: RunProposed) -> Manifest:
    manifest = Manifest.from_json(unpack_manifest(proposed.packed, proposed.digest))
    shapes = ((p.name, p.shape) for layer in manifest.layers for p in layer.parameters)
    ours = Manifest.from_shapes(shapes, config.shared.grouping)
    if not manifest.numel or ours.digest != manifest.digest:
        raise RemoteProtocolError("manifest: expected layers as this version of Di-PS groups parameters, got others")
    count, digests, norms = len(manifest.layers), proposed.genesis, proposed.genesis_norms
    if len(digests) != count or len(norms) != count:
        raise RemoteProtocolError(f"expected {count} digests and norms, got {len(digests)} and {len(norms)}")
    if not all(map(_DIGEST.fullmatch, digests)):
        raise RemoteProtocolError("genesis: expected digests of 32 hexadecimal digits")
    if not all(map(isfinite, norms)):
        raise RemoteProtocolError("genesis_norms: expected finite numbers")
    return manifest


# ---- waiting --------------------------------------------------------------------------------------------------------
# A master without a ledger: it waits for `dips seed`, or for a ledger that `dips init` or an operator puts there.
#
# All callers are asked to come again. Slaves of a run whose ledger was lost are safe from it: they hold versions that
# no new ledger has, and a master that begins with one ends at once (docs/rationale.md#4).


REMEDY = "if this run had begun, put its newest ledger back and do not seed it"
LOOK_S = 1.0  # interval of checks for a ledger
GRACE_S = 2.0  # longest wait for the answer to Begin to leave


class ModelAwaiting:
    """A stand-in for the runtime: it answers every question with what is waited for."""

    def __init__(self, read: Callable[[], RunFile]) -> None:
        """`read` returns the run file as it is now, or raises ConfigError: nothing of it counts before the run begins.
        Only whoever brings a model needs that: all others call by the thousand.
        """
        self._read, self._config = read, read()

    async def ask_core(self, make: Callable[[int], Any]) -> NoReturn:
        self._refuse_all()

    async def take_heartbeat(self, heartbeat: Any) -> NoReturn:
        self._refuse_all()

    def put_event(self, event: Any) -> NoReturn:
        self._refuse_all()

    def build_view(self) -> RunView:
        """Return what is waited for, and the options that a model must fit: as last known of a file that is wrong."""
        with suppress(ConfigError):
            self._config = self._read()
        shared = self._config.shared
        return RunView(shared.run, WAITS, shared=shared.agreed)

    def _refuse_all(self) -> NoReturn:
        run = self._config.shared.run
        if genesis.ledger_path(self._config).exists():
            raise UnavailableMaster(f"run {run!r} begins: its master cannot be reached for a moment")
        raise UnavailableMaster(f"run {run!r} {WAITS}")


async def wait_for_ledger(
    read: Callable[[], RunFile],
    tls: TlsSource | None,
    guard: Guard | None,
    log: Log,
    ready: Callable[[str], None],
    report: Report,
) -> str | None:
    """Serve until there is a ledger; return the host:port served at, None if it was stopped before. `read` returns the
    run file as it is now, or raises ConfigError, with which no run begins.
    """
    config, stopped = read(), asyncio.Event()
    server = control.make_server(report, guard)
    listen = config.master.listen
    address = f"{listen.rpartition(':')[0]}:{control.bind_server(server, listen, 'master.listen', guard)}"
    awaiting: Any = ModelAwaiting(read)
    add_ClusterServiceServicer_to_server(ClusterServicer(awaiting), server)
    add_SlaveServiceServicer_to_server(SlaveServicer(awaiting), server)
    add_StatusServiceServicer_to_server(StatusServicer(awaiting, {}), server)
    add_OperatorServiceServicer_to_server(OperatorServicer(awaiting, partial(_begin_run, read)), server)
    await control.serve_health(server, ("",))  # the process lives, but none of its services serves yet
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, GRACE_S)
        subject = HttpSubject(config.shared.run, "master", dict, lambda _: (), lambda: WAITS)  # lives, and is not ready
        await daemon.open_http(config.master.http, config.http_token, tls, subject, log, stack)
        stack.enter_context(daemon.end_signals(stopped.set))
        log.warning("no_ledger", ledger=str(genesis.ledger_path(config)), address=address, waits=WAITS, remedy=REMEDY)
        ready(address)
        while not (stopped.is_set() or _is_made(config)):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stopped.wait()
    return None if stopped.is_set() else address


def _is_made(config: RunFile) -> bool:
    """Whether there is a ledger that its creator has finished."""
    path = genesis.ledger_path(config)
    if not path.exists():
        return False
    try:
        with hold_ledger(path):
            return True
    except ConfigError:
        return False


def _begin_run(read: Callable[[], RunFile], proposed: RunProposed) -> None:
    """Create the ledger; on the event loop, so that two proposals are served one after the other."""
    begin_run(read(), proposed, time.time)
