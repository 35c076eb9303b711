"""The rows of a preflight: subject, verdict, finding and advice of each check. Does not print."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dips.client.ipc.address import PID_FILE, TOKEN, over_network, socket_path, token_of
from dips.client.preflight.probe import ProbeResult, measure_lane, measure_round_trip
from dips.config import ClusterFile
from dips.differences import differing_options
from dips.errors import DifferentModel, DipsError, Unavailable, treatment_of
from dips.pidlock import lock_holder
from dips.protocol.manifest import Manifest
from dips.transport.curve import KeyPair

OK, FAIL, NOTE = "ok", "FAIL", "note"
AT_ONCE = 16  # slaves probed at the same time; rates are measured one after another


@dataclass(frozen=True, slots=True)
class CheckRow:
    """The result of one check; `code` is the exit code of a failure."""

    what: str
    verdict: str
    seen: str
    todo: str = ""
    code: int = 0


def failed_row(what: str, error: DipsError, todo: str) -> CheckRow:
    return CheckRow(what, FAIL, str(error), todo, 69 if isinstance(error, Unavailable) else 78)


def exit_code(rows: Iterable[CheckRow]) -> int:
    """Return 78 if something is configured wrongly, else 69 if a peer does not answer, else 0."""
    return max((row.code for row in rows if row.verdict == FAIL), default=0)


def check_host(config: ClusterFile) -> list[CheckRow]:
    """Check the directory and the agent's address on this machine."""
    rows = [CheckRow("cluster file", OK, f"cluster {config.cluster} of run {config.shared.run}")]
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
        if not os.access(config.directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable")
        rows.append(
            CheckRow("directory", OK, f"{config.directory} can be written, the socket is {socket_path(config)}")
        )
    except OSError as error:
        todo = "name another under the key `directory`"
        rows.append(CheckRow("directory", FAIL, f"{config.directory}: {error.strerror}", todo, 78))
    except DipsError as error:
        rows.append(failed_row("directory", error, treatment_of(error).advice))
    rows += _check_agent_address(config)
    try:
        holder = lock_holder(config.directory / PID_FILE)
    except OSError as error:
        rows.append(
            CheckRow("agent", NOTE, f"{PID_FILE} cannot be read: {error.strerror}", "run this as the agent's user")
        )
        return rows
    if holder:
        rows.append(CheckRow("agent", NOTE, f"one runs here as pid {holder}", "a second one would be refused"))
    return rows


def _check_agent_address(config: ClusterFile) -> list[CheckRow]:
    """Check the address on which ranks of other hosts will find the agent; no row if there are none."""
    try:
        remote = over_network(config)
        if remote is None:
            return []
        host, port, named_by = remote
        token = "that of the job" if token_of(config) else f"a new one for what the agent starts ({TOKEN} names none)"
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.bind(address)
    except OSError as error:
        seen = f"{named_by}: {host} is no address of this host: {error.strerror or error}"
        return [CheckRow("agent's line", FAIL, seen, "name the host on which the agent runs", 78)]
    except DipsError as error:
        return [failed_row("agent's line", error, treatment_of(error).advice)]
    return [CheckRow("agent's line", OK, f"{host}:{port or 'a free port'} ({address[0]}), token: {token}")]


def check_run(config: ClusterFile, described: Mapping[str, Any]) -> list[CheckRow]:
    """Compare name, options and standing of the cluster with the run that the master describes."""
    rows = [
        CheckRow(
            "master", OK, f"{config.master}: run {described['run']}, term {described['term']}, head {described['head']}"
        )
    ]
    if described["run"] != config.shared.run:
        seen = f"the master serves run {described['run']}, this file names {config.shared.run}"
        rows.append(CheckRow("run", FAIL, seen, "correct `shared.run`, or the key `master`", 78))
    if described["config_digest"] == config.shared.digest:
        rows.append(CheckRow("shared options", OK, f"digest {config.shared.digest[:12]}, as the run's"))
    else:
        lines = differing_options(config.shared.agreed, described["shared"])
        rows.append(CheckRow("shared options", FAIL, "; ".join(lines), "take the run's `shared` section", 78))
    if described["finished"]:
        rows.append(
            CheckRow("end", NOTE, f"the run is finished with {described['finished']}", "`dips set` has it go on")
        )
    return [*rows, _check_name(config.cluster, described["clusters"])]


def _check_name(name: str, clusters: Mapping[str, Any]) -> CheckRow:
    known = clusters.get(name)
    if known is None:
        return CheckRow("name", OK, f"{name} is new to the run")
    if known["state"] == "gone":
        return CheckRow("name", OK, f"{name} was here before, as incarnation {known['inc']}")
    seen = f"{name} is in the run: {known['state']}: {known['reason']}"
    return CheckRow("name", NOTE, seen, "an agent that starts now replaces that incarnation; is it yours?")


def check_model(ours: Callable[[], Manifest] | None, described: Mapping[str, Any]) -> CheckRow:
    """Compare the model with the run's manifest."""
    runs = Manifest.from_json(described["manifest"])
    size = f"{sum(len(l.parameters) for l in runs.layers)} parameters, {runs.numel / 1e6:.2f} M elements"
    if ours is None:
        return CheckRow(
            "model", NOTE, f"not compared; the run's has {size}", "give --factory MODULE:FUNCTION or --model FILE"
        )
    try:
        mine = ours()
        if mine.digest != runs.digest:
            raise DifferentModel("; ".join(runs.describe_differences(mine)))
    except DipsError as error:
        return CheckRow("model", FAIL, str(error), "take the model that `dips init` was given", 78)
    return CheckRow("model", OK, f"{size}, as the run's")


def check_lanes(described: Mapping[str, Any], keys: KeyPair | None, most_bytes: int, seconds: float) -> list[CheckRow]:
    """Probe every lane of every slave, and measure the rate to each slave on its first lane.

    keys  the key pair for encrypted lanes; None: plain lanes
    """
    slaves: Mapping[str, Any] = described["slaves"]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        probed = dict(
            zip(slaves, threads.map(lambda s: _probe_lanes(described["run"], s, keys), slaves.values()), strict=True)
        )
    return [
        _check_slave(described["run"], name, slaves[name], keys, seen, most_bytes, seconds)
        for name, seen in probed.items()
    ]


def _keys_for(keys: KeyPair | None, slave: Mapping[str, Any]) -> tuple[KeyPair, str] | None:
    return (keys, slave["key"]) if keys is not None and slave["key"] else None


def _probe_lanes(run_name: str, slave: Mapping[str, Any], keys: KeyPair | None) -> DipsError | None:
    try:
        for lane in slave["lanes"]:
            measure_round_trip(lane, run_name, _keys_for(keys, slave))
    except Unavailable as error:
        return error
    return None


def _check_slave(
    run_name: str,
    name: str,
    slave: Mapping[str, Any],
    keys: KeyPair | None,
    wrong: DipsError | None,
    most_bytes: int,
    seconds: float,
) -> CheckRow:
    what, count = f"slave {name}", len(slave["lanes"])
    if not count:
        return CheckRow(
            what, FAIL, f"{slave['state']}: {slave['reason']}", "start it; clusters wait for all slaves", 69
        )
    open_way = "open the way from here to the addresses of its `lanes`, or use the relay of this host"
    if wrong:
        return failed_row(what, wrong, open_way)
    try:
        measured = measure_lane(slave["lanes"][0], run_name, _keys_for(keys, slave), most_bytes, seconds)
    except Unavailable as error:
        return failed_row(what, error, open_way)
    return CheckRow(what, OK, f"{count} lane{'s' if count > 1 else ''}: {_format_probe(measured)}")


def _format_probe(m: ProbeResult) -> str:
    return f"{m.round_trip_s * 1e3:.1f} ms, {m.up * 8e-6:.0f} Mbit/s there, {m.down * 8e-6:.0f} Mbit/s back"
