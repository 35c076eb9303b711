"""What `dips check` finds on this host, and in what the master tells of the run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dips.client.ipc.address import PID_FILE
from dips.client.preflight import checks, probe
from dips.client.preflight.checks import check_host, check_lanes, check_model, check_run, failed_row
from dips.config import ClusterFile, Shared
from dips.errors import Busy, ConfigError, Denied, UnavailableMaster
from dips.files import PidLock
from dips.printable import FAIL, NOTE, OK, CheckFinding
from dips.protocol.manifest import Manifest
from tests.unit.client.preflight.test_probe import frame, scripted_lane

MANIFEST = Manifest.from_shapes((("a", (3, 2)), ("b", (4,))))


def config(directory: Path = Path("/d"), **keys: Any) -> ClusterFile:
    shared = {"shared": Shared(run="r"), "cluster": "oslo", "master": "127.0.0.1:1", "tls": False}
    return ClusterFile(**{**shared, "directory": directory, **keys})


def described(**changes: Any) -> dict[str, Any]:
    shared = Shared(run="r")
    told = {
        "run": "r", "term": 1, "head": "v0@r0", "config_digest": shared.digest, "shared": shared.agreed,
        "finished": "", "clusters": {}, "manifest": MANIFEST.to_json(),
    }  # fmt: skip
    return {**told, **changes}


def shown(rows: list[CheckFinding]) -> dict[str, str]:
    return {row.what: f"{row.verdict} {row.seen}" for row in rows}


@pytest.mark.parametrize(
    ("changes", "what", "expected"),
    [
        ({}, "master", f"{OK} 127.0.0.1:1: run r, term 1, head v0@r0"),
        ({}, "run", ""),
        ({"run": "other"}, "run", f"{FAIL} the master serves run other, this file names r"),
        ({}, "shared options", f"{OK} digest {Shared(run='r').digest[:12]}, as the run's"),
        ({"config_digest": "x", "shared": {}}, "shared options", f"{FAIL} shared."),
        ({}, "end", ""),
        ({"finished": "v9@r9"}, "end", f"{NOTE} the run is finished with v9@r9"),
        ({}, "name", f"{OK} oslo is new to the run"),
        ({"clusters": {"oslo": {"state": "gone", "inc": 3}}}, "name", f"{OK} oslo was here before, as incarnation 3"),
        (
            {"clusters": {"oslo": {"state": "idle", "reason": "its trainer died", "inc": 3}}},
            "name",
            f"{NOTE} oslo is in the run: idle: its trainer died",
        ),
    ],
)
def test_what_the_master_tells(changes: Mapping[str, Any], what: str, expected: str) -> None:
    """Only what concerns this cluster has a row; a name that another agent holds now is pointed out."""
    row = shown(check_run(config(), described(**changes))).get(what, "")
    assert row.startswith(expected) if expected else not row


def test_the_name_of_a_pod_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known some seconds after its start: the check ended with 78, which fails a cluster's Job for good."""
    monkeypatch.setattr(checks, "AGAIN_S", 0.0)
    answers = iter([socket.gaierror(socket.EAI_NONAME, "Name or service not known"), None])
    find = socket.getaddrinfo

    def find_in_time(host: str, *words: Any, **options: Any) -> Any:
        if (error := next(answers)) is not None:
            raise error
        return find("127.0.0.1", *words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find_in_time)
    rows = check_host(config(tmp_path, agent="berlin-0.berlin:0"))
    assert shown(rows)["agent's line"].startswith(f"{OK} berlin-0.berlin:a free port (127.0.0.1)")


def test_a_model_is_compared_if_it_is_given() -> None:
    other = Manifest.from_shapes((("a", (3, 2)), ("b", (5,))))

    def unknown() -> Manifest:
        raise ConfigError("--model m: expected a safetensors file")

    size = "2 parameters, 0.00 M elements"
    assert [f"{row.verdict} {row.seen}" for row in (check_model(ours, described()) for ours in (
        None, lambda: MANIFEST, lambda: other, unknown,
    ))] == [
        f"{NOTE} not compared; the run's has {size}",
        f"{OK} {size}, as the run's",
        f"{FAIL} b: expected shape (4,), got (5,)",
        f"{FAIL} --model m: expected a safetensors file",
    ]  # fmt: skip


def test_an_agent_that_runs_here_is_found(tmp_path: Path) -> None:
    """A second one would be refused; no lock, or one that another user's agent has left, is no reason to fail."""
    assert list(shown(check_host(config(tmp_path / "new")))) == ["directory"]
    lock = PidLock(tmp_path / PID_FILE, busy="", advice="")
    rows = shown(check_host(config(tmp_path)))
    lock.close()
    assert rows["directory"].startswith(OK) and rows["agent"].startswith(f"{NOTE} one runs here as pid ")
    assert "agent" not in shown(check_host(config(tmp_path)))
    (tmp_path / PID_FILE).unlink()
    (tmp_path / PID_FILE).mkdir()
    assert shown(check_host(config(tmp_path)))["agent"] == f"{NOTE} {PID_FILE} cannot be read: Is a directory"


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    row = shown(check_host(config(tmp_path / "file")))["directory"]
    assert row == f"{FAIL} {tmp_path}/file: File exists"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (None, ""),
        (["sh", "-c", "./replan.sh"], f"{OK} /"),
        (["./replan.sh", "--all"], f"{OK} ./replan.sh"),
        (["pyhton", "plan.py"], f"{FAIL} 'pyhton' is not found"),
        (["./there.sh"], f"{FAIL} './there.sh' is not found"),
        (["./notes.txt"], f"{FAIL} './notes.txt' is no file that may be executed"),
        (["./"], f"{FAIL} './' is no file that may be executed"),
    ],
)
def test_the_command_before_a_start_can_be_run(
    command: list[str] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found here as the agent will find it, before accelerators are held."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replan.sh").write_text("#!/bin/sh\n")
    (tmp_path / "replan.sh").chmod(0o700)
    (tmp_path / "notes.txt").write_text("")
    row = shown(check_host(config(tmp_path, before_start=command))).get("before_start", "")
    assert row.startswith(expected) if expected else not row


def test_what_passes_is_no_wrong_configuration() -> None:
    """A master with too many calls at once, as when all clusters start, ended a job for good: 78 is not tried again."""
    errors = UnavailableMaster("gone"), Busy("too many calls"), Denied("revoked"), ConfigError("wrong")
    assert [failed_row("master", error, "").silent for error in errors] == [True, True, False, False]


def test_slaves_without_lanes_fail_without_being_probed() -> None:
    """One that has not registered has none; clusters wait for it."""
    slave = {"lanes": [], "state": "absent", "reason": "not registered", "key": ""}
    (row,) = check_lanes(described(slaves={"ps0": slave}), None, 1, 1.0)
    assert (row.what, row.verdict, row.seen, row.silent) == ("slave ps0", FAIL, "absent: not registered", True)


def test_every_lane_of_a_slave_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall may let its first port through alone: the rate is measured there, and says nothing of the others."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.1)
    with scripted_lane(frame) as (first, _):
        with scripted_lane(frame) as (second, _):
            slave = {"lanes": [first, second], "state": "ready", "reason": "", "key": ""}
            (row,) = check_lanes(described(slaves={"ps0": slave}), None, 1, 0.01)
            assert (row.verdict, row.seen.startswith("2 lanes: ")) == (OK, True)
        (row,) = check_lanes(described(slaves={"ps0": slave}), None, 1, 0.01)
    assert row.verdict == FAIL and f"{second}: no connection" in row.seen
