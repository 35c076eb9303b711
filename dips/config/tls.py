"""The section `tls` of both files."""

from __future__ import annotations

from pathlib import Path

from dips.config.section import Section
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles


class TlsSection(Section):
    """Certificates (`dips certs`); in cert and key `{name}` and `{role}` stand for those of the process that reads."""

    ca: Path
    cert: Path
    key: Path
    crl: Path | None = None

    def files_of(self, name: str, role: PeerRole) -> TlsFiles:
        """The files of one process."""
        return TlsFiles(self.ca, self.cert, self.key, self.crl).of(name, role)
