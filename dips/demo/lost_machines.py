"""The loss of machines with their disks in the middle of the demo, and the recovery of the run.

Mirrored: the directories of a slave and of the master are removed, and both are restored from mirrors. Unmirrored: a
slave's directory is removed, and `dips recover` continues from the last export. The remaining model is kept, so that
later losses can be compared with its own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dips.demo.layout import SLAVES, DemoLayout
from dips.demo.watch import Watch
from dips.ids import VersionId
from dips.local import run as local
from dips.local.processes import LocalProcesses, ProcessEnded
from dips.protocol.enums import SlaveCause, SlaveState
from dips.protocol.view import RunView
from dips.store.version import MANIFEST_FILE
from dips.transport.endpoints import Endpoint

Way = Literal["kept", "mirrored", "unmirrored"]  # whether the killed slave's directory is kept, and is mirrored

LEAST_VERSION = {"kept": 0, "mirrored": 3, "unmirrored": 3}  # least head before the loss, so that steps can be lost
AWAY_S = 6.0  # longer than a lease, so that the master notices the loss of the slave
BACK_S = 60.0  # timeout for the run to continue
AFTER_EXPORT = 2  # outer steps after the export, which are lost with a disk without a mirror
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelLeft:
    """The version from which the run continues: the newest in the slave's mirror, or the last exported one."""

    version: VersionId
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The running demo: processes, files, display and master."""

    running: LocalProcesses
    files: DemoLayout
    watch: Watch
    master: Endpoint

    def wait_for(self, holds: Callable[[RunView], bool], what: str) -> RunView:
        """Show the status until `holds` is true for it, and return it. Raises ProcessEnded after BACK_S."""
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            status = local.read_status(self.master)
            self.watch.show_status(status)
            self.running.check_alive()
            if status is not None and holds(status):
                return status
            time.sleep(LOOK_EVERY_S)
        raise ProcessEnded(f"{what}: not within {BACK_S:g} s; {self.running.processes['master'].log_tail()}")


# ---- with mirrors ----------------------------------------------------------------------------------------------------


def lose_mirrored(demo: DemoRun, slave: str, head: VersionId) -> ModelLeft:
    """Kill the master after the slave, remove the directories of both, and restart them on empty disks."""
    running, files, watch = demo.running, demo.files, demo.watch
    running.processes["master"].kill()
    left = newest_mirrored(files, slave)
    models = _keep_models(files, slave, left)
    for directory in (files.slave_directory(slave), files.master_directory):
        shutil.rmtree(directory)
    watch.print_event(
        f"killed the master with SIGKILL; rm -rf {slave}/ master/: two machines are gone with their disks"
    )
    watch.print_event(
        f"left are their mirrors: the ledger's, and {slave}'s with {left}, {head.version - left.version} outer steps "
        f"behind the head {head}"
    )
    time.sleep(AWAY_S)
    local.start_master(running, files.run_file)
    local.start_slave(running, files.run_file, slave)
    watch.print_event(f"started the master and {slave} again, on empty disks")
    begun = time.monotonic()
    status = demo.wait_for(_serves, "the run goes on from its mirrors")
    watch.print_event(
        f"both restored themselves from their mirrors: after {time.monotonic() - begun:.0f} s the run goes on "
        f"at {status.head}; the clusters trained on meanwhile"
    )
    return ModelLeft(left, models)


def newest_mirrored(files: DemoLayout, slave: str) -> VersionId:
    """Return the newest complete version in a slave's mirror: its manifest is written last."""
    whole = files.slave_mirror(slave).glob(f"v*@r*/{MANIFEST_FILE}")
    return max((VersionId.parse(path.parent.name) for path in whole), default=VersionId(0, 0))


def _keep_models(files: DemoLayout, lost: str, version: VersionId) -> tuple[Path, ...]:
    """Copy the files of a version: the lost slave's from its mirror, the others' from their disks."""
    kept = []
    for name in SLAVES:
        directory = files.slave_mirror(name) if name == lost else files.slave_directory(name)
        copy = files.directory / f"left-of-{name}"
        shutil.copytree(directory / str(version), copy)
        kept.append(copy)
    return tuple(kept)


# ---- without ---------------------------------------------------------------------------------------------------------


def export_head(demo: DemoRun) -> VersionId:
    """Export the head as an operator would, and return its version."""
    said = local.run_word("export", "--config", str(demo.files.run_file), "--output", str(demo.files.saved_file))
    version = VersionId.parse(said.split()[1])
    demo.watch.print_event(f"dips export: {version} is saved in {demo.files.saved_file.name}")
    demo.wait_for(lambda s: s.head_version.version >= version.version + AFTER_EXPORT, "outer steps after the export")
    return version


def lose_unmirrored(demo: DemoRun, slave: str, left: VersionId) -> ModelLeft:
    """Remove the killed slave's directory, wait until the run stops, and recover from the saved model."""
    running, files, watch = demo.running, demo.files, demo.watch
    shutil.rmtree(files.slave_directory(slave))
    watch.print_event(f"rm -rf {slave}/: its machine is gone with its disk, and nothing mirrored it")
    time.sleep(AWAY_S)
    local.start_slave(running, files.run_file, slave)
    status = demo.wait_for(lambda s: s.slaves[slave].cause is SlaveCause.LACKS_HEAD, f"{slave} says what it lacks")
    watch.print_event(f"started {slave} again, on an empty disk; dips status says: {status.slaves[slave].reason}")
    for name in ("master", *SLAVES):
        running.processes[name].ask_to_end()
    for name in ("master", *SLAVES):
        running.processes[name].wait(BACK_S)
    words = ("recover", "--config", files.run_file.name, "--model", files.saved_file.name, "--yes")
    watch.print_event(f"stopped master and slaves; $ dips {' '.join(words)}")
    said = local.run_word("recover", "--config", str(files.run_file), "--model", str(files.saved_file), "--yes")
    for line in said.splitlines():
        watch.print_event(f"  {line.replace(str(files.directory) + '/', '')}")
    local.start_master(running, files.run_file)
    for name in SLAVES:
        local.start_slave(running, files.run_file, name)
    begun = time.monotonic()
    status = demo.wait_for(_serves, "the run goes on from the saved model")
    watch.print_event(
        f"started them again: after {time.monotonic() - begun:.0f} s the run goes on at {status.head}; the clusters "
        "trained on meanwhile"
    )
    return ModelLeft(left, (files.saved_file,))


# ---- leaves ----------------------------------------------------------------------------------------------------------


def _serves(status: RunView) -> bool:
    return all(slave.state is SlaveState.READY for slave in status.slaves.values())
