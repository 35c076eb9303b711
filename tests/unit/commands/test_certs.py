"""`dips certs`: who signs says whom he signs for, and can look before he does."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dips import cli
from dips.errors import ConfigError, DipsError, treatment_of
from dips.identity.authority import Authority
from dips.identity.certificates import (
    identity_of,
    parse_certificate,
    parse_key,
    parse_revocations,
    read_key_pem,
    read_pem,
    utc_now,
)
from dips.identity.names import PeerRole
from dips.identity.tls_files import load_tls
from tests.disk_calls import DiskCalls
from tests.enrolled import Enrolled

RUN = "two-hosts"


def type_certs(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.cli, ["certs", *map(str, words)])
    error = done.exception
    got = treatment_of(error).exit_code if isinstance(error, DipsError) else done.exit_code
    assert got == code, done.output + repr(error)
    return done.output + (str(error) if isinstance(error, DipsError) else "")


@pytest.fixture(name="ca")
def authority(tmp_path: Path) -> Path:
    type_certs("init", tmp_path / "ca", "--run", RUN)
    return tmp_path / "ca"


def ask(directory: Path, label: str, file: str) -> Path:
    """A request of `label`, sent under the name `file`."""
    name, _, role = label.partition(".")
    type_certs("request", name, "--role", role, "--run", RUN, "--out", directory / "own")
    request = directory / file
    (directory / "own" / f"{label}.csr").rename(request)
    return request


@pytest.mark.parametrize("label", ["operator.operator", "master.master", "slave-0.slave", "oslo.cluster"])
def test_a_request_for_another_name_or_role_is_refused(ca: Path, tmp_path: Path, label: str) -> None:
    """It came in a cluster's file; its name and role are not what the authority says."""
    request = ask(tmp_path, label, "berlin.cluster.csr")
    said = type_certs("issue", ca, request, "--as", "berlin.cluster", code=77)
    assert "expected a request of berlin.cluster" in said and label in said
    assert not request.with_suffix(".crt").exists()
    assert "serial" not in (ca / "issued.jsonl").read_text(), "nothing was signed"


def test_nothing_is_signed_for_a_name_that_nobody_said(ca: Path, tmp_path: Path) -> None:
    request = ask(tmp_path, "berlin.cluster", "berlin.cluster.csr")
    assert CliRunner().invoke(cli.cli, ["certs", "issue", str(ca), str(request)]).exit_code == 2
    assert not request.with_suffix(".crt").exists()


def test_one_request_a_call(ca: Path, tmp_path: Path) -> None:
    """A glob would sign what nobody has looked at."""
    requests = [str(ask(tmp_path, "berlin.cluster", "a.csr")), str(tmp_path / "b.csr")]
    assert CliRunner().invoke(cli.cli, ["certs", "issue", str(ca), *requests, "--as", "berlin.cluster"]).exit_code == 2


def test_signed_as_said(ca: Path, tmp_path: Path) -> None:
    request = ask(tmp_path, "operator.operator", "from-the-mail.csr")
    assert "operator 'operator'" in type_certs("issue", ca, request, "--as", "operator.operator")
    signed = tmp_path / "from-the-mail.crt"
    assert identity_of(parse_certificate(read_pem(signed, "it"), signed, "it")).role is PeerRole.OPERATOR


def test_a_request_is_shown_with_its_role(ca: Path, tmp_path: Path) -> None:
    """What is in the file, not what the file is called; and the key, which its owner can read out."""
    request = ask(tmp_path, "operator.operator", "berlin.cluster.csr")
    said = type_certs("show", request)
    assert "operator 'operator' of run 'two-hosts'" in said and "--as operator.operator" in said
    (row,) = map(json.loads, type_certs("show", "--json", request).splitlines())
    assert row["state"] == "request" and row["who"] == "operator 'operator' of run 'two-hosts'" and row["key"] in said


