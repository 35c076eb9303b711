"""An authority: a directory with a run's root key, the list of signed certificates and the revocations.

Private keys of daemons never come here: they are made where they are used, and only requests are sent.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509

from dips.errors import Busy, ConfigError, Denied, FailedDisk
from dips.files import explain_unwritable, lock_file
from dips.identity import certificates
from dips.identity.certificates import CLOCK_SKEW, Key, utc_now
from dips.identity.names import PeerIdentity, parse_san
from dips.identity.paths import REVOCATIONS, ROOT
from dips.ids import check_name

ROOT_KEY, ISSUED = "ca.key", "issued.jsonl"
ROOT_DAYS, LEAF_DAYS = 3650, 90
MOST_LIVE = 8  # valid certificates of a name that renews itself: the last one, the next, and those of broken attempts


@dataclass(frozen=True, slots=True)
class IssuedRow:
    """One certificate that the authority signed."""

    san: str
    serial: int
    until: datetime
    revoked: datetime | None

    def is_valid(self, now: datetime) -> bool:
        """Whether it is neither revoked nor over."""
        return self.revoked is None and now <= self.until


class Authority:
    """The authority of one run, in its directory."""

    def __init__(self, directory: Path, run: str, root: x509.Certificate, key: Key) -> None:
        """Not called directly: use `create` or `open`."""
        self.directory, self.run, self.root, self._key = directory, run, root, key

    @classmethod
    def create(cls, directory: Path, run: str, days: int = ROOT_DAYS) -> Authority:
        """Create an authority; raise ConfigError if the directory holds one already."""
        check_name(run, "run")
        for name in (ROOT, ROOT_KEY, ISSUED):
            if (directory / name).exists():
                raise ConfigError(f"{directory / name}: there is an authority already; name another directory")
        key = certificates.new_key()
        authority = cls(directory, run, certificates.make_authority(run, key, utc_now(), days), key)
        certificates.write_private(directory / ROOT_KEY, certificates.key_to_pem(key))
        certificates.write_private(directory / ISSUED, json.dumps({"run": run}).encode() + b"\n")
        authority._write_revocations({}, utc_now())
        certificates.write_public(directory / ROOT, certificates.to_pem(authority.root))
        return authority

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """Read an authority's directory; raise ConfigError if it is not complete."""
        root, key = directory / ROOT, directory / ROOT_KEY
        certificate = certificates.parse_certificate(certificates.read_pem(root, "authority"), root, "authority")
        secret = certificates.parse_key(certificates.read_key_pem(key, "authority"), key, "authority")
        if certificate.public_key() != secret.public_key():
            raise ConfigError(f"{key} is not the key of {root}: put back the file that `dips certs init` wrote")
        try:
            head = json.loads((directory / ISSUED).read_text().partition("\n")[0])
            run = check_name(head["run"], "run")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{directory / ISSUED}: expected the list that `dips certs init` began: {error}"
            ) from error
        return cls(directory, run, certificate, secret)

    def issue(
        self, request: x509.CertificateSigningRequest, label: str, life: timedelta = timedelta(days=LEAF_DAYS)
    ) -> x509.Certificate:
        """Sign a request for `label`, NAME.ROLE; raise Denied if the request is for another name, or not usable.

        The signer must pass the label: a request may ask for any role, and its sender chooses the file's name.
        """
        with self._lock():
            return self._sign(request, label, life)

    def _sign(self, request: x509.CertificateSigningRequest, label: str, life: timedelta) -> x509.Certificate:
        identity = certificates.identity_of(request)
        if identity.label != label:
            raise Denied(f"expected a request of {label}, got one of {identity.label}: it asks to be {identity}")
        if identity.run != self.run:
            raise Denied(f"the request is of run {identity.run!r}, this authority is of run {self.run!r}")
        certificate = certificates.sign_request(request, self.root, self._key, utc_now(), life)
        until = certificate.not_valid_after_utc.isoformat()
        self._append({"san": identity.san, "serial": f"{certificate.serial_number:x}", "until": until})
        return certificate

    def renew(
        self,
        request: x509.CertificateSigningRequest,
        shown: int,
        label: str,
        life: timedelta,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> x509.Certificate:
        """Sign a request of the holder of the certificate `shown`, by serial, for its own `label`.

        Raise Denied if the request is for another name, or that certificate is revoked or not of this list; Busy if the
        name has MOST_LIVE valid ones: a holder that asks on and on must not fill the disk; or if `is_gone` says, once
        others are served, that it does not wait any more: what it does not get would count, too.
        """
        with self._lock():  # a revocation under way comes before, and this one is refused, or after, and revokes it
            if is_gone():
                raise Busy(f"{label} does not wait for its certificate any more")
            row = next((row for row in self.list_issued(f"{shown:x}") if row.serial == shown), None)
            if row is None or row.revoked is not None:
                why = "is revoked" if row else "was not signed here"
                raise Denied(f"the certificate {shown:x} of {label} {why}: ask for a new one by `dips certs request`")
            if len(live := self.find_live(parse_san(row.san))) >= MOST_LIVE:
                first = min(row.until for row in live)
                raise Busy(f"{label} has {len(live)} valid certificates, the most: the first ends at {first:%H:%M} UTC")
            return self._sign(request, label, life)

    def revoke(self, label: str) -> list[IssuedRow]:
        """Revoke all certificates of `NAME.ROLE`, or one by its serial; raise ConfigError if there is none."""
        now = utc_now()
        with self._lock():
            rows = [row for row in self.list_issued() if row.is_valid(now) and self._is_meant(row, label)]
            if not rows:
                raise ConfigError(
                    f"{label}: expected NAME.ROLE or a serial of a certificate that is valid, not revoked"
                )
            meant = {row.serial: now for row in rows}
            former = [(row, row.revoked) for row in self.list_issued() if row.revoked is not None]
            # Not those that have ended: a name that renews itself daily would fill the list, which has a limit.
            listed = {row.serial: at for row, at in former if row.until > now - CLOCK_SKEW}
            # Not older than the one before, as by a clock that was set back: who has that would not take it.
            told_at = max([now, *(at for _, at in former)])
            # Before they are noted: ended in between, the same command finds the same certificates.
            self._write_revocations(listed | meant, told_at)
            for row in rows:
                self._append({"revoked": f"{row.serial:x}", "at": now.isoformat()})
        return rows

    def read_revocations(self) -> x509.CertificateRevocationList:
        """Return the list of all that it revoked."""
        path = self.directory / REVOCATIONS
        (revocations,) = certificates.parse_revocations(certificates.read_pem(path, "authority"), path, "authority")
        return revocations

    def list_issued(self, about: str = "") -> list[IssuedRow]:
        """Return the certificates that it has signed, the oldest first.

        about  a SAN or a serial: only lines with this text are read, since a thousand names that renew themselves make
               50,000 in a month, and all who ask wait for each other
        """
        rows: dict[str, IssuedRow] = {}
        for said in self._read_rows(about):
            if serial := said.get("serial"):
                rows[serial] = IssuedRow(said["san"], int(serial, 16), datetime.fromisoformat(said["until"]), None)
            elif (serial := said.get("revoked")) in rows:
                was = rows[serial]
                rows[serial] = IssuedRow(was.san, was.serial, was.until, datetime.fromisoformat(said["at"]))
        return list(rows.values())

    def find_live(self, identity: PeerIdentity) -> list[IssuedRow]:
        """Return the certificates of one name that are valid now."""
        now = utc_now()
        return [row for row in self.list_issued(identity.san) if row.san == identity.san and row.is_valid(now)]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other processes (`dips certs serve`, `issue`, `revoke`) from changing the list."""
        path = self.directory / ISSUED
        with explain_unwritable(path):
            file = path.open("r+b")  # NFS locks exclusively only what is open for writing
        with file:
            lock_file(file, path, fcntl.LOCK_EX)
            yield

    def _is_meant(self, row: IssuedRow, label: str) -> bool:
        return label in (parse_san(row.san).label, row.san, f"{row.serial:x}")

    def _read_rows(self, about: str) -> Iterator[dict[str, str]]:
        path, sought = self.directory / ISSUED, about.encode()
        lines, _, _ = path.read_bytes().rpartition(b"\n")  # behind the last: a line that was torn
        for number, line in enumerate(lines.split(b"\n")[1:], 2):
            if sought not in line and b"revoked" not in line:
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is not JSON: {error}") from error

    def _append(self, row: dict[str, str]) -> None:
        """Add a line, durable on return, in place of one that was torn: what that said was never handed out. Raise
        FailedDisk if it cannot be written; then it is not in the list.
        """
        path, line = self.directory / ISSUED, json.dumps(row).encode() + b"\n"
        try:
            with path.open("r+b", buffering=0) as file:
                end = file.read().rfind(b"\n") + 1
                file.truncate(end)
                try:
                    if os.pwrite(file.fileno(), line, end) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise FailedDisk(f"{path}: cannot be written: {error.strerror}") from error

    def _write_revocations(self, serials: dict[int, datetime], now: datetime) -> None:
        revoked = certificates.make_revocations(serials, self.root, self._key, now)
        certificates.write_public(self.directory / REVOCATIONS, certificates.to_pem(revoked))
