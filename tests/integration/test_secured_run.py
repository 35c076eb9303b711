"""A run with certificates of `dips certs`: it trains, and those without the right one are told and change nothing."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from tests.integration import cluster_harness as harness
from tests.integration.test_mistakes import CLI, tiny, type_words
from tests.integration.test_preflight import check
from tests.integration.train_constant import tensors
from tests.typed import type_dips

RUN = "test"  # the harness's
NAMES = (
    ("master", "master"),
    ("ps0", "slave"),
    ("west", "cluster"),
    ("north", "cluster"),
    ("operator", "operator"),
    ("eve", "viewer"),
)


def type_certs(*words: str, cwd: Path) -> str:
    with chdir(cwd):
        return type_dips("certs", *words)


def enroll(directory: Path, name: str, role: str) -> None:
    """Request here, sign there."""
    type_certs("request", name, "--role", role, "--run", RUN, "--out", "certs", cwd=directory)
    type_certs("issue", "ca", f"certs/{name}.{role}.csr", "--as", f"{name}.{role}", cwd=directory)


def type_enrolment(directory: Path, names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """An authority and these certificates, by the commands of a person; return what the run file says of them."""
    type_certs("init", "ca", "--run", RUN, cwd=directory)
    for name, role in names:
        enroll(directory, name, role)
    for public in ("ca.crt", "crl.pem"):  # what the authority writes counts at once
        (directory / "certs" / public).symlink_to(directory / "ca" / public)
    return {"tls": "certs/{name}.{role}.crt"}


@pytest.fixture(name="run")
def secured_run(tmp_path: Path) -> Iterator[harness.Run]:
    security = type_enrolment(tmp_path, NAMES)
    shared = {"penalty": {"gates": []}, "stop": {"versions": 2}}
    with harness.Run(tmp_path, tensors(), shared=shared, slaves=1, security=security) as run:
        yield run


def find_open(directory: Path) -> list[str]:
    """What somebody else may read or write below a directory, itself included."""
    found = [directory, *directory.rglob("*")]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in found if not path.is_symlink()}
    return [f"{path} {mode:o}" for path, mode in modes.items() if mode & (stat.S_IRWXG | stat.S_IRWXO)]


@pytest.mark.timeout(180)
def test_what_daemons_write_is_theirs_alone(tmp_path: Path) -> None:
    """Ledger, journal, timelines, snapshots, sockets, logs of slaves; the training script has the umask that it had."""
    before = os.umask(0o022)
    shared = {"penalty": {"gates": []}, "stop": {"versions": 2}}
    try:
        with harness.Run(tmp_path, tensors(), shared=shared, slaves=1, slave={"supervisor": "exec"}) as run:
            for path in (tmp_path / "master").rglob("*"):  # of this test, which is no daemon
                path.chmod(0o700 if path.is_dir() else 0o600)
            (tmp_path / "master").chmod(0o755)
            run.start_master()
            run.wait(run.start_cluster("west", tiny(tmp_path)), 90)
            assert [line for name in ("master", "ps0", "west") for line in find_open(tmp_path / name)] == []
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o644
    assert (tmp_path / "master" / "slaves" / "ps0.log").exists()


@pytest.mark.timeout(180)
def test_a_secured_run_trains_and_strangers_are_told(run: harness.Run, tmp_path: Path) -> None:
    run.start_servers()

    # without a certificate, as another cluster, as a viewer who would drain, in plain text
    lost = run.start_cluster("lost", tiny(tmp_path))
    run.wait(lost, 60, code=78)
    assert "lost.cluster.crt cannot be read: No such file or directory" in lost.log.read_text()
    posing = run.start_cluster("east", tiny(tmp_path), tls="certs/west.cluster.crt")
    run.wait(posing, 60, code=78)
    assert "expected a certificate of cluster 'east' of run 'test', got one of cluster 'west'" in posing.log.read_text()
    viewer = str(tmp_path / "certs" / "eve.viewer.crt")
    code, said = type_words(*CLI, "drain", "ps0", "--master", run.address, "--credentials", viewer)
    assert (code, "a certificate of operator or slave, got that of viewer 'eve'" in said) == (77, True), said
    code, said = type_words(*CLI, "status", "--master", run.address)
    assert (code, "it expects certificates: give this process a certificate (`tls`)" in said) == (69, True), said

    # a cluster looks before it joins: its probes are answered by lanes that know its key, and by no other
    content = {"shared": run.shared, "cluster": "north", "master": run.address, "directory": "north", **run.security}
    code, rows, said = check(tmp_path, content)
    assert code == 0 and "Mbit/s there" in rows["slave ps0"]["seen"], (rows, said)

    # a viewer looks, two clusters train to the run's end, an operator has the last version over the lanes
    code, said = type_words(*CLI, "status", "--master", run.address, "--credentials", viewer, "--json")
    assert code == 0 and json.loads(said)["clusters"] == {}, "no stranger has joined"
    both = [run.start_cluster(name, tiny(tmp_path)) for name in ("west", "north")]
    for cluster in both:
        run.wait(cluster, 90)
    code, said = type_words(*CLI, "status", "--config", str(run.file), "--json")
    assert code == 0 and json.loads(said)["finished"]
    operator, output = tmp_path / "certs" / "operator.operator.crt", tmp_path / "last.safetensors"
    words = ("--master", run.address, "--credentials", str(operator), "--output", str(output))
    code, said = type_words(*CLI, "export", *words)
    assert code == 0 and output.stat().st_size > 0, said


def test_certificates_are_shown_renewed_and_revoked(tmp_path: Path) -> None:
    type_certs("init", "ca", "--run", RUN, cwd=tmp_path)
    enroll(tmp_path, "west", "cluster")
    certificate, key = (tmp_path / "certs" / f"west.cluster.{end}" for end in ("crt", "key"))
    before = certificate.read_bytes(), key.read_bytes()
    assert "sign it by" in type_certs("renew", "certs/west.cluster.crt", cwd=tmp_path)
    assert (certificate.read_bytes(), key.read_bytes()) == before, "nothing changes before it is signed"
    type_certs("issue", "ca", "certs/west.cluster.renewal.csr", "--as", "west.cluster", cwd=tmp_path)
    assert "renewed" in type_certs("renew", "certs/west.cluster.crt", cwd=tmp_path)
    assert certificate.read_bytes() != before[0] and key.read_bytes() != before[1]
    assert sorted(path.name for path in certificate.parent.iterdir()) == [
        "west.cluster.crt", "west.cluster.csr", "west.cluster.key",
    ]  # fmt: skip
    assert "renewed" in type_certs("renew", "certs/west.cluster.crt", "--authority", "ca", cwd=tmp_path)
    assert "cluster 'west' of run 'test'" in type_certs("show", "certs/west.cluster.crt", "ca/ca.crt", cwd=tmp_path)
    assert type_certs("revoke", "ca", "west.cluster", cwd=tmp_path).count("revoked west.cluster.test.dips") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("request", "a.b", "--role", "slave", "--run", "r"), "dots separate the parts of a certificate's name"),
        (("request", "west", "--role", "master", "--run", "r"), "a run has one master"),
        (("issue", "ca", "none.csr", "--as", "a.slave"), "none.csr cannot be read"),
        (("issue", "nowhere", "none.csr", "--as", "a.slave"), "nowhere/ca.crt cannot be read"),
        (("init", "ca", "--run", "r"), "there is an authority already"),
        (("revoke", "ca", "west.cluster"), "expected NAME.ROLE or a serial"),
    ],
    ids=["dots", "master", "request", "authority", "twice", "nobody"],
)
def test_mistakes(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    type_certs("init", "ca", "--run", RUN, cwd=tmp_path)
    code, text = type_words(*CLI, "certs", *words, cwd=tmp_path)
    assert code == 78 and said in text, text
