"""The command `dips rollback`: makes an older version the head again."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from rich.console import Console

from dips.commands import operator
from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Pending
from dips.protocol.events import RollbackAsked

ASK_S = 0.5  # pause between two questions


def rollback(
    version: Annotated[str, typer.Argument(metavar="vN@rM", help="The version, as in `dips history`.")],
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for all slaves to report their snapshots.")
    ] = 60.0,
) -> None:
    """Make an older version the head again, with its momentum; the run continues from there.

    The master rolls back by itself when a slave has lost its newest snapshots, by at most master.most_rollback outer
    steps. For more steps it waits, shown in red: first check that this slave has its real directory (not an old volume,
    a disk that is not mounted, or another process under its name), and restart it. Use this command only if the newer
    versions are lost for good.

    Also use it to undo by hand, for example an update accepted an hour ago that spoilt the model. Reachable versions
    are the newest ones, those kept by `keep_every`, and those on mirrors; `dips status` and a refusal of this command
    name them. Tokens of the undone versions are subtracted, their data ranges are undone (see requeue), open pushes are
    returned to their clusters, which pull the version and continue. First exclude the cluster that caused it: `dips
    cluster quarantine CLUSTER`.

    Undone versions never return to the run. Their snapshots stay on the disks until a version after the new head is
    durable, so `dips drain` the slaves and copy them first if you want to inspect them.

    While slaves are away the request stays open, also after this command has ended; requesting the head itself cancels
    it.

    Exit codes: 0 it is the head; 1 not every slave offers it, or not within --wait-s; 69 no master answers; 78 the
    master does not know it.

    \b
    Example:
      dips rollback v4100@r4107 --config dips.yaml
    """
    peer, until = find_master(config, master, credentials), time.monotonic() + wait_s
    asked = RollbackAsked(0, _read_version(version))
    with Console(stderr=True).status(f"back to {version}") as line:
        while True:
            answer = asyncio.run(operator.ask_master(peer, asked))
            if not isinstance(answer, Pending) or time.monotonic() >= until:
                break
            line.update(f"back to {version}: {answer.reason}")
            time.sleep(ASK_S)
    if isinstance(answer, Acknowledged):
        print(f"{version} is the head: clusters pull it and go on from there")
        return
    print(f"not rolled back: {answer.reason}")
    raise typer.Exit(1)


def _read_version(text: str) -> VersionId:
    try:
        return VersionId.parse(text)
    except ValueError as error:
        raise ConfigError(f"version {text!r}: expected one as `dips history` names it, like v4100@r4107") from error
