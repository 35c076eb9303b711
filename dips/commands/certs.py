"""The command `dips certs`: an offline certificate authority and the certificates that it signs."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509

from dips import daemon
from dips.commands.options import AS_JSON
from dips.commands.renewing import CRT, CSR, KEY, Renewer, put_in_place, serve_authority
from dips.errors import ConfigError, Denied
from dips.identity import certificates
from dips.identity.authority import LEAF_DAYS, ROOT_DAYS, Authority
from dips.identity.certificates import ends_soon, fingerprint_of, identity_of, read_requested_key, signed_at, utc_now
from dips.identity.names import PeerIdentity, PeerRole, make_identity
from dips.identity.paths import REVOCATIONS, ROOT, renewal_of
from dips.telemetry import exits
from dips.telemetry.logs import configure_log

MOST_DAYS = 825  # longest validity of a leaf certificate
HOURS = 24  # of one that is renewed by itself
VALID, EXPIRES_SOON, REQUEST = "valid", "expires soon", "request"

words = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=exits.HELP_OPTIONS,
    help="""Make and sign the certificates of a run's master, slaves, clusters, operators and viewers.

Private keys stay on the machine where they are made; only requests and certificates are copied.

\b
On the authority's machine, once; it may be offline:
  dips certs init ca/ --run RUN
On each machine, then signed by the authority and brought back:
  dips certs request slave-0 --role slave --run RUN --out certs/
  dips certs show slave-0.slave.csr               the name and role that it asks for
  dips certs issue ca/ slave-0.slave.csr --as slave-0.slave
