"""The process that `master.on_version` starts: `python -m dips.commands.version_process RUN_FILE VERSION MODEL --
COMMAND…`.

The process exports the version to MODEL, then runs the command. It leads a process group that ends with it, and the
kernel signals it when the master dies for any reason (dips/client/agent/launch.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dips.config import RunFile, load_run
from dips.errors import Unavailable
from dips.identity.names import PeerRole
from dips.ids import VersionId
from dips.slave.export import export_snapshot
from dips.slave.staging import find_version
from dips.telemetry import exits

PULLED_AS = "on-version"  # cluster name for a pull, used if the slaves' disks are not here
TRIES = 5  # tries of a pull over the lanes
RETRY_S = 20.0  # pause between two tries
NOT_FOUND = 127  # exit code, as in a shell


def main(argv: list[str]) -> None:
    """Export the version, then run the command; the exit code is the command's."""
    run_file, version, model, _, *command = argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    exits.run_command(lambda: _process_version(Path(run_file), version, Path(model), command))


def _process_version(run_file: Path, version: str, model: Path, command: list[str]) -> None:
    _write_model(load_run(run_file), VersionId.parse(version), model)
    known = {"DIPS_VERSION": version, "DIPS_MODEL": str(model), "DIPS_RUN_FILE": str(run_file)}
    raise SystemExit(_run_command(command, {**os.environ, **known}))


def _write_model(config: RunFile, version: VersionId, model: Path) -> None:
    """Export from the slaves' disks, or over the lanes if the version is not here (`keep_every` keeps it).

    That a slave's directory is here says nothing: a slave that has moved left its former one, and a path may be
    another's, as in pods, where master and slaves call their volumes alike.
    """
    if all(find_version(s.directory / str(version), config.shared.run, s.name) for s in config.slaves):
        export_snapshot([s.directory for s in config.slaves], version, model)
        return
    from dips.commands.export_lanes import export_over_lanes  # only then: most of a second to load, at each version
    from dips.commands.options import operator_peer

    for left in reversed(range(TRIES)):
        try:
            export_over_lanes(operator_peer(config, PULLED_AS, PeerRole.PULLER), version, model, PULLED_AS)
            return
        except Unavailable as error:  # a restarting slave must not cost a version its result
            if not left:
                raise
            print(f"{error}; tried again in {RETRY_S:g} s", file=sys.stderr)
            time.sleep(RETRY_S)


def _run_command(command: list[str], environment: dict[str, str]) -> int:
    try:
        code = subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main(sys.argv)
