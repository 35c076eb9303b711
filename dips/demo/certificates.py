"""Certificates for `dips demo --secure`, made by the commands of docs/guides/certificates.md.

One directory represents all machines: in a real run the authority's `ca/` is elsewhere, and each machine has its own
key.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from dips.commands.status import ask_status
from dips.demo.layout import CLUSTERS, RUN, SLAVES, DemoLayout
from dips.demo.verdict import Check
from dips.errors import Denied, UnavailableMaster, treatment_of
from dips.identity.names import MASTER_NAME, PeerRole
from dips.identity.paths import REVOCATIONS, ROOT
from dips.local import run as local
from dips.local.processes import ProcessEnded
from dips.transport.endpoints import master_peer

AUTHORITY, CERTIFICATES = "ca", "certs"  # directories
VIEWER = "watch"  # name in the certificate by which the demo reads the status
_ENROLLED = (
    (MASTER_NAME, PeerRole.MASTER),
    *((name, PeerRole.SLAVE) for name in SLAVES),
    *((name, PeerRole.CLUSTER) for name in CLUSTERS),
    (PeerRole.OPERATOR.value, PeerRole.OPERATOR),
    (VIEWER, PeerRole.VIEWER),
)


def make_certificates(files: DemoLayout) -> int:
    """Make an authority and a certificate for each process and for the viewer; return their number."""
    authority, directory = files.directory / AUTHORITY, files.directory / CERTIFICATES
    local.run_word("certs", "init", str(authority), "--run", RUN)
    for name, role in _ENROLLED:
        local.run_word("certs", "request", name, "--role", role, "--run", RUN, "--out", str(directory))
        request = str(directory / f"{name}.{role}.csr")
        local.run_word("certs", "issue", str(authority), request, "--as", f"{name}.{role}")
    for name in (ROOT, REVOCATIONS):
        shutil.copyfile(authority / name, directory / name)
    return len(_ENROLLED)


def viewer_file(files: DemoLayout) -> Path:
    """Return the certificate by which the demo itself asks the master."""
    return files.directory / CERTIFICATES / f"{VIEWER}.{PeerRole.VIEWER}.crt"


def check_strangers(files: DemoLayout, address: str) -> list[Check]:
    """Ask the running master in plain text, and try to drain a slave as a viewer; both must fail."""
    viewer = ("--credentials", str(viewer_file(files)))
    return [
        Check("the master answers nobody in plain text", *_ask_plainly(address)),
        Check("who may look may not drain", *_ask_to_drain(address, viewer)),
    ]


def _ask_plainly(address: str) -> tuple[bool, str]:
    try:
        asyncio.run(ask_status(master_peer(address, None)))
    except UnavailableMaster as error:
        return True, str(error)
    return False, "it was answered"


def _ask_to_drain(address: str, viewer: tuple[str, str]) -> tuple[bool, str]:
    try:
        local.run_word("drain", SLAVES[0], "--master", address, *viewer)
    except ProcessEnded as error:
        return error.code == treatment_of(Denied()).exit_code, str(error).rpartition("error: ")[2].partition("\n")[0]
    return False, "it was drained"
