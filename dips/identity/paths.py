"""Where the files of a certificate lie; apart from what reads them, since a training process names them only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dips.identity.names import PeerRole


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where they are: trusted authorities, our certificate, its key, and what is revoked."""

    ca: Path
    cert: Path
    key: Path
    crl: Path | None = None

    def of(self, name: str, role: PeerRole) -> TlsFiles:
        """Fill `{name}` and `{role}` in: one section of the run file serves all its daemons."""

        def fill(path: Path) -> Path:
            return Path(str(path).replace("{name}", name).replace("{role}", role))

        return replace(self, cert=fill(self.cert), key=fill(self.key))
