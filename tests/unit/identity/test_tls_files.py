"""Files that do not fit are refused by name, with what to do; what fits is loaded."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from dips.errors import ConfigError, Denied
from dips.identity import certificates
from dips.identity.authority import Authority
from dips.identity.certificates import utc_now
from dips.identity.names import PeerIdentity, PeerRole
from dips.identity.paths import TlsFiles, renewal_of
from dips.identity.tls_files import load_tls, require_identity
from tests.enrolled import Enrolled


def test_files_that_fit(enrolled: Enrolled) -> None:
    loaded = load_tls(enrolled.enroll("west", PeerRole.CLUSTER))
    assert loaded.identity == PeerIdentity("west", PeerRole.CLUSTER, "july")
    assert timedelta(days=89) < loaded.until - utc_now() < timedelta(days=91)


def test_a_file_of_authorities_may_have_comments(enrolled: Enrolled) -> None:
    """Names of authorities in comments, as bundles have them, are not always ASCII: Python's ssl refused them, which
    ended daemons with an HTTP port at their start, others when their master was silent.
    """
    files = enrolled.enroll("west", PeerRole.CLUSTER)
    content = files.ca.read_bytes()
    files.ca.unlink()  # a link to the authority's own
    files.ca.write_bytes("# Autorité\n".encode() + content)
    ssl.create_default_context(cadata=load_tls(files).ca.decode("ascii"))


def test_one_key_serves_all_daemons() -> None:
    files = TlsFiles.of(Path("certs/{name}.{role}.crt"), "s0", PeerRole.SLAVE)
    names = ("ca.crt", "s0.slave.crt", "s0.slave.key", "crl.pem")
    assert files == TlsFiles(*(Path("certs") / name for name in names))


def test_a_secret_of_cert_manager_is_mounted_as_it_is() -> None:
    """ca.crt, tls.crt and tls.key are the names of its keys, whoever the process is."""
    files = TlsFiles.of(Path("/etc/dips-tls/tls.crt"), "s0", PeerRole.SLAVE)
    assert [path.name for path in (files.ca, files.cert, files.key)] == ["ca.crt", "tls.crt", "tls.key"]


def two_names(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    return _signed(enrolled.authority, files, ["a.cluster.july.dips", "b.cluster.july.dips"])


def foreign_name(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    return _signed(enrolled.authority, files, ["www.example.org"])


def no_name(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    return _signed(enrolled.authority, files, [])


def _signed(authority: Authority, files: TlsFiles, names: list[str]) -> TlsFiles:
    """A certificate of three days that our authority would not sign, by its key."""
    key, root_path = certificates.new_key(), authority.directory / "ca.key"
    root_key = certificates.parse_key(certificates.read_key_pem(root_path, "key"), root_path, "key")
    subject = x509.Name([])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority.root.subject)
    builder = builder.public_key(key.public_key()).serial_number(7).not_valid_before(utc_now() - timedelta(hours=1))
    builder = builder.not_valid_after(utc_now() + timedelta(days=3))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False)
    certificates.write_public(files.cert, certificates.to_pem(builder.sign(root_key, hashes.SHA256())))
    certificates.write_private(files.key, certificates.key_to_pem(key))
    return files


def another_key(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    return replace(files, key=enrolled.enroll("east", PeerRole.CLUSTER).key)


def another_authority(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    Authority.create(enrolled.directory / "other", "july")
    return replace(files, ca=enrolled.directory / "other" / "ca.crt")


def another_list(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    """Behind our own."""
    Authority.create(enrolled.directory / "other", "july")
    files.crl.write_bytes(files.crl.read_bytes() + (enrolled.directory / "other" / "crl.pem").read_bytes())
    return files


def missing(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    files.cert.unlink()
    return files


def half_written(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    files.cert.write_bytes(files.cert.read_bytes()[:200])
    return files


def half_of_two_lists(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    """During a rollover: without the end of the second list its revocations would be missed."""
    content = files.crl.read_bytes()
    files.crl.write_bytes(content + content[:-50])
    return files


def no_block(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    files.cert.write_bytes(b"not a certificate")
    return files


def huge(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    files.cert.write_bytes(b"x" * (certificates.MOST_PEM + 1))
    return files


def open_to_all(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    files.key.chmod(0o644)
    return files


def revoked(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    enrolled.authority.revoke("west.cluster")
    return files


BAD: list[tuple[Callable[[Enrolled, TlsFiles], TlsFiles], str]] = [
    (two_names, r"tls: .*west\.cluster\.crt: expected one name .* found 2"),
    (foreign_name, r"tls: .*expected a certificate for .*www\.example\.org"),
    (no_name, r"tls: .*found none"),
    (another_key, r"tls: .*east\.cluster\.key is not the key of .*west\.cluster\.crt: one of them was renewed"),
    (another_authority, r"tls: .*which is not in .*other/ca\.crt"),
    (another_list, r"tls: .*is not signed by an authority"),
    (missing, r"tls: .*cannot be read: No such file.*bring it here, `dips certs request`"),
    (half_written, r"tls: .*is half-written; copy it once more"),
    (half_of_two_lists, r"tls: .*is half-written; copy it once more"),
    (no_block, r"tls: .*expected a certificate in PEM"),
    (huge, r"tls: .*more than 65536 bytes"),
    (open_to_all, r"tls: .*can be read by everybody .*644.*chmod 600"),
    (revoked, r"tls: .*is revoked by .*crl\.pem: ask for a new one"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_files_that_do_not_fit(
    enrolled: Enrolled, spoil: Callable[[Enrolled, TlsFiles], TlsFiles], message: str
) -> None:
    files = spoil(enrolled, enrolled.enroll("west", PeerRole.CLUSTER))
    with pytest.raises(ConfigError, match=message):
        load_tls(files)


@pytest.mark.parametrize(("days", "message"), [(91, "expired at"), (-1, "is valid from")])
def test_the_clock(enrolled: Enrolled, days: int, message: str) -> None:
    files = enrolled.enroll("west", PeerRole.CLUSTER)
    with pytest.raises(ConfigError, match=message):
        load_tls(files, utc_now() + timedelta(days=days))


def test_anothers_certificate(enrolled: Enrolled) -> None:
    loaded = load_tls(enrolled.enroll("west", PeerRole.CLUSTER))
    with pytest.raises(ConfigError, match=r"expected a certificate of slave 'west'.*got one of cluster 'west'"):
        require_identity(loaded, "west", PeerRole.SLAVE, "july")


def test_a_root_that_is_rolled_over(enrolled: Enrolled) -> None:
    """While both are trusted, certificates of either are."""
    files, other = enrolled.enroll("west", PeerRole.CLUSTER), Authority.create(enrolled.directory / "new", "july")
    both = enrolled.directory / "both.crt"
    both.write_bytes(certificates.to_pem(other.root) + files.ca.read_bytes())
    loaded = load_tls(replace(files, ca=both))
    assert loaded.identity.name == "west"
    assert loaded.trusts(certificates.parse_certificate(loaded.cert, files.cert, "tls"))


def test_an_authority_that_has_ended(enrolled: Enrolled) -> None:
    """One that is not ours may have signed what outlives it; gRPC would only say that the socket is closed."""
    ended, files = (
        Authority.create(enrolled.directory / "old", "july", days=1),
        enrolled.enroll("west", PeerRole.CLUSTER),
    )
    files = _signed(ended, replace(files, ca=ended.directory / "ca.crt"), ["west.cluster.july.dips"])
    with pytest.raises(ConfigError, match=r"tls: .*ca\.crt expired at"):
        load_tls(files, utc_now() + timedelta(days=2))


def test_files_that_are_being_renewed(enrolled: Enrolled) -> None:
    """A certificate that waits for its key is not taken before the key has its name, and then at once."""
    files = enrolled.enroll("west", PeerRole.CLUSTER)
    old_cert, old_key = files.cert.read_bytes(), files.key.read_bytes()
    enrolled.enroll("west", PeerRole.CLUSTER)
    new_cert = files.cert.read_bytes()
    files.cert.rename(renewal_of(files.cert, ".crt"))
    files.cert.write_bytes(old_cert)
    assert load_tls(files).cert == new_cert
    files.key.write_bytes(old_key)
    assert load_tls(files).cert == old_cert


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_disk_that_fails_between_two_calls_is_told_with_the_file(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """It answers for the content, and not for who may read it, or whether a renewal or a list is there: the bare error
    ended the master, with 70, and slaves and agents at their next look."""
    files, stat, left = enrolled.enroll("west", PeerRole.CLUSTER), Path.stat, [at]
    enrolled.enroll("west", PeerRole.CLUSTER)
    files.cert.rename(renewal_of(files.cert, ".crt"))
    files.cert.write_bytes(certificates.to_pem(enrolled.authority.root))  # of another key

    def fail_once(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", fail_once)
    with pytest.raises(ConfigError, match=r"tls: .* cannot be read: Input/output error"):
        load_tls(files)
    assert load_tls(files).identity.name == "west"


class TestAuthority:
    def test_a_second_one_in_its_place(self, enrolled: Enrolled) -> None:
        with pytest.raises(ConfigError, match="there is an authority already"):
            Authority.create(enrolled.directory / "ca", "july")

    def test_signs_for_its_run_only(self, enrolled: Enrolled) -> None:
        request = certificates.make_request(PeerIdentity("west", PeerRole.CLUSTER, "june"), certificates.new_key())
        with pytest.raises(Denied, match="the request is of run 'june', this authority is of run 'july'"):
            enrolled.authority.issue(request, "west.cluster")

    def test_never_outlives_its_root(self, tmp_path: Path) -> None:
        files = Enrolled(tmp_path)
        short = Authority.create(tmp_path / "short", "july", days=10)
        identity = PeerIdentity("west", PeerRole.CLUSTER, "july")
        signed = short.issue(certificates.make_request(identity, certificates.new_key()), identity.label)
        assert signed.not_valid_after_utc == short.root.not_valid_after_utc
        assert files.authority.list_issued() == []

    def test_lists_what_it_signed_and_revoked(self, enrolled: Enrolled) -> None:
        for name in ("west", "east", "west"):
            enrolled.enroll(name, PeerRole.CLUSTER)
        again = Authority.open(enrolled.directory / "ca")
        assert len(again.revoke("west.cluster")) == 2
        assert [row.revoked is not None for row in again.list_issued()] == [True, False, True]
        assert len(again.find_live(PeerIdentity("east", PeerRole.CLUSTER, "july"))) == 1
        with pytest.raises(ConfigError, match=r"expected NAME\.ROLE or a serial"):
            again.revoke("west.cluster")

    def test_renews_by_the_lines_of_that_name(self, enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thousand names have 50,000 lines after a month: all were read twice for each renewal, one after the other,
        and who asked in the same minute got no answer in time, and was signed for in vain until it had no more."""
        for name in ("west", "east", "far-west"):
            enrolled.enroll(name, PeerRole.CLUSTER)
        identity, life, read = PeerIdentity("west", PeerRole.CLUSTER, "july"), timedelta(hours=1), list[bytes]()
        (first,) = enrolled.authority.find_live(identity)
        request, loads = certificates.make_request(identity, certificates.new_key()), json.loads

        def read_line(line: bytes) -> Any:
            read.append(line)
            return loads(line)

        with monkeypatch.context() as reading:
            reading.setattr(json, "loads", read_line)
            enrolled.authority.renew(request, first.serial, identity.label, life)
        assert read and not any(b"east" in line for line in read)
        enrolled.authority.revoke(f"{first.serial:x}")
        with pytest.raises(Denied, match="is revoked"):
            enrolled.authority.renew(request, first.serial, identity.label, life)
        with pytest.raises(Denied, match="was not signed here"):
            enrolled.authority.renew(request, first.serial + 1, identity.label, life)
        assert len(enrolled.authority.find_live(identity)) == 1

    def test_one_process_at_a_time_changes_its_list(self, enrolled: Enrolled) -> None:
        """Or a certificate that is renewed while its name is revoked would stay valid."""
        enrolled.enroll("west", PeerRole.CLUSTER)
        with (enrolled.directory / "ca" / "issued.jsonl").open() as other, ThreadPoolExecutor(1) as thread:
            fcntl.flock(other, fcntl.LOCK_EX)
            revoking = thread.submit(enrolled.authority.revoke, "west.cluster")
            with pytest.raises(TimeoutError):
                revoking.result(0.05)
            fcntl.flock(other, fcntl.LOCK_UN)
            assert len(revoking.result(10.0)) == 1

    def test_its_directory_may_lie_on_nfs(self, enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch) -> None:
        """NFS refuses an exclusive lock of a file that is open for reading alone: nothing was signed or revoked there,
        `Bad file descriptor`.
        """

        def lock_as_nfs(file: Any, how: int) -> None:
            if how & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

        monkeypatch.setattr(fcntl, "flock", lock_as_nfs)
        enrolled.enroll("west", PeerRole.CLUSTER)
        assert len(enrolled.authority.revoke("west.cluster")) == 1

    def test_its_directory_on_a_file_system_without_locks_is_told(
        self, enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of daemons: `dips certs` ended with a traceback there, `Function not implemented`, that names no file."""

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(ConfigError, match=r"issued\.jsonl: its file system does not lock files"):
            enrolled.authority.revoke("west.cluster")

    def test_a_certificate_is_valid_to_its_last_second_unless_it_is_revoked(self, enrolled: Enrolled) -> None:
        enrolled.enroll("west", PeerRole.CLUSTER)
        (row,) = enrolled.authority.list_issued()
        assert row.is_valid(row.until) and not row.is_valid(row.until + timedelta(seconds=1))
        assert not replace(row, revoked=row.until).is_valid(row.until)

    def test_keys_of_the_authority_are_its_own(self, enrolled: Enrolled) -> None:
        assert (enrolled.directory / "ca" / "ca.key").stat().st_mode & 0o777 == 0o600
        (enrolled.directory / "ca" / "ca.key").write_bytes(certificates.key_to_pem(certificates.new_key()))
        with pytest.raises(ConfigError, match="is not the key of"):
            Authority.open(enrolled.directory / "ca")


def test_a_former_list_counts_while_its_own_authority_has_written_no_later_one(tmp_path: Path) -> None:
    """A later list of another authority replaces none of it: it would let in again whom the first had revoked. One
    whose authority is not trusted any more is not missed.
    """
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = Enrolled(tmp_path / "one"), Enrolled(tmp_path / "two")
    loaded, now = load_tls(one.enroll("west", PeerRole.CLUSTER)), utc_now()

    def listed(by: Enrolled, minutes: int, *serials: int) -> x509.CertificateRevocationList:
        at = now + timedelta(minutes=minutes)
        return certificates.make_revocations(dict.fromkeys(serials, at), by.authority.root, by.authority._key, at)

    both = replace(loaded, authorities=(one.authority.root, two.authority.root))
    former = [listed(one, 0, 7)]
    assert both.with_lists((listed(two, 5, 8),)).keep_revoked(former).revoked == {7, 8}
    assert both.with_lists((listed(one, 5, 9),)).keep_revoked(former).revoked == {9}
    same = both.with_lists((listed(two, 5, 7),))
    assert same.keep_revoked(former) == same, "the former one has nothing more"
    two_alone = replace(loaded, authorities=(two.authority.root,)).with_lists((listed(two, 5, 8),))
    assert two_alone.keep_revoked(former) == two_alone