Later:
  dips certs renew certs/slave-0.slave.crt        a new key and a new request
  dips certs revoke ca/ cluster-a.cluster         and copy ca/crl.pem to all
  dips certs show certs/*.crt
Or by themselves, each day:
  dips certs serve ca/ --listen 10.0.0.1:7820     on the authority's machine
  dips certs renew certs/slave-0.slave.crt --from 10.0.0.1:7820 --watch

cert-manager or Vault can be used instead: one DNS name <name>.<role>.<run>.dips, P-256, client and server usage.""",
)

AUTHORITY = Annotated[Path, typer.Argument(help="The authority's directory.")]


@words.command("init")
def init_command(
    directory: AUTHORITY,
    run: Annotated[str, typer.Option(help="The run to sign for, as in shared.run.")],
    days: Annotated[int, typer.Option(min=1, max=36500, help="Validity of the authority in days.")] = ROOT_DAYS,
) -> None:
    """Make an authority: ca.crt, to be copied to all machines, and ca.key, to be kept secret."""
    Authority.create(directory, run, days)
    print(f"{directory / ROOT}: copy it to all machines; {directory / REVOCATIONS}: likewise, after each revocation")


@words.command("request")
def request_command(
    name: Annotated[str, typer.Argument(help="The name of the slave, cluster or person; `master` for the master.")],
    role: Annotated[PeerRole, typer.Option(help="The role to ask for.")],
    run: Annotated[str, typer.Option(help="The run, as in shared.run.")],
    out: Annotated[Path, typer.Option(help="The directory to write key and request into.")] = Path("certs"),
) -> None:
    """Make a key, which stays here, and a request for `dips certs issue`."""
    identity = make_identity(name, role, run)
    key, request = out / (identity.label + KEY), out / (identity.label + CSR)
    if key.exists():
        if (certificate := key.with_suffix(CRT)).exists():
            raise ConfigError(
                f"{key} is there already: `dips certs renew {certificate}` makes a new one for the same name"
            )
        raise ConfigError(
            f"{key} is there already: it waits for the certificate of {request} (`dips certs issue`); if that is lost, "
            "remove the key"
        )
    _write_request(identity, key, request)


@words.command("issue")
def issue_command(
    directory: AUTHORITY,
    request: Annotated[Path, typer.Argument(help="The request (.csr); the certificate is written beside it.")],
    label: Annotated[
        str,
        typer.Option("--as", metavar="NAME.ROLE", help="Name and role to sign for: berlin.cluster, operator.operator."),
    ],
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="Validity of the certificate in days.")] = LEAF_DAYS,
) -> None:
    """Sign one request, for the name and role given by --as.

    The sender of a request chooses the name that it asks for and the name of its file: a cluster's file may ask for an
    operator's certificate, which may do everything. So a request for any name but --as is refused. If you do not know
    the sender, compare the key's fingerprint, which `dips certs request` and `dips certs show` print.
    """
    authority = Authority.open(directory)
    asked = certificates.parse_request(certificates.read_pem(request, "request"), request, "request")
    live, signed = authority.find_live(identity_of(asked)), request.with_suffix(CRT)
    _require_same_key(asked, request)
    certificate = authority.issue(asked, label, timedelta(days=days))
    certificates.write_public(signed, certificates.to_pem(certificate))
    besides = f"; {len(live)} more of this name valid until {max(r.until for r in live):%Y-%m-%d}" if live else ""
    print(f"{signed}: {identity_of(certificate)}, valid until {certificate.not_valid_after_utc:%Y-%m-%d}{besides}")


def _require_same_key(asked: x509.CertificateSigningRequest, request: Path) -> None:
    """Raise ConfigError if the key beside a request is another one: that was renewed since."""
    key = request.with_suffix(KEY)
    if not key.exists():
        return  # as at the authority's
    secret = certificates.parse_key(certificates.read_key_pem(key, "key"), key, "key")
    if read_requested_key(asked) != secret.public_key():
        raise ConfigError(
            f"{request} is of another key than {key}, which was renewed since: nothing is signed; "
            f"`dips certs renew {request.with_suffix(CRT)}` makes a new request"
        )


@words.command("renew")
def renew_command(
    certificate: Annotated[Path, typer.Argument(help="The present certificate (.crt), with its key beside it.")],
    authority: Annotated[
        Path | None, typer.Option(help="The authority's directory, if it is here: sign and install at once.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="With --authority: validity in days.")] = LEAF_DAYS,
    address: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST:PORT", help="The authority's port (`dips certs serve`): ask and install."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="With --from: renew in the last third of each certificate's life.")
    ] = False,
) -> None:
    """Make a new key and request for the same name; call it again after signing to install both.

    With --from the authority's port signs it at once, and says what is revoked: crl.pem beside the certificate. With
    --watch the command goes on, until Ctrl-C or SIGTERM: it renews each certificate in time and asks for revocations
    every minute; while the authority does not answer it tries again. It ends with exit code 77 if the authority
    refuses: then only `dips certs request` and `issue` help.

    Daemons use the new files from the next connection on, without a restart.
    """
    if (address is None and watch) or (address is not None and authority is not None):
        raise ConfigError("--from HOST:PORT asks the authority there, --watch goes with it, --authority signs here")
    if address is not None:
        asyncio.run(_renew_from(certificate, address, watch))
        return
    key, request, signed = (renewal_of(certificate, end) for end in (KEY, CSR, CRT))
    if not signed.exists():
        content = certificates.read_pem(certificate, "certificate")
        identity = identity_of(certificates.parse_certificate(content, certificate, "certificate"))
        if not key.exists():
            _write_request(identity, key, request)
        elif not request.exists():
            raise ConfigError(
                f"{key} waits for the certificate of {request}, which is not here: bring it as {signed}, or, if it is "
                "lost, remove the key and call renew again"
            )
        if authority is None:
            print(f"sign it by `{_issue_line(request, identity)}`, bring {signed.name} back, and call renew again")
            return
        issue_command(authority, request, identity.label, days)
    put_in_place(signed, certificate)
    request.unlink(missing_ok=True)
    print(f"{certificate}: renewed")


async def _renew_from(certificate: Path, address: str, watch: bool) -> None:
    renewer = Renewer(certificate, address, lambda sentence: print(sentence, flush=True))
    if not watch:
        await renewer.renew()
        await renewer.follow_revocations()
        return
    me = asyncio.current_task()
    assert me is not None
    with daemon.end_signals(me.cancel):
        try:
            await renewer.keep()
        except asyncio.CancelledError:
            print("stopped")


@words.command("serve")
def serve_command(
    directory: AUTHORITY,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")],
    hours: Annotated[int, typer.Option(min=1, max=24 * MOST_DAYS, help="Validity of what it signs, in hours.")] = HOURS,
) -> None:
    """Sign the renewals of masters, slaves, clusters, pullers and viewers, until Ctrl-C or SIGTERM.

    Each gets what it has: its own name and role, if the certificate that it shows was signed here, is valid and is not
    revoked. A first certificate, and each one of an operator, is signed by a person (`dips certs issue`).

    The authority's key is on this machine, which now has a network: let only the run's sites reach the port, and let
    nothing else run here.
    """
    log = configure_log("authority", directory.name)
    asyncio.run(serve_authority(directory, listen, timedelta(hours=hours), log))


@words.command("revoke")
def revoke_command(
    directory: AUTHORITY,
    label: Annotated[
        str, typer.Argument(metavar="NAME.ROLE", help="The name and role; or the serial of one certificate.")
    ],
) -> None:
    """Revoke all certificates of a name; daemons refuse the name a heartbeat after they have the new crl.pem.

    `dips certs renew --watch` fetches it within a minute from `dips certs serve`; copy it to all other machines.
    """
    for row in Authority.open(directory).revoke(label):
        print(f"revoked {row.san}, serial {row.serial:x}")
    print(f"copy {directory / REVOCATIONS} beside the certificates of all machines without `dips certs renew --watch`")


@words.command("show")
def show_command(
    files: Annotated[list[Path], typer.Argument(help="Certificates or requests.")], as_json: AS_JSON = False
) -> None:
    """Show the name, validity and problems of each certificate, or the name that a request asks for.

    Exit codes: 0 all are valid; 1 one is not; 78 one cannot be read.
    """
    states = []
    for path in files:
        content = certificates.read_pem(path, "certificate")
        if certificates.is_request(content):
            row, text = _show_request(path, certificates.parse_request(content, path, "request"))
        else:
            row, text = _show_certificate(path, certificates.parse_certificate(content, path, "certificate"))
        states.append(row["state"])
        print(json.dumps(row) if as_json else text)
    raise typer.Exit(0 if set(states) <= {VALID, EXPIRES_SOON, REQUEST} else 1)


def _show_certificate(path: Path, certificate: x509.Certificate) -> tuple[dict[str, str], str]:
    """Return a certificate as a row for scripts, and as lines of text."""
    who, state = _describe(certificate)
    until, serial = certificate.not_valid_after_utc, f"{certificate.serial_number:x}"
    row = {"file": str(path), "who": who, "state": state, "serial": serial, "until": until.isoformat()}
    return row, f"{path}: {who}\n  {state}, until {until:%Y-%m-%d %H:%M} UTC, serial {serial}"


def _show_request(path: Path, request: x509.CertificateSigningRequest) -> tuple[dict[str, str], str]:
    """Return a request as a row for scripts, and as lines of text, with the name that it asks for."""
    try:
        identity, key = identity_of(request), fingerprint_of(read_requested_key(request))
    except Denied as error:
        return {"file": str(path), "state": str(error)}, f"{path}: {error}"
    row = {"file": str(path), "who": str(identity), "state": REQUEST, "key": key}
    return row, f"{path}: a request to be {identity}\n  key {key}; to sign it: {_issue_line(path, identity)}"


def _issue_line(request: Path, identity: PeerIdentity) -> str:
    return f"dips certs issue ca/ {request} --as {identity.label}"


def _describe(certificate: x509.Certificate) -> tuple[str, str]:
    now, until = utc_now(), certificate.not_valid_after_utc
    state = EXPIRES_SOON if ends_soon(signed_at(certificate), until, now) else VALID
    try:
        certificates.check_validity(certificate, now, "it")
    except ConfigError:
        state = "expired" if now > until else "not yet valid"
    try:
        return str(identity_of(certificate)), state
    except Denied as error:
        is_root = certificate.issuer == certificate.subject
        return certificate.subject.rfc4514_string(), state if is_root else str(error)


def _write_request(identity: PeerIdentity, key: Path, request: Path) -> None:
    """Write a request, and then its key: a key that is there has its request."""
    secret = certificates.new_key()
    certificates.write_public(request, certificates.to_pem(certificates.make_request(identity, secret)))
    certificates.write_private(key, certificates.key_to_pem(secret))
    fingerprint = fingerprint_of(secret.public_key())
    print(f"{key}: stays here; {request}: {identity}, key {fingerprint}, for `dips certs issue`")
