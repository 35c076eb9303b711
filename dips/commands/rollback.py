"""`dips rollback`: go back to an older version."""

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

ASK_S = 0.5  # between two looks at how far it is


def rollback(
    version: Annotated[str, typer.Argument(metavar="vN@rM", help="The version, as `dips history` names it.")],
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait for all slaves to say what they have.")] = 60.0,
) -> None:
    """Go back to an older version: it is the head again, with its momentum, and the run goes on from there.

    The master goes back by itself when a slave has lost its newest snapshots, by master.most_rollback outer steps at
    most. Farther back it waits, in red: look first whether that slave has its true directory (an old volume, a disk
    that is not mounted, a process that only bears its name), and start it again with it. Say this word only if what is
    newer is lost for good.

    Also by hand: something that spoilt the model was accepted an hour ago. Versions that can be reached are the newest
    ones, what `keep_every` keeps, and what mirrors hold; `dips status` and a refusal of this word name them. Tokens of
    the versions that are undone go back, their data ranges are undone (see requeue), open pushes are given back to
    their clusters, which pull the version and go on. Keep out first who did it: `dips cluster quarantine CLUSTER`.

    What was undone never comes back into the run. Its snapshots stay on the disks until a version after the new head is
    durable, so `dips drain` the slaves and copy them before, if you want to look at them.

    While slaves are away it stays asked, also when this command has ended; the head's own name takes it back.

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
            answer = asyncio.run(operator.ask_master(peer, "Rollback", asked))
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
