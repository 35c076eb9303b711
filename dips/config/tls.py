"""The section `tls` of both files."""

from __future__ import annotations

from pathlib import Path

from dips.config.section import Section
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles


class TlsSection(Section):
    """Certificate files (`dips certs`); `{name}` and `{role}` in cert and key are replaced by those of the process."""

    ca: Path
    cert: Path
    key: Path
    crl: Path | None = None

    def files_of(self, name: str, role: PeerRole) -> TlsFiles:
        """Return the files of one process."""
        return TlsFiles(self.ca, self.cert, self.key, self.crl).of(name, role)
