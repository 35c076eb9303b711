"""Mutants of the HTTP port and of what it shows (dips/http, dips/telemetry)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "dips/http"
ACCESS = "tests/unit/http/test_http_access.py"
PORT = "tests/integration/test_http_port.py"
METERS = "tests/unit/master/test_meters.py"

MUTANTS = (
    Mutant("a reader of another run", ROOM, "if identity.run != tls.run:", "if False:", ACCESS),
    Mutant("a revoked reader", ROOM, "in tls.read_current().revoked:", "in ():", ACCESS),
    Mutant("a reader whose certificate is over", ROOM, "if self._wall() > ", "if None and self._wall() > ", ACCESS),
    Mutant("any token opens", ROOM, "and self._token.matches(", "or self._token.matches(", ACCESS),
    Mutant("metrics are a probe", ROOM, '{"/healthz", "/readyz"})', '{"/healthz", "/readyz", "/metrics"})', ACCESS),
    Mutant("a page of the web reads loopback", ROOM, 'name in ("", "localhost")', "name", ACCESS),
    Mutant("a token is read once", ROOM, "if now - self._looked >= LOOK_S:", "if False:", ACCESS),
    Mutant("each scrape builds a view", ROOM, "if self._clock() >= self._until:", "if True:", ACCESS),
    Mutant("the port takes bodies", ROOM, 'if "transfer-encoding" in headers or', "if False and", PORT),
    Mutant("the port is written to", ROOM, 'if scope["method"] not in METHODS:', "if False:", PORT),
    Mutant("as many connections as come", ROOM, "if len(self._open) >= MOST_CONNECTIONS:", "if False:", PORT),
    Mutant("a slow request has no end", ROOM, "if self._request_timer is None:", "if False:", PORT),
    Mutant("a certificate is never renewed", ROOM, "if loaded is not self._loaded:", "if False:", PORT),
    Mutant("no certificate is asked for", ROOM, "= ssl.CERT_OPTIONAL", "= ssl.CERT_NONE", PORT),
    Mutant("a phase that broke counts", "dips/master/meters.py", "if self._phase in ends:", "if self._phase:", METERS),
    Mutant("grants are kept for ever", "dips/master/meters.py", "> MOST_PUSHES:", "> 2 * MOST_PUSHES:", METERS),
    Mutant(
        "a version counts as durable too early",
        "dips/master/newest.py",
        "durable = wall if record.durable else newest.durable",
        "durable = wall",
        METERS,
    ),
)
