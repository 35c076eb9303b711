"""Options that several commands share."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dips.commands.completing import complete_cluster, complete_slave
from dips.config import RunFile, host_port, is_loopback, load_run
from dips.errors import ConfigError
from dips.identity.names import PeerRole
from dips.ids import VersionId
from dips.transport.endpoints import PULLERS, Endpoint, credentials_peer, master_peer
from dips.transport.tls import TlsSource
from dips.wire.messages import MAX_INTEGER

if TYPE_CHECKING:
    from dips.master.ledger import Ledger

CONFIG = Annotated[Path, typer.Option("--config", "-c", help="The run file, with the run's master and slaves.")]
WHOSE = Annotated[Path | None, typer.Option("--config", "-c", help="The run file, which names the master.")]
CLUSTER = Annotated[str, typer.Argument(help="The cluster, as in `dips status`.", autocompletion=complete_cluster)]
SLAVE = Annotated[str, typer.Argument(help="The slave, as in `dips status`.", autocompletion=complete_slave)]
MASTER = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The master's address, instead of --config.")]
CREDENTIALS = Annotated[
    Path | None,
    typer.Option(
        envvar="DIPS_CREDENTIALS",
        help="Your certificate NAME.operator.crt, NAME.viewer.crt or NAME.puller.crt, its .key and ca.crt beside it.",
    ),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
LOOKERS = (PeerRole.OPERATOR, PeerRole.VIEWER)
OPERATOR = "operator"  # name whose certificate a command uses by default


def read_version(text: str) -> VersionId:
    """Return the version that somebody named. Raises ConfigError."""
    try:
        version = VersionId.parse(text)
        if max(version.version, version.round) > MAX_INTEGER:
            raise ValueError("no run has so many")
    except ValueError as error:
        raise ConfigError(f"version {text!r}: expected one as `dips history` names it, like v4100@r4107") from error
    return version


def open_ledger(config: RunFile) -> closing[Ledger]:
    """Open the run's ledger to read it, whether a master has it or not."""
    from dips.master.genesis import ledger_path
    from dips.master.ledger import Ledger

    return closing(Ledger.open(ledger_path(config), readonly=True))


def find_master(config: Path | None, master: str | None, credentials: Path | None, pulls: bool = False) -> Endpoint:
    """Return the master's endpoint, with the certificate to use; `pulls`: a puller's will do, and an operator's.

    Raises ConfigError unless the options fit together.
    """
    if (config is None) == (master is None):
        raise ConfigError("whom to ask: give --config FILE or --master HOST:PORT, one of them")
    run_file = load_run(config) if config is not None else None
    if credentials is not None:
        address = master or run_file.master.listen  # type: ignore[union-attr]
        return credentials_peer(address, credentials, PULLERS if pulls else LOOKERS, _warn)
    if run_file is not None:
        return operator_peer(run_file, OPERATOR)
    assert master is not None
    if not is_loopback(host_port(master)[0]):
        raise ConfigError(f"--master {master}: plain text is allowed on loopback only; give --credentials")
    return master_peer(master, None)


def operator_peer(config: RunFile, name: str, role: PeerRole = PeerRole.OPERATOR) -> Endpoint:
    """Return the run's master as an endpoint for the operator `name`, with the certificate that the run file's `tls`
    names; or for one of another role.
    """
    files = config.tls_files(name, role)
    source = TlsSource(files, name, role, config.shared.run, _warn) if files else None
    return master_peer(config.master.listen, source, config.shared.run)


def slave_peer(config: Path, slave: str) -> Endpoint:
    """Return the run's master as an endpoint for this slave, with the certificate that the run file names for it."""
    run_file = load_run(config)
    section = run_file.slave_section(slave)
    files = run_file.tls_files(slave, PeerRole.SLAVE)
    source = TlsSource(files, slave, PeerRole.SLAVE, run_file.shared.run, _warn) if files else None
    return master_peer(section.master, source, run_file.shared.run)


def _warn(problem: str) -> None:
    print(problem, file=sys.stderr)
