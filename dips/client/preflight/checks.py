"""Findings of `dips check` on a cluster's host, at the master and on the lanes of the slaves. Does not print."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dips.client.ipc.address import AGAIN_S, PID_FILE, RESOLVE_S, TOKEN, over_network, socket_path, token_of
from dips.client.preflight.probe import ProbeResult, measure_lane, measure_round_trip
from dips.config import ClusterFile
from dips.differences import differing_options
from dips.errors import Busy, ConfigError, DifferentModel, DipsError, Unavailable, treatment_of
from dips.files import find_program, lock_holder
from dips.printable import FAIL, NOTE, OK, CheckFinding
from dips.protocol.manifest import Manifest
from dips.transport.seal import KeyPair

AT_ONCE = 16  # slaves probed at the same time; rates are measured one after another


def failed_row(what: str, error: DipsError, remedy: str) -> CheckFinding:
    return CheckFinding(what, FAIL, str(error), remedy, silent=isinstance(error, Unavailable | Busy))


def check_host(config: ClusterFile) -> list[CheckFinding]:
    """Check the directory, the agent's address and `before_start` on this machine."""
    rows = list[CheckFinding]()
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
        if not os.access(config.directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable")
        rows.append(
            CheckFinding("directory", OK, f"{config.directory} can be written, the socket is {socket_path(config)}")
        )
    except OSError as error:
        remedy = "name another under the key `directory`"
        rows.append(CheckFinding("directory", FAIL, f"{config.directory}: {error.strerror}", remedy))
    rows += _check_agent_address(config) + _check_before_start(config)
    try:
        holder = lock_holder(config.directory / PID_FILE)
    except OSError as error:
        rows.append(
            CheckFinding("agent", NOTE, f"{PID_FILE} cannot be read: {error.strerror}", "run this as the agent's user")
        )
        return rows
    if holder:
        rows.append(CheckFinding("agent", NOTE, f"one runs here as pid {holder}", "a second one would be refused"))
    return rows


def _check_agent_address(config: ClusterFile) -> list[CheckFinding]:
    """Check the address on which ranks of other hosts will find the agent; no row if there are none."""
    try:
        remote = over_network(config)
        if remote is None:
            return []
        host, port, named_by = remote
        token = "that of the job" if token_of(config) else f"a new one for what the agent starts ({TOKEN} names none)"
        family, *_, address = _resolve_host(host)
        with socket.socket(family, socket.SOCK_STREAM) as here:
            here.bind(address)
    except OSError as error:
        seen = f"{named_by}: {host} is no address of this host: {error.strerror or error}"
        return [CheckFinding("agent's line", FAIL, seen, "name the host on which the agent runs")]
    except DipsError as error:
        return [failed_row("agent's line", error, treatment_of(error).advice)]
    return [CheckFinding("agent's line", OK, f"{host}:{port or 'a free port'} ({address[0]}), token: {token}")]


def _resolve_host(host: str) -> tuple[int, int, int, str, Any]:
    """Look up a name until it is known, as the agent does. Raises gaierror after RESOLVE_S."""
    until = time.monotonic() + RESOLVE_S
    while True:
        try:
            return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        except socket.gaierror:
            if time.monotonic() >= until:
                raise
            time.sleep(AGAIN_S)


def _check_before_start(config: ClusterFile) -> list[CheckFinding]:
    """Check that the program of `before_start` can be executed here; no row without the key."""
    if config.before_start is None:
        return []
    try:
        return [CheckFinding("before_start", OK, find_program(config.before_start[0]))]
    except ConfigError as error:
        return [CheckFinding("before_start", FAIL, str(error))]


def check_run(config: ClusterFile, described: Mapping[str, Any]) -> list[CheckFinding]:
    """Compare name, options and standing of the cluster with the run that the master describes."""
    rows = [
        CheckFinding(
            "master", OK, f"{config.master}: run {described['run']}, term {described['term']}, head {described['head']}"
        )
    ]
    if described["run"] != config.shared.run:
        seen = f"the master serves run {described['run']}, this file names {config.shared.run}"
        rows.append(CheckFinding("run", FAIL, seen, "correct `shared.run`, or the key `master`"))
    if described["config_digest"] == config.shared.digest:
        rows.append(CheckFinding("shared options", OK, f"digest {config.shared.digest[:12]}, as the run's"))
    else:
        lines = differing_options(config.shared.agreed, described["shared"])
        rows.append(CheckFinding("shared options", FAIL, "; ".join(lines), "take the run's `shared` section"))
    if described["finished"]:
        rows.append(
            CheckFinding("end", NOTE, f"the run is finished with {described['finished']}", "`dips set` has it go on")
        )
    return [*rows, _check_name(config.cluster, described["clusters"])]


def _check_name(name: str, clusters: Mapping[str, Any]) -> CheckFinding:
    known = clusters.get(name)
    if known is None:
        return CheckFinding("name", OK, f"{name} is new to the run")
    if known["state"] == "gone":
        return CheckFinding("name", OK, f"{name} was here before, as incarnation {known['inc']}")
    seen = f"{name} is in the run: {known['state']}: {known['reason']}"
    return CheckFinding("name", NOTE, seen, "an agent that starts now replaces that incarnation; is it yours?")


def check_model(ours: Callable[[], Manifest] | None, described: Mapping[str, Any]) -> CheckFinding:
    """Compare the model with the run's manifest."""
    runs = Manifest.from_json(described["manifest"])
    size = f"{sum(len(l.parameters) for l in runs.layers)} parameters, {runs.numel / 1e6:.2f} M elements"
    if ours is None:
        return CheckFinding(
            "model", NOTE, f"not compared; the run's has {size}", "give --factory MODULE:FUNCTION or --model FILE"
        )
    try:
        mine = ours()
        if mine.digest != runs.digest:
            raise DifferentModel("; ".join(runs.describe_differences(mine)))
    except DipsError as error:
        return CheckFinding("model", FAIL, str(error), "take the model that `dips init` was given")
    return CheckFinding("model", OK, f"{size}, as the run's")


def check_lanes(
    described: Mapping[str, Any], keys: KeyPair | None, most_bytes: int, seconds: float
) -> list[CheckFinding]:
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
) -> CheckFinding:
    what, count = f"slave {name}", len(slave["lanes"])
    if not count:
        seen = f"{slave['state']}: {slave['reason']}"
        return CheckFinding(what, FAIL, seen, "start it; clusters wait for all slaves", silent=True)
    open_way = "open the way from here to the addresses of its `lanes`, or use the relay of this host"
    if wrong:
        return failed_row(what, wrong, open_way)
    try:
        measured = measure_lane(slave["lanes"][0], run_name, _keys_for(keys, slave), most_bytes, seconds)
    except Unavailable as error:
        return failed_row(what, error, open_way)
    return CheckFinding(what, OK, f"{count} lane{'s' if count > 1 else ''}: {_format_probe(measured)}")


def _format_probe(m: ProbeResult) -> str:
    return f"{m.round_trip_s * 1e3:.1f} ms, {m.up * 8e-6:.0f} Mbit/s there, {m.down * 8e-6:.0f} Mbit/s back"