def test_a_request_that_its_key_has_not_signed(ca: Path, tmp_path: Path) -> None:
    request = ask(tmp_path, "berlin.cluster", "berlin.cluster.csr")
    lines = request.read_bytes().split(b"\n")
    flipped = bytearray(lines[-3])
    flipped[-9] = ord("A") if flipped[-9] != ord("A") else ord("B")
    request.write_bytes(b"\n".join([*lines[:-3], bytes(flipped), *lines[-2:]]))
    assert "not signed by the P-256 key that it names" in type_certs("show", request, code=1)


def test_a_certificate_is_renewed_by_the_authority_or_by_a_request(ca: Path, tmp_path: Path) -> None:
    """With the authority at hand in one call; without it by a request, which is installed once it is signed."""
    request = ask(tmp_path, "berlin.cluster", "berlin.cluster.csr")
    certificate = tmp_path / "own" / "berlin.cluster.crt"
    type_certs("issue", ca, request, "--as", "berlin.cluster")
    request.with_suffix(".crt").rename(certificate)

    def serial() -> int:
        read, key = parse_certificate(read_pem(certificate, "it"), certificate, "it"), certificate.with_suffix(".key")
        assert parse_key(read_key_pem(key, "it"), key, "it").public_key() == read.public_key()
        return read.serial_number

    first = serial()
    assert f"{certificate}: renewed" in type_certs("renew", certificate, "--authority", ca)
    second = serial()
    assert "call renew again" in type_certs("renew", certificate)
    assert serial() == second != first
    (waiting,) = (tmp_path / "own").glob("*.csr")
    type_certs("issue", ca, waiting, "--as", "berlin.cluster")
    assert f"{certificate}: renewed" in type_certs("renew", certificate)
    assert serial() not in (first, second) and not list((tmp_path / "own").glob("*.csr"))


def test_a_certificate_is_shown_with_what_is_wrong_with_it(tmp_path: Path) -> None:
    """Exit code 1 if one cannot be used; one that only ends soon can."""
    enrolled, soon = Enrolled(tmp_path, RUN), "berlin.cluster.crt: cluster 'berlin'"
    for life, state, code in ((timedelta(days=90), "valid", 0), (timedelta(seconds=-1), "expired", 1)):
        files = enrolled.enroll("berlin", PeerRole.CLUSTER, life)
        said = type_certs("show", files.cert, code=code)
        assert f"{soon} of run '{RUN}'\n  {state}, until" in said
    all_well = enrolled.enroll_ending("berlin", PeerRole.CLUSTER).cert, enrolled.enroll("bonn", PeerRole.CLUSTER).cert
    assert "expires soon" in type_certs("show", *all_well, ask(tmp_path, "oslo.cluster", "oslo.csr"))
    (row,) = map(json.loads, type_certs("show", "--json", tmp_path / "ca.crt").splitlines())
    assert row["state"] == "valid", "of no name, but a root has none"


@pytest.mark.parametrize(
    "words", [["--watch"], ["--watch", "--authority", "ca"], ["--from", "127.0.0.1:9", "--authority", "ca"]]
)
def test_a_renewal_has_one_signer(tmp_path: Path, words: list[str]) -> None:
    """Nothing is read, made or asked before that is clear."""
    assert "--authority signs here" in type_certs("renew", tmp_path / "berlin.cluster.crt", *words, code=78)


def test_the_port_needs_an_authority(tmp_path: Path) -> None:
    said = type_certs("serve", tmp_path / "nowhere", "--listen", "127.0.0.1:0", code=78)
    assert str(tmp_path / "nowhere") in said


def test_a_request_that_failed_is_repeated(tmp_path: Path) -> None:
    """A disk that was full when the request was to be written leaves no key, for which there would be none."""
    key, request = tmp_path / "west.cluster.key", tmp_path / "west.cluster.csr"
    words = ("request", "west", "--role", "cluster", "--run", "july", "--out", tmp_path)
    (in_the_way := tmp_path / ".unfinished-west.cluster.csr").mkdir()
    assert "west.cluster.csr: cannot be written" in type_certs(*words, code=78)
    in_the_way.rmdir()
    type_certs(*words)
    assert key.exists() and request.exists()


