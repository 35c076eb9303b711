"""The command `dips follow`: keeps a file at the newest version, and runs a command for each."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from dips import daemon
from dips.client.agent.trainer import TrainerProcess
from dips.client.version_pull import follow_versions, pulling_name
from dips.commands.export_lanes import VersionFile
from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.transport.endpoints import Endpoint

NAME = "follow"  # of the follower in plain text
FILE = "model.safetensors"
GRACE_S = 10.0  # between SIGTERM and SIGKILL of the command


def follow(
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    command: Annotated[
        str | None, typer.Option(help="Run for each version; words are split as a shell does, no shell runs it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to keep at the newest version.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Without certificates: the follower's name; two at once need two names.")
    ] = NAME,
) -> None:
    """Take each new version of a run within seconds, whole: for an evaluator, an inference server or a copy elsewhere.

    The follower only reads: it needs a certificate of the role `puller` and no disk of a slave, it has no slot, and no
    round waits for it. Where the run has a lossy `pull_codec` it takes updates, else all parameters.

    With --output the file is replaced by each version in one step; a reader sees one version, never two. With --command
    the command gets the version's name in DIPS_VERSION and the file's path in DIPS_MODEL, which stays as it is until
    the command ends. Versions that pass meanwhile are left out; the newest is next. Its exit code is printed, and ends
    nothing. While master or slaves do not answer, the follower waits.

    It ends when the run has ended and its last version was taken, or by Ctrl-C or SIGTERM, which the command gets, too.

    \b
    Example:
      dips follow --config dips.yaml --command 'python evaluate.py'
      dips follow --master 10.0.0.1:7800 --credentials certs/eval.puller.crt --command 'python evaluate.py'
      dips follow --master 10.0.0.1:7800 --credentials certs/site-b.puller.crt --output /cache/model.safetensors
    """
    peer = find_master(config, master, credentials, pulls=True)
    words = _split_command(command)
    if not words and output is None:
        raise ConfigError("what to do with each version: give --command COMMAND, --output FILE, or both")
    if output is not None:
        asyncio.run(_follow(peer, name, output, words))
        return
    with TemporaryDirectory(prefix="dips-follow-") as directory:
        asyncio.run(_follow(peer, name, Path(directory) / FILE, words))


def _split_command(command: str | None) -> list[str]:
    try:
        return shlex.split(command or "")
    except ValueError as error:
        raise ConfigError(f"--command {command!r}: {error}") from error


async def _follow(master: Endpoint, name: str, output: Path, words: list[str]) -> None:
    """Follow until the run ends, or a signal comes."""
    file, me, warn = VersionFile(output), asyncio.current_task(), partial(print, file=sys.stderr)
    taken: VersionId | None = None
    assert me is not None

    async def take(version: VersionId) -> None:
        nonlocal taken
        if version == taken:  # the command has had it, and the output still is it
            return
        await asyncio.to_thread(file.publish)
        taken = version
        print(f"{version}: {output}", flush=True)
        if words:
            await _run_command(words, {"DIPS_VERSION": str(version), "DIPS_MODEL": str(output.absolute())})

    try:
        with daemon.end_signals(me.cancel):
            last = await follow_versions(master, pulling_name(master, name), file.make_room, take, warn)
        print(f"the run has ended with {last}")
    except asyncio.CancelledError:
        print("stopped; the same command goes on with the newest version")
    finally:
        file.close()


async def _run_command(words: list[str], environment: dict[str, str]) -> None:
    process = await TrainerProcess.start(words, environment)
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        await process.end_within(GRACE_S)
        raise
    finally:
        process.send_signal(signal.SIGKILL)
    if code:
        print(f"{environment['DIPS_VERSION']}: {words[0]} ended with exit code {code}", file=sys.stderr)
