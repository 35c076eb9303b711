"""The paths of a certificate's files; apart from their readers, since a training process only names them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dips.identity.names import PeerRole


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the trusted authorities, our certificate, its key, and the revocations."""

    ca: Path
    cert: Path
    key: Path
    crl: Path | None = None

    def of(self, name: str, role: PeerRole) -> TlsFiles:
        """Return the paths with `{name}` and `{role}` filled in: one section of the run file serves all its daemons."""

        def fill(path: Path) -> Path:
            return Path(str(path).replace("{name}", name).replace("{role}", role))

        return replace(self, cert=fill(self.cert), key=fill(self.key))
