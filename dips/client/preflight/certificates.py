"""The preflight's row on certificates: their identity and expiry, or the problem with their files."""

from __future__ import annotations

from dips.client.preflight.checks import NOTE, OK, CheckRow, failed_row
from dips.config import ClusterFile
from dips.errors import ConfigError
from dips.identity.certificates import utc_now
from dips.identity.names import PeerRole
from dips.transport.tls import TlsSource

SOON_DAYS = 14  # before expiry, as in `dips certs show`


def check_certificates(config: ClusterFile) -> tuple[CheckRow, TlsSource | None]:
    """Return the row, and the certificates for asking the master; None: plain text, or the files cannot be used."""
    files = config.tls_files(config.cluster, PeerRole.CLUSTER)
    if files is None:
        return CheckRow("certificates", NOTE, "none: plain text on loopback"), None
    try:
        source = TlsSource(files, config.cluster, PeerRole.CLUSTER, config.shared.run, lambda problem: None)
    except ConfigError as error:
        return failed_row("certificates", error, "correct `tls`, or the files that it names"), None
    loaded = source.read_current()
    seen = f"{loaded.identity}, valid until {loaded.until:%Y-%m-%d}, trusts {source.files.ca}"
    if (loaded.until - utc_now()).days < SOON_DAYS:
        return CheckRow("certificates", NOTE, seen, f"`dips certs renew {source.files.cert}`"), source
    return CheckRow("certificates", OK, seen), source
