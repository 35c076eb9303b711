"""Asks the master and the slaves of a cluster file for `dips check`, and compares the run with ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dips.client.preflight import checks
from dips.config import ClusterFile
from dips.errors import ConfigError, DipsError, UnavailableMaster
from dips.identity.names import PeerRole
from dips.printable import NOTE, CheckFinding
from dips.protocol.effects import Pending
from dips.protocol.events import ProbeAsked
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.transport import control
from dips.transport.endpoints import Endpoint, master_peer
from dips.transport.seal import KeyPair, new_keys
from dips.transport.tls import TlsSource
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from dips.wire.messages import to_proto, unwrap_oneof

# ---- agreement ------------------------------------------------------------------------------------------------------


def manifest_of_file(path: Path, grouping: Grouping) -> Manifest:
    """Return the manifest of a safetensors file; reads names and shapes only."""
    try:
        with safe_open(path, framework="np") as file:
            shapes = ((n, tuple(file.get_slice(n).get_shape())) for n in file.offset_keys())
            return Manifest.from_shapes(shapes, grouping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--model {path}: expected a safetensors file: {error}") from error


def manifest_of_factory(spec: str, grouping: Grouping) -> Manifest:
    """Return the manifest of the model that MODULE:FUNCTION makes, without memory for its parameters (torch's meta
    device).
    """
    from dips.client.parallel import full_parameters
    from dips.client.parallel.factory import make_module

    parameters, _ = full_parameters(make_module(spec, device="meta"), grouping.share_buffers)
    return Manifest.from_shapes(((name, tuple(tensor.shape)) for name, tensor in parameters.items()), grouping)


# ---- app ------------------------------------------------------------------------------------------------------------


MASTER_S = 10.0  # timeout of the master's answers


def ask_peers(
    config: ClusterFile, ours: Callable[[], Manifest] | None, most_bytes: int, seconds: float
) -> list[CheckFinding]:
    """Return the findings on this host and at the peers; those that depend on the master are omitted if it does not
    answer, all of the peers if the certificates cannot be used.
    """
    rows, files, tls = checks.check_host(config), config.tls_files(config.cluster, PeerRole.CLUSTER), None
    try:
        if files is None:
            rows.append(CheckFinding("certificates", NOTE, "none: plain text on loopback"))
        else:
            tls = TlsSource(files, config.cluster, PeerRole.CLUSTER, config.shared.run, lambda problem: None)
    except ConfigError as error:
        return [*rows, checks.failed_row("peers", error, "none was asked: correct the certificates first")]
    try:
        master = master_peer(config.master, tls)
        described = asyncio.run(describe_run(master))
        keys = asyncio.run(admit_probe(master, config.cluster)) if tls is not None else None
    except DipsError as error:
        return [*rows, checks.failed_row("master", error, "start the master, or correct the key `master`")]
    rows += [*checks.check_run(config, described), checks.check_model(ours, described)]
    return rows + checks.check_lanes(described, keys, most_bytes, seconds)


async def describe_run(master: Endpoint) -> dict[str, Any]:
    """Ask the master to describe the run. Raises UnavailableMaster if it does not answer in time."""
    async with control.open_channel(master) as channel:
        reply = await control.call_method(
            StatusServiceStub(channel).Describe,
            DescribeRequest(),
            deadline_s=MASTER_S,
            peer=master,
            unavailable=UnavailableMaster,
            explain=True,
        )
    described: dict[str, Any] = json.loads(reply.json)
    return described


async def admit_probe(master: Endpoint, cluster: str) -> KeyPair:
    """Have the slaves admit a new key and return it. Raises UnavailableMaster if that takes too long."""
    keys, why = new_keys(), "it does not answer"
    asked = to_proto(ProbeAsked(0, cluster, keys.public))
    try:
        async with control.open_channel(master) as channel, asyncio.timeout(MASTER_S):
            while True:
                reply = await control.call_method(
                    ClusterServiceStub(channel).AdmitProbe,
                    asked,
                    deadline_s=MASTER_S,
                    peer=master,
                    unavailable=UnavailableMaster,
                )
                if not isinstance(answer := unwrap_oneof(reply), Pending):
                    return keys
                why = answer.reason
    except TimeoutError:
        raise UnavailableMaster(f"the slaves did not hear of this check within {MASTER_S:g} s: {why}") from None
