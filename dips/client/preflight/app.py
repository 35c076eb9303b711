"""The command `dips-client check`: queries the peers and prints the findings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.client.preflight import checks
from dips.client.preflight.agreement import manifest_of_factory, manifest_of_file
from dips.client.preflight.certificates import check_certificates
from dips.client.preflight.checks import CheckRow
from dips.config import ClusterFile, load_cluster
from dips.errors import ConfigError, DipsError, UnavailableMaster
from dips.printable import format_finding
from dips.protocol.effects import Pending
from dips.protocol.events import ProbeAsked
from dips.protocol.manifest import Manifest
from dips.telemetry import exits
from dips.transport import control
from dips.transport.curve import KeyPair, new_keys
from dips.transport.endpoints import Endpoint, master_peer
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub
from dips.wire.messages import to_proto, unwrap_oneof

MASTER_S = 10.0  # timeout of the master's answers
MIB = 1 << 20

command_line = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=exits.HELP_OPTIONS)


@command_line.command()
def check(
    config: Annotated[Path, typer.Option("--config", "-c", help="The cluster file (cluster.yaml).")],
    factory: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Compare the model that this function makes with the run's."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Compare this safetensors file's names and shapes with the run's.")
    ] = None,
    most_mib: Annotated[
        int, typer.Option(min=0, help="Transfer at most this many MiB to measure a rate; 0: do not measure.")
    ] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="End a measured transfer after this many seconds.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Check everything that a cluster needs, before its accelerators are held.

    Checks the cluster file, names, the master, shared options, every lane of every slave, the rate to each slave in
    both directions, and the model against the run's. Does not join the run or change anything; a measured transfer
    moves at most --most-mib each way, on one lane of one slave after another.

    Exit codes: 0 all checks passed; 69 a peer does not answer; 78 something is configured wrongly.

    \b
    Example:
      dips-client check --config cluster.yaml --factory mymodel:build
    """
    if factory and model:
        raise ConfigError("which model: give --factory or --model, not both")
    cluster_file, ours = load_cluster(config), None
    grouping = cluster_file.shared.grouping
    if factory:
        ours = partial(manifest_of_factory, factory, grouping)
    elif model:
        ours = partial(manifest_of_file, model, grouping)
    rows = make_rows(cluster_file, ours, most_mib * MIB, seconds)
    if as_json:
        fields = ("what", "verdict", "seen", "todo")
        print(json.dumps([{key: getattr(row, key) for key in fields} for row in rows], indent=1))
    else:
        for row in rows:
            print(format_finding(row.verdict, row.what, row.seen, row.todo))
    raise typer.Exit(checks.exit_code(rows))


def make_rows(
    config: ClusterFile, ours: Callable[[], Manifest] | None, most_bytes: int, seconds: float
) -> list[CheckRow]:
    """Make all rows; those that depend on the master are omitted if it does not answer."""
    row, tls = check_certificates(config)
    rows = [*checks.check_host(config), row]
    if row.verdict == checks.FAIL:
        return rows
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
    channel = control.open_channel(master)
    try:
        reply = await control.call_method(
            StatusServiceStub(channel).Describe,
            DescribeRequest(),
            deadline_s=MASTER_S,
            peer=master,
            unavailable=UnavailableMaster,
            explain=True,
        )
    finally:
        await channel.close()
    described: dict[str, Any] = json.loads(reply.json)
    return described


async def admit_probe(master: Endpoint, cluster: str) -> KeyPair:
    """Have the slaves admit a new key and return it. Raises UnavailableMaster if that takes too long."""
    keys, why = new_keys(), "it does not answer"
    channel, asked = control.open_channel(master), to_proto(ProbeAsked(0, cluster, keys.public))
    method = ClusterServiceStub(channel).AdmitProbe
    try:
        async with asyncio.timeout(MASTER_S):
            while True:
                reply = await control.call_method(
                    method, asked, deadline_s=MASTER_S, peer=master, unavailable=UnavailableMaster
                )
                if not isinstance(answer := unwrap_oneof(reply), Pending):
                    return keys
                why = answer.reason
    except TimeoutError:
        raise UnavailableMaster(f"the slaves did not hear of this check within {MASTER_S:g} s: {why}") from None
    finally:
        await channel.close()