def test_what_is_to_be_done_with_a_key_that_is_there_helps(ca: Path, tmp_path: Path) -> None:
    """Without its certificate there is nothing to renew: the request is signed, or, if it is lost, the key removed."""
    words = ("request", "west", "--role", "cluster", "--run", RUN, "--out", tmp_path)
    key, request, certificate = (tmp_path / f"west.cluster{end}" for end in (".key", ".csr", ".crt"))
    type_certs(*words)
    said = type_certs(*words, code=78)
    assert f"it waits for the certificate of {request}" in said and "if that is lost, remove the key" in said
    request.unlink()
    key.unlink()
    type_certs(*words)
    type_certs("issue", ca, request, "--as", "west.cluster")
    assert f"`dips certs renew {certificate}` makes a new one" in type_certs(*words, code=78)


def test_a_first_request_is_not_signed_over_what_was_renewed_since(ca: Path, tmp_path: Path) -> None:
    """As when the lines that enrolled all are typed once more for a name that was added."""
    own = tmp_path / "own"
    type_certs("request", "west", "--role", "cluster", "--run", RUN, "--out", own)
    request, certificate = own / "west.cluster.csr", own / "west.cluster.crt"
    for _ in range(2):
        type_certs("issue", ca, request, "--as", "west.cluster")
    type_certs("renew", certificate, "--authority", ca)
    before = certificate.read_bytes()
    said = type_certs("issue", ca, request, "--as", "west.cluster", code=78)
    assert f"{request} is of another key than {own / 'west.cluster.key'}" in said and certificate.read_bytes() == before
    assert len(Authority.open(ca).list_issued()) == 3, "nothing was signed"


@pytest.mark.parametrize("signer", [[], ["--authority"]])
def test_a_renewal_whose_request_is_lost_says_so(ca: Path, tmp_path: Path, signer: list[str]) -> None:
    """It is not told again and again to sign a file that is not there."""
    (tmp_path / "own").mkdir()
    west = Enrolled(tmp_path / "own", RUN).enroll("west", PeerRole.CLUSTER)
    words = ("renew", west.cert, *([*signer, ca] if signer else []))
    type_certs("renew", west.cert)
    key, request = (west.cert.with_name(f"west.cluster.renewal{end}") for end in (".key", ".csr"))
    request.unlink()
    said = type_certs(*words, code=78)
    assert f"{key} waits for the certificate of {request}, which is not here: bring it" in said
    key.unlink()
    type_certs(*words)


def test_a_certificate_of_a_former_renewal_is_not_put_in_place(tmp_path: Path) -> None:
    """It was copied once more from the authority's machine, where each of a name has the same file."""
    enrolled = Enrolled(tmp_path, RUN)
    former = enrolled.enroll("west", PeerRole.CLUSTER).cert.read_bytes()
    west = enrolled.enroll("west", PeerRole.CLUSTER)
    signed = tmp_path / "west.cluster.renewal.crt"
    signed.write_bytes(former)
    assert "it is of a former renewal: remove it" in type_certs("renew", west.cert, code=78)
    load_tls(west)
    signed.unlink()
    assert "call renew again" in type_certs("renew", west.cert)


def test_two_revocations_stay_two(tmp_path: Path) -> None:
    """The list is of all that was ever revoked: a second one does not make the first valid again."""
    enrolled = Enrolled(tmp_path)
    for name in ("berlin", "oslo"):
        enrolled.enroll(name, PeerRole.CLUSTER)
    rows = [row for name in ("berlin", "oslo") for row in enrolled.authority.revoke(f"{name}.cluster")]
    path = tmp_path / "ca" / "crl.pem"
    (revoked,) = parse_revocations(read_pem(path, "crl"), path, "crl")
    assert {row.serial_number for row in revoked} == {row.serial for row in rows} and len(rows) == 2


