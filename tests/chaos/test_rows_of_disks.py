"""Rows 7, 8 and 11 of the failure table (docs/architecture.md#failure-table), about disks; and what was restored from
copies."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dips.ids import VersionId
from dips.master import genesis
from tests.chaos import disks
from tests.chaos.deployment import SEEN_S, Deployment
from tests.chaos.wires import Loop

CONFIG = 78


# ---- 7: a slave cannot offer the head --------------------------------------------------------------------------------


def test_row_7_a_slave_cannot_offer_the_head(deployment: Deployment, tmp_path: Path) -> None:
    """An older copy of its disk: the newest version that every slave offers becomes the head, by a row, for all."""
    directory, since = deployment.directory / "ps1", time.time()
    trap = _persisting(deployment)
    disks.copy(directory, tmp_path / "copy")  # v(n-1), v(n)
    trap.release()
    trap = _persisting(deployment)  # of v(n+2), while v(n), v(n+1) lie there
    head, common = deployment.head(), disks.versions(tmp_path / "copy")[-1]
    assert common < head
    deployment.process("ps1").kill()
    disks.put_back(tmp_path / "copy", directory)
    trap.release(forward=False)
    deployment.start_slave("ps1")
    note = deployment.seen_after(deployment.master_timeline, "rolled_back", since=since)
    assert note["head"] == str(common) and str(head) in note["undone"]
    deployment.progress(2, by=deployment.clusters)
    assert head not in deployment.lineage() and common in deployment.lineage()


def test_row_7_old_snapshots_that_nobody_shares(deployment: Deployment, tmp_path: Path) -> None:
    """A copy so old that no version is on all disks: it serves nothing and says so, until the right disk is back."""
    directory = deployment.directory / "ps1"
    deployment.process("ps1").kill()
    disks.copy(directory, tmp_path / "old")
    deployment.start_slave("ps1")
    deployment.progress(6)
    deployment.process("ps1").kill()
    disks.copy(directory, tmp_path / "right")
    disks.put_back(tmp_path / "old", directory)
    head = deployment.head()
    deployment.start_slave("ps1")
    deployment.wait_for_status(lambda s: "ps1" in s["round"]["reason"], SEEN_S, "the master says why nothing goes on")
    time.sleep(2)  # it must not help itself
    assert deployment.head() == head
    deployment.process("ps1").kill()
    disks.put_back(tmp_path / "right", directory)
    deployment.start_slave("ps1")
    deployment.progress(2, by=deployment.clusters)
    assert head in deployment.lineage()


# ---- 8: snapshot corrupt or half written -----------------------------------------------------------------------------


@pytest.mark.parametrize("hurt", [disks.rot_theta, disks.rot_momentum, disks.halve, disks.lose_manifest])
def test_row_8_snapshot_corrupt_or_half_written(
    deployment: Deployment, hurt: Callable[[Path, VersionId], None]
) -> None:
    """It is passed over, loudly; the one before it becomes the head."""
    since, directory = time.time(), deployment.directory / "ps1"
    trap = _persisting(deployment)
    deployment.process("ps1").kill()
    head = deployment.head()
    hurt(directory, head)
    trap.release(forward=False)
    deployment.start_slave("ps1")
    note = deployment.seen_after(deployment.master_timeline, "rolled_back", since=since)
    assert str(head) in note["undone"]
    assert "snapshot_passed_over" in (deployment.directory / "ps1.log").read_text()
    deployment.progress(2, by=deployment.clusters)


def test_row_8_a_snapshot_that_was_never_finished(deployment: Deployment) -> None:
    """What was written aside when the process died is thrown away; nothing else is missed."""
    directory = deployment.directory / "ps1"
    deployment.process("ps1").kill()
    (directory / ".unfinished-v9999@r9999").mkdir()
    (directory / ".unfinished-v9999@r9999" / "00000.safetensors").write_bytes(bytes(1000))
    deployment.start_slave("ps1")
    deployment.progress(2, by=deployment.clusters)
    assert not list(directory.glob(".unfinished-v9999*"))


# ---- 11: disk full ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tight_deployment(tmp_path: Path, loop: Loop) -> Iterator[Deployment]:
    """A deployment whose second slave has a disk of one MiB."""
    if why := disks.missing():
        pytest.skip(f"NO SMALL DISK: {why}")
    with disks.small_disk(tmp_path / "ps1"), Deployment(tmp_path, loop) as deployment:
        deployment.start()
        yield deployment
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_row_11_disk_full(tight_deployment: Deployment) -> None:
    """One round is skipped, then versions are made that are not durable, and said to be so; with room all is well."""
    deployment, since = tight_deployment, time.time()
    deployment.progress(2, by=deployment.clusters)
    with disks.full(deployment.directory / "ps1"):
        deployment.wait_for_status(lambda s: s["durability"]["state"] == "degraded", SEEN_S, "durability is degraded")
        assert len(deployment.skipped()) >= 1
        with deployment.ledger() as ledger:
            kept = next(row.version for row in reversed(ledger.read_state().versions) if row.durable)
        deployment.progress(3, by=deployment.clusters)
        deployment.check()
        assert kept in disks.versions(deployment.directory / "ps1"), "a slave deleted on its own"
    deployment.seen_after(deployment.master_timeline, "durable_again", since=since)
    deployment.progress(2, by=deployment.clusters)
    deployment.wait_for_status(lambda s: s["durability"]["head"], SEEN_S, "the head is durable")
    deployment.check()


# ---- an old ledger put back ------------------------------------------------------------------------------------------


def test_an_old_ledger_put_back_refuses_to_serve(tmp_path: Path, loop: Loop) -> None:
    """A backup that knows fewer rounds than a slave: the master ends and names `dips-master recover`."""
    with Deployment(tmp_path, loop) as deployment:
        deployment.start()
        backup = tmp_path / "backup.sqlite"
        with (
            closing(sqlite3.connect(deployment.master_directory / genesis.LEDGER)) as live,
            closing(sqlite3.connect(backup)) as saved,
        ):
            live.backup(saved)
        head = deployment.progress(4)
        deployment.process("master").kill()
        ledger = deployment.master_directory / genesis.LEDGER
        saved_files = {path: path.read_bytes() for path in ledger.parent.glob("ledger.sqlite*")}
        for path in saved_files:
            path.unlink()
        shutil.copy(backup, ledger)
        old = deployment.start_master()
        deployment.until(lambda: old.code is not None, SEEN_S, "the master refuses")
        assert old.code == CONFIG and "dips-master recover" in old.log.read_text()
        for path in ledger.parent.glob("ledger.sqlite*"):
            path.unlink()
        for path, content in saved_files.items():
            path.write_bytes(content)
        deployment.start_master()
        deployment.progress(2, by=deployment.clusters)
        deployment.check()
        assert head in deployment.lineage()


def _persisting(deployment: Deployment):  # type: ignore[no-untyped-def]
    """Wait for the next Persist on its way to ps1, and hold it; what it served before lies on its disk."""
    deployment.retired()
    trap = deployment.orders["ps1"].calls.trap("persist")
    trap.caught()
    return trap
