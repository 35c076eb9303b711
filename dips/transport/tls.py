"""This process's certificate on gRPC, reloaded for new connections when the files change.

Files that do not fit (half of a renewal, a missing Secret) or cannot be read are reported, and the loaded ones stay in
use; a revocation list that fits is used in any case.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

import grpc

from dips.errors import ConfigError
from dips.files import FileStamp, stamp_file
from dips.identity import certificates
from dips.identity.certificates import check_until, utc_now
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.identity.tls_files import LoadedTls, load_tls, read_lists, require_identity
from dips.tasks import SpacedLooks, call_apart

LOOK_S = 1.0  # least time between two checks of the files
SILENT_S = 1.0  # for their disk to answer; then the loaded ones stay in use until it does
Report = Callable[[str], None]
_Stamp = tuple[FileStamp | int, ...]


class TlsSource:
    """Our identity, as in the present files; from any thread."""

    def __init__(
        self,
        files: TlsFiles,
        name: str,
        role: PeerRole,
        run: str,
        report: Report = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the files; raise ConfigError if they do not fit or are another process's. `report` is called if later
        ones do not.
        """
        self.files, self._name, self._role, self._run = files, name, role, run
        self._report, self._lock = report, threading.Lock()
        self._looks = SpacedLooks(self._look_again, "certificates", LOOK_S, SILENT_S, clock, self._call_look)
        self._stamp = self._take_stamp()
        self._loaded, self._problem, self._list_problem = self._load(), "", ""

    @property
    def run(self) -> str:
        return self._run

    def read_current(self) -> LoadedTls:
        """Return the certificate and key for a new connection."""
        with self._lock:
            self._looks.look_if_due()
            return self._loaded

    def find_problem(self) -> str:
        """Return why newer files are not used; empty if there are none, or they are."""
        self.read_current()
        return self._problem

    def find_expiry(self, now: datetime | None = None) -> str:
        """Return a message if our certificate has expired; empty if it has not."""
        try:
            check_until(self.read_current().until, now or utc_now(), f"tls: {self.files.cert}")
        except ConfigError as error:
            return str(error)
        return ""

    _call_look = staticmethod(call_apart)

    def _look_again(self) -> None:
        """Load files that have changed, or were of no use at the last look: who may read them changes no stamp."""
        stamp = self._take_stamp()
        if stamp == self._stamp and not self._problem:
            return
        try:
            self._require_revocations()
            new = self._load()
        except ConfigError as error:
            problem, self._problem = self._problem, f"the new files are not used: {error}"
            if problem != self._problem:
                self._report(self._problem)
            self._take_revocations()
        else:
            self._problem = ""
            self._use_files(new)
        self._stamp = stamp

    def _take_revocations(self) -> None:
        """Use a later revocation list alone, if it fits: our own certificate may have ended, or be in the list."""
        try:
            self._require_revocations()
            lists = read_lists(self.files, self._loaded.authorities)
        except ConfigError as error:
            problem, self._list_problem = self._list_problem, f"the new revocation list is not used: {error}"
            if problem != self._list_problem and str(error) not in self._problem:
                self._report(self._list_problem)
            return
        if lists != self._loaded.lists:
            self._use_files(self._loaded.with_lists(lists))

    def _use_files(self, new: LoadedTls) -> None:
        """Use these files, and of the former revocation lists what they lack: nobody is let in again by an older list,
        or by that of another authority.
        """
        self._loaded = new.keep_revoked(self._loaded.lists)
        problem, self._list_problem = self._list_problem, ""
        if len(self._loaded.lists) > len(new.lists):
            self._list_problem = (
                f"tls: {self.files.crl} lacks what it had revoked, which stays revoked: bring the newest list of each "
                f"authority in {self.files.ca}, one behind the other"
            )
            self._problem = self._problem or self._list_problem
            if problem != self._list_problem:
                self._report(self._list_problem)

    def _require_revocations(self) -> None:
        """Raise ConfigError if the list is gone that revoked something: nobody is let in again by a missing file."""
        if self._loaded.revoked and certificates.is_missing(self.files.crl, "tls"):
            raise ConfigError(f"tls: {self.files.crl} is gone, and what it revoked stays revoked: bring it back")

    def _take_stamp(self) -> _Stamp:
        """Return a value that changes whenever a file does; a missing file has one as well."""
        files = self.files
        return tuple(stamp_file(path) for path in (files.ca, files.cert, files.key, files.crl))

    def _load(self) -> LoadedTls:
        return require_identity(load_tls(self.files), self._name, self._role, self._run)


# gRPC's core calls `fetch` of whoever connects while its server ends through a bare pointer to the credentials: without
# them the process dies by SIGSEGV (grpcio 1.85). A daemon makes one or two.
_used_credentials: list[grpc.ServerCredentials] = []


def make_server_credentials(source: TlsSource, on_handshake: Callable[[], None]) -> grpc.ServerCredentials:
    """Return credentials for a port that accepts only peers with a certificate of our authority; a renewed certificate
    is used from the next connection on. `on_handshake` is called for each, on gRPC's threads.
    """
    used = [source.read_current()]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        on_handshake()
        now = source.read_current()
        if now is used[0]:
            return None  # unchanged
        used[0] = now
        return _server_configuration(now)

    made = grpc.dynamic_ssl_server_credentials(_server_configuration(used[0]), cast(Any, fetch), True)
    _used_credentials.append(made)
    return made


def load_certificate(context: ssl.SSLContext, loaded: LoadedTls) -> None:
    """Have connections of `context` present our certificate.

    Python reads certificates from files only: this one is in memory, so it holds what was verified together, whatever
    lies on the disk meanwhile.
    """
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(loaded.cert + b"\n" + loaded.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def make_channel_credentials(loaded: LoadedTls) -> grpc.ChannelCredentials:
    """Return credentials that present our certificate and accept only servers of our authority."""
    return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)


def _server_configuration(loaded: LoadedTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)