def test_a_list_is_never_older_than_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was a day fast at the first revocation: who has that list takes no older one for a newer."""
    enrolled, path, dates = Enrolled(tmp_path), tmp_path / "ca" / "crl.pem", []
    for ahead, name in ((timedelta(days=1), "berlin"), (timedelta(0), "oslo")):
        enrolled.enroll(name, PeerRole.CLUSTER)
        monkeypatch.setattr("dips.identity.authority.utc_now", lambda ahead=ahead: utc_now() + ahead)
        enrolled.authority.revoke(f"{name}.cluster")
        (revoked,) = parse_revocations(read_pem(path, "crl"), path, "crl")
        dates.append(revoked.last_update_utc)
    assert len(revoked) == 2 and dates[0] <= dates[1], dates


def test_a_revocation_that_failed_is_repeated(tmp_path: Path) -> None:
    """A disk that was full when the list was to be written: the same command writes it, and is not told that there is
    nothing to revoke.
    """
    enrolled, path = Enrolled(tmp_path), tmp_path / "ca" / "crl.pem"
    enrolled.enroll("berlin", PeerRole.CLUSTER)
    (in_the_way := path.with_name(".unfinished-crl.pem")).mkdir()
    with pytest.raises(ConfigError, match=r"crl\.pem: cannot be written"):
        enrolled.authority.revoke("berlin.cluster")
    in_the_way.rmdir()
    (row,) = enrolled.authority.revoke("berlin.cluster")
    (revoked,) = parse_revocations(read_pem(path, "crl"), path, "crl")
    assert [listed.serial_number for listed in revoked] == [row.serial]
    assert [issued.revoked is not None for issued in enrolled.authority.list_issued()] == [True]


def test_what_has_ended_is_not_listed(tmp_path: Path) -> None:
    """A name that renews itself has hundreds behind it, and daemons read a list of 64 KiB at most."""
    enrolled, path, issued = Enrolled(tmp_path), tmp_path / "ca" / "crl.pem", tmp_path / "ca" / "issued.jsonl"
    enrolled.enroll("berlin", PeerRole.CLUSTER, timedelta(seconds=-1))
    with pytest.raises(ConfigError, match="a certificate that is valid, not revoked"):
        enrolled.authority.revoke("berlin.cluster")
    enrolled.enroll("berlin", PeerRole.CLUSTER)
    (last_year,) = enrolled.authority.revoke("berlin.cluster")
    issued.write_text(issued.read_text().replace(last_year.until.isoformat(), "2020-01-01T00:00:00+00:00"))
    enrolled.enroll("berlin", PeerRole.CLUSTER)
    (row,) = enrolled.authority.revoke("berlin.cluster")
    (revoked,) = parse_revocations(read_pem(path, "crl"), path, "crl")
    assert [listed.serial_number for listed in revoked] == [row.serial]


@pytest.mark.parametrize("torn", [b'{"san": "rom', b"\0" * 40, b"\xff\xfe"])
def test_a_line_that_was_torn_is_nobody_s(tmp_path: Path, torn: bytes) -> None:
    """A full disk or a power cut ended the list in the middle of a line: it is read, and goes on, without that."""
    enrolled, issued = Enrolled(tmp_path), tmp_path / "ca" / "issued.jsonl"
    enrolled.enroll("berlin", PeerRole.CLUSTER)
    with issued.open("ab") as file:
        file.write(torn)
    assert len(enrolled.authority.list_issued()) == 1
    enrolled.enroll("oslo", PeerRole.CLUSTER)
    enrolled.authority.revoke("oslo.cluster")
    assert [row.revoked is None for row in enrolled.authority.list_issued()] == [True, False]
    assert torn not in issued.read_bytes() and issued.read_bytes().count(b"\n") == 4


def test_what_is_signed_or_revoked_is_on_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate whose row was lost with the power could not be revoked by its name, and a revocation whose row was
    lost would be taken back by the next one."""
    enrolled = Enrolled(tmp_path)
    disk = DiskCalls(tmp_path, monkeypatch)
    enrolled.enroll("berlin", PeerRole.CLUSTER)
    assert disk.calls[0] == "fsync ca/issued.jsonl"
    disk.calls.clear()
    enrolled.authority.revoke("berlin.cluster")
    assert disk.calls[-1] == "fsync ca/issued.jsonl"
