"""The TLS of the HTTP port: presents the daemon's own certificate and requests one from the client, which may have
none.

Each connection uses the files of its time, so that a renewed certificate needs no restart.
"""

from __future__ import annotations

import os
import ssl

from dips.identity.tls_files import LoadedTls
from dips.transport.tls import TlsSource


class ServerContexts:
    """The SSL context for the present files; on one thread."""

    def __init__(self, source: TlsSource) -> None:
        self._source = source
        self._loaded = source.read_current()
        self._context = make_context(self._loaded)

    def current_context(self) -> ssl.SSLContext:
        loaded = self._source.read_current()
        if loaded is not self._loaded:
            self._loaded, self._context = loaded, make_context(loaded)
        return self._context


def make_context(loaded: LoadedTls) -> ssl.SSLContext:
    """Return a context with our certificate that accepts clients of our authority and clients without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=loaded.ca.decode("ascii"))
    # Python reads certificates from files only: this one is in memory, so it holds what was verified together.
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(loaded.cert + b"\n" + loaded.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
