"""A slave's mirror: what it copies next, what a copy is worth, and what a slave with an empty directory brings back."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import structlog
from fsspec.implementations.memory import MemoryFileSystem
from structlog.testing import capture_logs

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.errors import ConfigError, CorruptSnapshot, FailedDisk, FailedMirror, Stale
from dips.ids import GENESIS, VersionId
from dips.outer.kernel_pool import WorkMeter
from dips.protocol.effects import Hold, Registered
from dips.protocol.events import MirrorReport
from dips.protocol.manifest import Manifest
from dips.slave import app, snapshot_mirror
from dips.slave.mirror_plan import STALL_S, MirrorJob, MirrorJobKind, MirrorPlan, Restored
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.store import mirror as mirror_store
from dips.store import tensorfile
from dips.store.files import ASIDE, copy_layer, read_manifest, write_version
from dips.store.mirror import MirrorStore, bring_back, copy_out, read_copy
from dips.transport.backoff import Backoff
from tests.busy_store import BusyFileSystem, persist
from tests.damage import flip_bit
from tests.disk_calls import DiskCalls
from tests.unit.slave.test_snapshots import MANIFEST, arrays, opened, read, same
from tests.waiting import until

V1, V2, V3, V4 = VersionId(1, 1), VersionId(2, 5), VersionId(3, 6), VersionId(4, 7)
LAYERS = (0, 1, 2, 3)
LIST = MirrorJob(MirrorJobKind.LIST)
LOG = structlog.get_logger()


def copy(version: VersionId) -> MirrorJob:
    return MirrorJob(MirrorJobKind.COPY, (version,))


# ---- the plan --------------------------------------------------------------------------------------------------------


def listed(*held: VersionId) -> MirrorPlan:
    plan = MirrorPlan(Backoff(1.0, 8.0, Random(1)))
    assert plan.next_job(0.0) == LIST
    plan.on_listed(held)
    return plan


def test_the_newest_wish_wins_and_what_is_not_named_goes_last() -> None:
    """Versions that came and went while a copy ran are skipped; old ones are deleted when the newest is whole."""
    plan = listed(V1)
    plan.want((V1,))
    assert plan.next_job(1.0) is None
    plan.want((V1, V2))
    assert plan.next_job(1.0) == copy(V2)
    plan.want((V3,))
    assert plan.next_job(2.0) is None, "one job at a time"
    plan.on_done(copy(V2))
    assert plan.report(2.0).held == (V1, V2)
    assert plan.next_job(2.0) == copy(V3), "nothing is deleted before the newest is whole"
    plan.on_done(copy(V3))
    assert plan.next_job(3.0) == MirrorJob(MirrorJobKind.DELETE, (V1, V2))
    plan.on_done(MirrorJob(MirrorJobKind.DELETE, (V1, V2)))
    assert plan.report(3.0).held == (V3,)
    assert plan.next_job(4.0) is None


def test_what_a_successor_has_copied_is_not_deleted() -> None:
    """A slave that was paused while another machine took its place has an old wish: it deleted the newer versions from
    the mirror of both, where the other believed them.
    """
    plan = MirrorPlan(Backoff(1.0, 8.0, Random(1)))
    plan.want((V2,))
    assert plan.next_job(0.0) == LIST
    plan.on_listed((V1, V2, V3), outdated=(V4,))  # V4 is being copied
    assert plan.next_job(0.0) == MirrorJob(MirrorJobKind.DELETE, (V1,))
    plan.on_done(MirrorJob(MirrorJobKind.DELETE, (V1,)))
    assert plan.next_job(1.0) is None


def test_what_a_run_that_was_thrown_away_has_left_is_deleted() -> None:
    """`dips init --force` skips a mirror that it does not reach: later versions stayed there for good, and would have
    been taken for those of the same names that the new run makes.
    """
    plan = listed(V1, V3, V4)
    plan.want((V1,))
    assert plan.next_job(0.0) == MirrorJob(MirrorJobKind.DELETE, (V3, V4))
    plan.on_done(MirrorJob(MirrorJobKind.DELETE, (V3, V4)))
    plan.list_again()
    assert plan.next_job(1.0) == LIST
    plan.on_listed((V1, V3))
    assert plan.next_job(1.0) is None, "that one is a successor's"


def test_a_failure_is_told_and_tried_again_with_growing_pauses() -> None:
    """The reason stands in the report until a job succeeds."""
    plan, pauses, now = listed(), [], 0.0
    plan.want((V1,))
    assert plan.next_job(now) == copy(V1)
    for _ in range(4):
        plan.on_failed("it is full", now)
        assert plan.next_job(now) is None
        pauses.append(plan.next_deadline(now) - now)
        now = plan.next_deadline(now)
        assert plan.next_job(now) == LIST, "it may be another disk by now"
        plan.on_listed(())
        assert plan.report(now).reason == "it is full", "what can be listed may still be full"
        assert plan.next_job(now) == copy(V1)
    assert pauses[0] <= 1.0 and pauses[3] >= 4.0
    plan.on_done(copy(V1))
    assert plan.report(now).reason == ""
    plan.want((V1, V2))
    assert plan.next_job(now) == copy(V2)
    plan.on_failed("it is full again", now)
    assert plan.next_deadline(now) - now <= 1.0, "a success begins the pauses anew"


def test_a_reason_stands_as_long_as_what_failed_is_still_to_be_done() -> None:
    """A listing that fails, and then does not, says nothing more of it; nor does a copy that lies there after all."""
    plan = MirrorPlan(Backoff(1.0, 8.0, Random(1)))
    plan.want((V1,))
    assert plan.next_job(0.0) == LIST
    plan.on_failed("it is away", 0.0)
    assert plan.next_job(10.0) == LIST
    plan.on_listed(())
    assert plan.report(10.0).reason == ""
    assert plan.next_job(10.0) == copy(V1)
    plan.on_failed("its answer was lost", 10.0)
    assert plan.next_job(20.0) == LIST
    plan.on_listed((V1,))
    assert plan.report(20.0) == MirrorReport((V1,), "")


def test_what_was_never_listed_is_not_told_as_nothing() -> None:
    """The master must not let go of what lies there because this process could not look yet."""
    plan = MirrorPlan(Backoff(1.0, 8.0, Random(1)))
    assert plan.report(0.0).unknown
    assert plan.next_job(0.0) == LIST
    plan.on_failed("it is away", 0.0)
    assert plan.report(0.0).unknown and plan.report(0.0).held == ()
    assert plan.next_job(60.0) == LIST
    plan.on_listed(())
    assert not plan.report(60.0).unknown and plan.report(60.0).reason == ""


def test_after_a_failure_it_may_be_another_disk() -> None:
    """What the old disk held is told until it has been listed anew, and no longer."""
    plan = listed(V1, V2)
    plan.want((V2, V3))
    assert plan.next_job(1.0) == copy(V3)
    plan.on_failed("the disk died", 1.0)
    assert plan.report(1.0).held == (V1, V2)
    assert plan.next_job(1000.0) == LIST
    plan.on_listed(())
    assert plan.report(1000.0).held == () and not plan.report(1000.0).unknown
    assert plan.next_job(1000.0) == copy(V3)


def test_a_mirror_without_room_lets_go_of_what_nobody_needs() -> None:
    """What a crash left of a copy, or of a deletion, has the room of the next version: a copy that failed comes after
    it. What can be neither copied nor deleted holds the other up no more than once.
    """
    plan, now = MirrorPlan(Backoff(1.0, 8.0, Random(1))), 0.0
    plan.want((V2, V4))
    assert plan.next_job(now) == LIST
    plan.on_listed((V1, V2), (V3,))
    given_up = MirrorJob(MirrorJobKind.DELETE, (V1, V3))
    for expected in (copy(V4), given_up, copy(V4), given_up):
        assert plan.next_job(now) == expected
        plan.on_failed("no room, or not its own", now)
        now = plan.next_deadline(now)
        assert plan.next_job(now) == LIST
        plan.on_listed((V1, V2), (V3,))
    assert plan.next_job(now) == copy(V4)
    plan.on_failed("no room", now)
    now = plan.next_deadline(now)
    assert plan.next_job(now) == LIST
    plan.on_listed((V1, V2), (V3,))
    assert plan.next_job(now) == given_up
    plan.on_done(given_up)
    assert plan.next_job(now) == copy(V4)
    plan.on_done(copy(V4))
    assert plan.next_job(now) is None and plan.report(now) == MirrorReport((V2, V4))


def test_a_mirror_without_room_keeps_a_whole_version_until_it_has_another() -> None:
    """Where it has none of those that are named, the newest that it has is all there is."""
    plan = listed(V1)
    plan.want((V2,))
    for now in (0.0, 1000.0, 2000.0):
        assert plan.next_job(now) == copy(V2)
        plan.on_failed("no room", now)
        assert plan.next_job(now + 999.0) == LIST
        plan.on_listed((V1,))


def test_a_copy_in_which_nothing_moves_is_told_as_failing() -> None:
    """A mount that hangs raises nothing: after a while the report says so, and a byte takes it back."""
    plan = listed()
    plan.want((V1,))
    assert plan.next_job(10.0) == copy(V1)
    plan.on_moved(10.0 + STALL_S / 2)
    assert plan.report(10.0 + STALL_S).reason == ""
    assert "nothing has moved" in plan.report(10.0 + STALL_S / 2 + STALL_S).reason
    plan.on_moved(10.0 + 2 * STALL_S)
    assert plan.report(10.0 + 2 * STALL_S).reason == ""


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A mirror on another disk, and one in an object store."""
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        return f"memory://{tmp_path}/mirror"
    (tmp_path / "mirror").mkdir()
    return (tmp_path / "mirror").as_uri()


def written(path: Path, *versions: VersionId) -> None:
    """Snapshots of the slave `s` in run `r`: θ is arrays(seed=version), m arrays(seed=version + 50)."""
    snapshots = opened(path)
    for v in versions:
        snapshots.write_snapshot(v, arrays(LAYERS, v.version), arrays(LAYERS, v.version + 50))
    snapshots.close()


def nothing(_: int) -> None:
    """Who is told that bytes moved."""


def test_a_copy_comes_back_bit_for_bit(url: str, tmp_path: Path) -> None:
    """θ and m of a restored snapshot are those that were copied, and the slave's own check agrees."""
    written(tmp_path / "s", V1, V2)
    store = MirrorStore(url, "r", "s")
    assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == ()
    for version in (V2, V1):
        copy_out(store, tmp_path / "s", version, nothing)
    assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == (V1, V2)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    bring_back(store, tmp_path / "s", "r", "s", V2, nothing)
    snapshots = opened(tmp_path / "s")
    assert snapshots.complete_versions() == (V2,)
    theta, momentum = read(snapshots, V2)
    assert same(theta, arrays(LAYERS, 2))
    assert same(momentum, arrays(LAYERS, 52))
    snapshots.close()
    store.remove_path(str(V1))
    assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == (V2,)


def test_rot_is_carried_in_neither_direction(url: str, tmp_path: Path) -> None:
    """A snapshot that rotted is not copied, a copy that rotted is not restored; both say which digest differs."""
    written(tmp_path / "s", V1, V2)
    store = MirrorStore(url, "r", "s")
    flip_bit(tmp_path / "s" / str(V1), "momentum.")
    with pytest.raises(CorruptSnapshot, match=r"momentum\.a\.0: expected xxh3-128"):
        copy_out(store, tmp_path / "s", V1, nothing)
    assert store.list_names() == [], "the layers before it take no room"
    copy_out(store, tmp_path / "s", V2, nothing)
    name = f"{V2}/00000.safetensors"
    with store.open_file(name) as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    store.write_file(name, bytes(content))
    shutil.rmtree(tmp_path / "s" / str(V2))
    with pytest.raises(CorruptSnapshot, match="expected xxh3-128"):
        bring_back(store, tmp_path / "s", "r", "s", V2, nothing)
    assert not list((tmp_path / "s").glob("*v2*")), "nothing half-restored is left"
    with pytest.raises(FailedMirror, match="cannot be copied"):
        copy_out(store, tmp_path / "s", V2, nothing)
    assert store.file_size(name) is not None, "it is left for a person where nothing is there to replace it"


def test_what_is_not_whole_or_of_another_run_is_passed_over(url: str, tmp_path: Path) -> None:
    """A copy cut short, one of another slave or run, and what else lies there are no versions of ours."""
    written(tmp_path / "s", V1, V2)
    store = MirrorStore(url, "r", "s")
    for version in (V1, V2):
        copy_out(store, tmp_path / "s", version, nothing)
    with store.open_file(f"{V1}/00000.safetensors") as file:
        content = file.read()
    store.write_file(f"{V1}/00000.safetensors", content[:-1])
    store.write_file("notes/readme.txt", b"not a version")
    with capture_logs() as logs:
        assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == (V2,)
    assert "bytes" in logs[0]["reason"]
    with capture_logs() as logs:
        assert snapshot_mirror.list_copies(MirrorStore(url, "r", "s"), "other", "s", LOG).whole == ()
    assert "in run other, got v2@r5 of slave s in run r" in logs[-1]["reason"]


def test_another_header_is_refused_before_a_byte_is_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest determines it, so it needs no digest: every bit of it is compared, in either direction."""
    monkeypatch.setattr(mirror_store, "STREAMS", 1)  # the layer is the first one, and no other moves beside it
    written(tmp_path / "s", V1)
    store = MirrorStore(url, "r", "s")
    copy_out(store, tmp_path / "s", V1, nothing)
    name, moved = f"{V1}/00000.safetensors", list[int]()
    with store.open_file(name) as file:
        content = bytearray(file.read())
    said = r"00000.safetensors: its header is not that of layer a.0 in v1@r1"
    for at in (0, 20):
        content[at] ^= 8
        store.write_file(name, bytes(content))
        (tmp_path / "t").mkdir(exist_ok=True)
        with pytest.raises(CorruptSnapshot, match=said):
            bring_back(store, tmp_path / "t", "r", "s", V1, moved.append)
        content[at] ^= 8
    content[20] ^= 8
    (tmp_path / "s" / name).write_bytes(content)
    with pytest.raises(CorruptSnapshot, match=said):
        copy_out(store, tmp_path / "s", V1, moved.append)
    assert moved == []


def test_what_a_crash_left_of_a_copy_is_deleted_when_the_newest_is_whole(url: str, tmp_path: Path) -> None:
    """Begun and not ended, or half removed: nobody restores it, and it would fill the mirror. Another's copy stays."""
    written(tmp_path / "s", V1, V2, V3)
    store = MirrorStore(url, "r", "s")
    for version in (V1, V2):
        copy_out(store, tmp_path / "s", version, nothing)
    store.remove_path(f"{V1}/manifest.json")
    store.remove_path(f"{V2}/00001.safetensors")
    foreign = VersionId(9, 9)
    store.write_file(f"{foreign}/manifest.json", b"of another release")
    listing = snapshot_mirror.list_copies(store, "r", "s", LOG)
    assert (listing.whole, listing.outdated) == ((), (V1, V2))
    mirror = kept(tmp_path, url)
    mirror.start()
    mirror.want((V3,))
    until(lambda: store.list_names() == [str(V3), str(foreign)])
    mirror.close()


def test_a_copy_that_fails_half_way_takes_nothing_from_another_mirror(tmp_path: Path) -> None:
    """What it had copied is removed, but where another disk was mounted meanwhile: there its name is another copy's."""
    written(tmp_path / "s", V1)
    for name in ("mirror", "other"):
        (tmp_path / name).mkdir()
        copy_out(MirrorStore(str(tmp_path / name), "r", "s"), tmp_path / "s", V1, nothing)
    store, moved = marked(tmp_path, str(tmp_path / "mirror")), list[int]()
    store.write_file("anything", b"")

    def mount_other(nbytes: int) -> None:
        if not moved:
            (tmp_path / "mirror").rename(tmp_path / "away")
            (tmp_path / "other").rename(tmp_path / "mirror")
        moved.append(nbytes)

    with pytest.raises(FailedMirror, match="expected the mirror whose dips-mirror is"):
        copy_out(store, tmp_path / "s", V1, mount_other)
    assert snapshot_mirror.list_copies(MirrorStore(str(tmp_path / "mirror"), "r", "s"), "r", "s", LOG).whole == (V1,)


def test_a_snapshot_deleted_while_it_is_copied_arrives(tmp_path: Path) -> None:
    """Its files are linked: a mirror slower than rounds still gets the newest whole."""
    (tmp_path / "mirror").mkdir()
    written(tmp_path / "s", V1)
    store = MirrorStore(str(tmp_path / "mirror"), "r", "s")

    def retire(_: int) -> None:
        shutil.rmtree(tmp_path / "s" / str(V1), ignore_errors=True)

    copy_out(store, tmp_path / "s", V1, retire)
    assert not (tmp_path / "s" / str(V1)).exists()
    assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == (V1,)


def test_a_copy_that_was_killed_is_made_again(url: str, tmp_path: Path) -> None:
    """What its process had linked is no part of the next copy, and goes with it."""
    written(tmp_path / "s", V1)
    left = tmp_path / "s" / f"{ASIDE}mirrored-{V1}"
    left.mkdir()
    (left / "00000.safetensors").write_bytes(b"of a version that had this name in a former run")
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V1)
    assert snapshot_mirror.list_copies(MirrorStore(url, "r", "s"), "r", "s", LOG).whole == (V1,)
    assert not left.exists()


def test_what_vanishes_from_the_mirror_while_it_is_copied_is_missed(url: str, tmp_path: Path) -> None:
    """The copy fails, and has no manifest: nobody takes it for whole."""
    written(tmp_path / "s", V1)
    store, first = MirrorStore(url, "r", "s"), f"{V1}/00000.safetensors"

    def remove_first(_: int) -> None:
        if str(V1) in store.list_names() and "00001.safetensors" in store.list_sizes(str(V1)):
            store.remove_path(first)

    with pytest.raises(FailedMirror, match=r"00000\.safetensors of .* is missing; it was written just now"):
        copy_out(store, tmp_path / "s", V1, remove_first)
    assert store.file_size(f"{V1}/manifest.json") is None


@pytest.mark.parametrize(("error", "copied"), [(errno.EPERM, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_disk_without_links_is_copied_from_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, copied: bool
) -> None:
    """FAT and some network disks have none; a disk that fails is another matter. Nothing of the links stays."""

    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    (tmp_path / "mirror").mkdir()
    written(tmp_path / "s", V1)
    store = MirrorStore(str(tmp_path / "mirror"), "r", "s")
    monkeypatch.setattr(mirror_store.os, "link", refuse)
    with nullcontext() if copied else pytest.raises(FailedMirror, match="cannot be copied"):
        copy_out(store, tmp_path / "s", V1)
    assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == ((V1,) if copied else ())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [".lock", str(V1)]


def test_a_file_as_long_as_is_allowed_is_read(url: str) -> None:
    """One byte more is refused before it is fetched: what lies there may be anything; a missing one is none."""
    store = MirrorStore(url, "r", "s")
    store.write_file("a", b"12345678")
    assert store.read_file("a", 8) == b"12345678"
    with pytest.raises(FailedMirror, match="/a: expected at most 7 bytes, got 8"):
        store.read_file("a", 7)
    assert store.read_file("b", 8) is None


def test_what_is_being_written_is_listed_apart(tmp_path: Path) -> None:
    """Who restores is told neither that it is there, nor that what is whole is not."""
    (tmp_path / "mirror").mkdir()
    store = MirrorStore(str(tmp_path / "mirror"), "r", "s")
    store.write_file("whole", b"abc")
    with store.create_file("begun", 3):
        assert store.list_names() == ["whole"]
        assert store.list_names(unfinished=True) == [f"{ASIDE}begun"]
    assert store.list_names() == ["begun", "whole"] and store.list_names(unfinished=True) == []


def test_of_a_file_that_is_given_up_nothing_is_left(tmp_path: Path) -> None:
    """Half of a layer filled the mirror's disk until the next copy."""
    (tmp_path / "mirror").mkdir()
    store = MirrorStore(str(tmp_path / "mirror"), "r", "s")

    def begin_file() -> None:
        with store.create_file("begun", 3) as file:
            file.write(b"ab")
            raise Stale("the version is retired")

    with pytest.raises(Stale):
        begin_file()
    assert store.list_names() == store.list_names(unfinished=True) == []


def test_of_files_of_one_name_the_first_stays(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears whole, also as the first in its folder, and durably on a disk; of a refused one nothing is left."""
    store, disk = MirrorStore(url, "r", "s"), DiskCalls(tmp_path, monkeypatch)
    assert store.create_whole("leases/first", b"one")
    assert url.startswith("memory") or disk.calls[-2] == "fsync mirror/r/s/leases"
    assert not store.create_whole("leases/first", b"two")
    assert store.read_file("leases/first", 8) == b"one"
    assert not list((tmp_path / "mirror").rglob(f"{ASIDE}*"))


def test_a_mirror_that_is_gone_is_not_made(tmp_path: Path) -> None:
    """Below the mount point of a disk that is not mounted nothing is written; the message says what to do."""
    store = MirrorStore(str(tmp_path / "unmounted"), "r", "s")
    with pytest.raises(FailedMirror, match="is not there: mount it, or make the directory"):
        store.list_names()
    with pytest.raises(FailedMirror, match="is not there"):
        store.write_file("a", b"")
    assert not (tmp_path / "unmounted").exists()


def marked(tmp_path: Path, url: str) -> MirrorStore:
    """The mirror of the directory `s`, as its slave keeps it."""
    (tmp_path / "s").mkdir(exist_ok=True)
    return MirrorStore(url, "r", "s", of=tmp_path / "s")


def test_a_mount_point_whose_disk_is_not_mounted_is_refused(tmp_path: Path) -> None:
    """Nothing is written below it, nothing there counts as deleted, and it is not taken for empty; when the disk is
    there again all goes on.
    """
    mount, disk = tmp_path / "mnt", tmp_path / "disk"
    mount.mkdir()
    store = marked(tmp_path, str(mount))
    store.write_file("v1@r1/manifest.json", b"{}")
    mount.rename(disk)
    mount.mkdir()
    for again in (store, marked(tmp_path, str(mount))):
        refused = r"expected the mirror whose dips-mirror is [0-9a-f]{32}, got a place without one: mount its disk; if"
        with pytest.raises(FailedMirror, match=refused):
            again.list_names()
        with pytest.raises(FailedMirror, match=refused):
            again.write_file("v2@r5/manifest.json", b"{}")
        with pytest.raises(FailedMirror, match=refused):
            again.create_whole("lease", b"{}")
        with pytest.raises(FailedMirror, match=refused), again.create_file("large", 1):
            pytest.fail("a file was begun there")
        for look in (again.file_size, again.list_sizes, again.folder_state, again.remove_path):
            with pytest.raises(FailedMirror, match=refused):
                look("v1@r1")
        with pytest.raises(FailedMirror, match=refused):
            again.remove_files(["v1@r1/manifest.json"])
    assert not list(mount.iterdir())
    mount.rmdir()
    disk.rename(mount)
    store.write_file("v2@r5/manifest.json", b"{}")
    assert store.list_names() == ["v1@r1", "v2@r5"]


def test_an_object_store_that_was_emptied_is_refused_until_a_person_says_so(url: str, tmp_path: Path) -> None:
    """The note beside the snapshots is what the refusal names; without it the empty place is a new mirror."""
    marked(tmp_path, url).write_file("v1@r1/manifest.json", b"{}")
    MirrorStore(url, "r", "s").remove_path("")
    with pytest.raises(FailedMirror, match=r"has replaced it for good, remove .*/s/mirror\.seen"):
        marked(tmp_path, url).list_names()
    (tmp_path / "s" / "mirror.seen").unlink()
    again = marked(tmp_path, url)
    assert again.list_names() == []
    again.write_file("v2@r5/manifest.json", b"{}")
    assert again.list_names() == ["v2@r5"]


def test_a_mirror_that_was_looked_at_is_marked_by_the_first_write(url: str, tmp_path: Path) -> None:
    """A slave lists what is there before it copies anything."""
    store = marked(tmp_path, url)
    assert store.list_names() == []
    store.write_file("v1@r1/manifest.json", b"{}")
    marker = store.read_file("dips-mirror", 64)
    assert marker and (tmp_path / "s" / "mirror.seen").read_text() == f"{store.url}\n{marker.decode()}\n"


def test_a_new_machine_knows_its_mirror_from_the_first_look(url: str, tmp_path: Path) -> None:
    """It has restored from there; if the disk goes away before the first copy, that is noticed."""
    marked(tmp_path, url).write_file("v1@r1/manifest.json", b"{}")
    shutil.rmtree(tmp_path / "s")
    assert MirrorStore(url, "r", "s", of=tmp_path / "s").list_names() == ["v1@r1"]
    MirrorStore(url, "r", "s").remove_path("")
    with pytest.raises(FailedMirror, match="a place without one"):
        marked(tmp_path, url).write_file("v2@r5/manifest.json", b"{}")


def test_a_mirror_at_another_url_is_another_one(tmp_path: Path) -> None:
    """The run file names it: nobody is asked."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        marked(tmp_path, str(tmp_path / name)).write_file("v1@r1/manifest.json", b"{}")
    assert len({(tmp_path / name / "r/s/dips-mirror").read_text() for name in ("one", "two")}) == 2


def test_a_mirror_on_the_disk_of_what_it_mirrors_is_noticed(tmp_path: Path) -> None:
    """So looks a mount point at the first start, before any marker: the log warns."""
    assert marked(tmp_path, str(tmp_path)).shares_disk()
    assert not MirrorStore("/dev/shm", "r", "s", of=Path("/proc")).shares_disk()
    assert not marked(tmp_path, "memory://x").shares_disk()


def test_a_mount_that_hangs_holds_up_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slave with the head on its own disk, and a master, would not serve before the server of a network's disk is
    back.
    """
    over = threading.Event()
    monkeypatch.setattr(mirror_store, "LOOK_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *_, **__: assert_set(over))
        assert not marked(tmp_path, str(tmp_path)).shares_disk()
        over.set()


def test_an_url_that_says_nothing_is_refused_without_its_password() -> None:
    """An unknown scheme or a package that is missing is a mistake of the run file."""
    with pytest.raises(ConfigError, match="mirror: nosuch://host/x/r cannot be used") as error:
        MirrorStore("nosuch://me:secret@host/x", "r")
    assert "secret" not in str(error.value)


# ---- the thread ------------------------------------------------------------------------------------------------------


def kept(tmp_path: Path, url: str) -> SnapshotMirror:
    return SnapshotMirror(marked(tmp_path, url), tmp_path / "s", "r", "s", LOG, time.monotonic)


def test_the_thread_copies_what_is_wanted_and_a_new_machine_restores_it(url: str, tmp_path: Path) -> None:
    """The newest two stay in the mirror; with an empty directory both come back, with a newer disk nothing does."""
    written(tmp_path / "s", V1, V2, V3)
    mirror = kept(tmp_path, url)
    mirror.restore((V1, V2, V3))
    mirror.start()
    for wanted in ((V1,), (V1, V2), (V2, V3)):
        mirror.want(wanted)
        until(lambda wanted=wanted: mirror.report().held == wanted)
    mirror.close()
    again = kept(tmp_path, url)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    again.restore(())
    assert again.report().held == (V2, V3), "the first Register tells it"
    snapshots = opened(tmp_path / "s")
    assert snapshots.complete_versions() == (V2, V3)
    snapshots.close()
    shutil.rmtree(tmp_path / "s" / str(V2))
    assert kept(tmp_path, url).restore((V3,)) == Restored(())
    assert {path.name for path in (tmp_path / "s").glob("*v*")} == {str(V3)}, "not even put aside"


def test_a_store_that_refuses_a_third_of_all_requests_holds_all_layers_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing half is listed as held; the report says why it lags until it does not, and a new machine restores all."""
    monkeypatch.setattr("dips.store.mirror.AGAIN_S", 0.001)
    monkeypatch.setattr("dips.slave.snapshot_mirror.BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(BusyFileSystem, "is_busy", True)
    monkeypatch.setattr(BusyFileSystem, "refuses_opens", True)
    monkeypatch.setattr(BusyFileSystem, "lots", Random(3))
    BusyFileSystem.store.clear()
    url, versions = f"busy://{tmp_path}/mirror", (V1, V2, V3)
    written(tmp_path / "s", *versions)
    mirror = persist(lambda: kept(tmp_path, url))
    persist(lambda: mirror.restore(versions))
    refused = BusyFileSystem.refused
    mirror.start()
    for wanted in (versions[:1], versions[:2], versions):
        mirror.want(wanted)
        until(lambda wanted=wanted: mirror.report().held == wanted and not mirror.report().reason)
    mirror.close()
    assert BusyFileSystem.refused - refused > len(LAYERS)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    again = persist(lambda: kept(tmp_path, url))
    persist(lambda: again.restore(()))
    snapshots = opened(tmp_path / "s")
    assert snapshots.complete_versions() == versions[-2:], "as many as a slave needs"
    for version in versions[-2:]:
        theta, momentum = read(snapshots, version)
        assert same(theta, arrays(LAYERS, version.version)) and same(momentum, arrays(LAYERS, version.version + 50))
    snapshots.close()


def test_a_damaged_snapshot_is_kept_beside_the_one_that_is_brought_back(url: str, tmp_path: Path) -> None:
    """What lies in a version's place and is not whole stays, for a person."""
    written(tmp_path / "s", V1)
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V1, nothing)
    flip_bit(tmp_path / "s" / str(V1), "theta.")
    snapshots = opened(tmp_path / "s")
    assert snapshots.complete_versions() == ()
    assert snapshots.complete_versions() == (), "it was read through, and is not again"
    kept(tmp_path, url).restore(())
    assert snapshots.complete_versions() == (V1,)
    snapshots.close()
    assert (tmp_path / "s" / f"damaged-{V1}").exists()


def test_what_is_damaged_twice_is_kept_once(url: str, tmp_path: Path) -> None:
    """The newest damaged one of a version; the one before makes room."""
    written(tmp_path / "s", V1)
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V1, nothing)
    for mark in ("first", "second"):
        (tmp_path / "s" / str(V1) / "mark").write_text(mark)
        assert kept(tmp_path, url).restore(()).versions == (V1,)
    assert (tmp_path / "s" / f"damaged-{V1}" / "mark").read_text() == "second"


def test_a_damaged_snapshot_that_cannot_be_removed_stops_no_restore(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one into which root has copied something: the next one stays beside it, and the log says where."""
    written(tmp_path / "s", V1)
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V1, nothing)
    fixed, remove = tmp_path / "s" / f"damaged-{V1}", shutil.rmtree
    fixed.mkdir()
    (fixed / "of root").touch()
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: None if path == fixed else remove(path, **how))
    for mark in ("first", "second"):
        (tmp_path / "s" / str(V1) / "mark").write_text(mark)
        with capture_logs() as logs:
            assert kept(tmp_path, url).restore(()).versions == (V1,)
        aside = tmp_path / "s" / f"damaged-{V1}-2"
        assert (aside / "mark").read_text() == mark
        assert [line["path"] for line in logs if line["event"] == "damaged_snapshot_kept"] == [str(aside)]
    assert [path.name for path in fixed.iterdir()] == ["of root"]


def test_what_is_older_than_the_newest_on_the_disk_stays_in_the_mirror(url: str, tmp_path: Path) -> None:
    """Also where the disk holds something older still."""
    written(tmp_path / "s", V1, V2, V3)
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V2, nothing)
    shutil.rmtree(tmp_path / "s" / str(V2))
    assert kept(tmp_path, url).restore((V1, V3)) == Restored(())


def test_a_copy_that_takes_long_is_no_failure_while_bytes_move(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes in all: each piece is one every half a minute here."""
    now, said = [0.0], list[str]()
    written(tmp_path / "s", V1)
    mirror = SnapshotMirror(MirrorStore(url, "r", "s"), tmp_path / "s", "r", "s", LOG, lambda: now[0])

    def copy_slowly(store: MirrorStore, root: Path, version: VersionId, on_piece: Callable[[int], None]) -> None:
        def on_moved(nbytes: int) -> None:
            now[0] += STALL_S / 2
            on_piece(nbytes)
            said.append(mirror.report().reason)

        copy_out(store, root, version, on_moved)

    monkeypatch.setattr(snapshot_mirror, "copy_out", copy_slowly)
    mirror.want((V1,))
    mirror.start()
    until(lambda: mirror.report().held == (V1,))
    mirror.close()
    assert len(said) > 3 and not any(said)


def test_a_deletion_of_many_is_no_failure_while_they_go(url: str, tmp_path: Path) -> None:
    """A mirror that has caught up lets several large ones go; each may take nearly as long as one may be silent."""
    versions, now, said = tuple(VersionId(n, n) for n in range(1, 5)), 0.0, list[str]()
    written(tmp_path / "s", *versions)
    for version in versions:
        copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", version, nothing)

    class SlowStore(MirrorStore):
        def remove_path(self, name: str) -> None:
            nonlocal now
            super().remove_path(name)
            now += 0.8 * STALL_S
            said.append(mirror.report().reason)

    store = SlowStore(url, "r", "s", of=tmp_path / "s")
    mirror = SnapshotMirror(store, tmp_path / "s", "r", "s", LOG, lambda: now)
    mirror.want(versions[-1:])
    for _ in range(2):  # it is listed first
        mirror._do_next_job()
    assert mirror.report() == MirrorReport(versions[-1:]) and said == ["", "", ""]


class LongCopy:
    """A mirror whose copies do something before they begin, and a clock that goes only when it is moved."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path, url: str, meanwhile: Callable[[], None]) -> None:
        self.now, self.looks, self.begun = 0.0, 0, threading.Event()

        def copy_later(store: MirrorStore, root: Path, version: VersionId, on_piece: Callable[[int], None]) -> None:
            self.begun.set()
            meanwhile()
            copy_out(store, root, version, on_piece)

        patch.setattr(snapshot_mirror, "copy_out", copy_later)
        patch.setattr(snapshot_mirror, "LOOK_S", 0.01)
        self.mirror = SnapshotMirror(marked(tmp_path, url), tmp_path / "s", "r", "s", LOG, self.clock)

    def clock(self) -> float:
        self.looks += threading.current_thread() is threading.main_thread()
        return self.now

    def begin(self, *wanted: VersionId) -> None:
        self.mirror.want(wanted)
        self.mirror.start()
        assert self.begun.wait(10)

    def until_looked_at(self) -> None:
        """Until the restore on the main thread has looked at the copy at this time."""
        seen = self.looks
        until(lambda: self.looks > seen + 1)


def test_a_restore_waits_for_a_copy_that_moves(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: what the master asks for is brought back, and no newer version is given up for it."""
    written(tmp_path / "s", V1, V2)
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))

    def move_slowly() -> None:
        for _ in range(4):
            long.until_looked_at()
            long.now += 0.8 * STALL_S
            long.mirror._on_moved(1)

    long = LongCopy(monkeypatch, tmp_path, url, move_slowly)
    long.begin(V1, V2)
    assert long.mirror.restore((V2,), (V1,)) == Restored((V1,))
    long.mirror.close()


def test_a_restore_does_not_wait_for_a_copy_that_hangs(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so after a while, so that the slave registers with what is on its disk."""
    written(tmp_path / "s", V1)
    over = threading.Event()

    def hang() -> None:
        long.until_looked_at()
        long.now += STALL_S
        assert_set(over)

    long = LongCopy(monkeypatch, tmp_path, url, hang)
    long.begin(V1)
    with pytest.raises(FailedMirror, match="nothing has moved for 60 s"):
        long.mirror.restore((V1,))
    over.set()
    until(lambda: long.mirror.report() == MirrorReport((V1,)))
    long.mirror.close()


@pytest.mark.parametrize(("hangs", "silent_s"), [("read_copy", STALL_S), ("bring_back", snapshot_mirror.SILENT_S)])
def test_a_restore_that_hangs_is_given_up(
    hangs: str, silent_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk whose server is gone raises nothing: a slave that has the head is not held up by it, and a later
    restore not by the one before. What comes after all is not used, and the mirror goes on.
    """
    (tmp_path / "mirror").mkdir()
    written(tmp_path / "s", V1)
    copy_out(MirrorStore(str(tmp_path / "mirror"), "r", "s"), tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))
    begun, over, works, now = threading.Event(), threading.Event(), getattr(snapshot_mirror, hangs), 0.0

    def hang(*args: Any) -> Any:
        if hangs == "bring_back":
            args[-1](0)  # bytes have moved, so this disk may be silent for long
        begun.set()
        assert_set(over)
        return works(*args)

    monkeypatch.setattr(snapshot_mirror, hangs, hang)
    monkeypatch.setattr(snapshot_mirror, "LOOK_S", 0.01)
    store = marked(tmp_path, str(tmp_path / "mirror"))
    meter = WorkMeter()
    mirror = SnapshotMirror(store, tmp_path / "s", "r", "s", LOG, lambda: now, meter)
    told = list[Restored | Exception]()
    mirror.begin_restore((), (), told.append)
    assert begun.wait(10)
    now = silent_s - 1.0
    threading.Event().wait(0.05)
    assert told == [] and (meter.read_progress() is not None) is (hangs == "bring_back")
    now = silent_s
    until(lambda: bool(told))
    assert isinstance(told[0], FailedMirror) and f"nothing has moved for {silent_s:g} s" in str(told[0])
    assert meter.read_progress() is None, "nobody waits for it any more"
    assert "nothing has moved" in mirror.report().reason
    mirror.begin_restore((), (), told.append)

    def is_told_again() -> bool:
        nonlocal now
        now += STALL_S
        return len(told) == 2

    until(is_told_again)
    assert isinstance(told[1], FailedMirror)
    monkeypatch.setattr(snapshot_mirror, hangs, works)
    over.set()
    with mirror._job:
        assert not list((tmp_path / "s").glob("*@*"))
    assert mirror.restore(()) == Restored((V1,))


def test_a_restore_that_fails_is_known_before_the_next_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits for the restore's end with a copy that is due: it pauses first, and the failure is not taken
    for the copy's.
    """
    (tmp_path / "mirror").mkdir()
    written(tmp_path / "s", V1, V2)
    copy_out(MirrorStore(str(tmp_path / "mirror"), "r", "s"), tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))
    failed, copies = threading.Event(), threading.Event()

    def clock() -> float:
        if failed.is_set() and threading.current_thread() is threading.main_thread():
            copies.wait(1.0)  # the other thread is faster
        return 0.0

    def fail(*_: Any) -> None:
        mirror.start()
        failed.set()
        raise FailedMirror("gone")

    monkeypatch.setattr(snapshot_mirror, "bring_back", fail)
    monkeypatch.setattr(snapshot_mirror, "copy_out", lambda *_: copies.set())
    mirror = SnapshotMirror(marked(tmp_path, str(tmp_path / "mirror")), tmp_path / "s", "r", "s", LOG, clock)
    mirror.want((V2,))
    with pytest.raises(FailedMirror, match="gone"):
        mirror.restore((V2,), (V1,))
    assert mirror.report().reason == "gone" and not copies.is_set()
    mirror.close()


def test_what_is_brought_back_ends_with_its_slave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process in the directory removes what is unfinished there, and begins with the same names: nothing of
    this one is written, or removed, from then on.
    """
    (tmp_path / "mirror").mkdir()
    written(tmp_path / "s", V1)
    copy_out(MirrorStore(str(tmp_path / "mirror"), "r", "s"), tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))
    begun, copy_one = threading.Event(), mirror_store.copy_layer

    def copy_slowly(*args: Any) -> None:
        begun.set()
        threading.Event().wait(0.2)
        copy_one(*args)

    monkeypatch.setattr(mirror_store, "copy_layer", copy_slowly)
    mirror, told = kept(tmp_path, str(tmp_path / "mirror")), list[Restored | Exception]()
    mirror.begin_restore((), (), told.append)
    assert begun.wait(10)
    mirror.close()
    assert not [path.name for path in (tmp_path / "s").iterdir() if path.is_dir()]
    until(lambda: bool(told))
    assert isinstance(told[0], Stale)


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def test_what_is_named_while_a_restore_lasts_is_not_deleted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be deleted is found when the restore has ended, not before it."""
    written(tmp_path / "s", V1, V2)
    store, restoring, over = MirrorStore(url, "r", "s"), threading.Event(), threading.Event()
    for version in (V1, V2):
        copy_out(store, tmp_path / "s", version, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))
    mirror = kept(tmp_path, url)
    mirror.restore((V2,))

    def bring_back_later(*args: Any) -> None:
        restoring.set()
        assert_set(over)
        bring_back(*args)

    monkeypatch.setattr(snapshot_mirror, "bring_back", bring_back_later)
    deleted = list[str]()
    monkeypatch.setattr(MirrorStore, "remove_path", lambda store, name: deleted.append(name))
    restored = list[Restored | Exception]()
    mirror.begin_restore((V2,), (V1,), restored.append)
    assert restoring.wait(10)
    mirror.want((V2,))
    mirror.start()
    time.sleep(0.2)  # the thread finds that V1 is superfluous
    mirror.want((V1, V2))
    over.set()
    until(lambda: bool(restored))
    mirror.close()
    mirror._thread.join(10)
    assert restored == [Restored((V1,))] and deleted == []


def test_the_thread_ends_with_its_slave(url: str, tmp_path: Path) -> None:
    """It waits for a wish, an hour at a time; the end is one."""
    mirror = kept(tmp_path, url)
    mirror.start()
    until(lambda: not mirror.report().unknown)
    mirror.close()
    mirror._thread.join(10)
    assert not mirror._thread.is_alive()


def test_a_restore_that_nobody_waits_for_touches_no_snapshot_that_is_written(url: str, tmp_path: Path) -> None:
    """It may go on, when the mirror does, in the middle of a write of the same version, as of one that a person has
    brought from elsewhere.
    """
    written(tmp_path / "s", V1)
    store, begun = MirrorStore(url, "r", "s"), list[int]()
    copy_out(store, tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))
    snapshots = opened(tmp_path / "s")

    def write_meanwhile(nbytes: int) -> None:
        if not begun:
            begun.append(nbytes)
            snapshots.write_snapshot(V1, arrays(LAYERS, 8), arrays(LAYERS, 9))

    with pytest.raises(OSError, match="not empty"):
        bring_back(store, tmp_path / "s", "r", "s", V1, write_meanwhile)
    theta, momentum = read(snapshots, V1)
    assert same(theta, arrays(LAYERS, 8)) and same(momentum, arrays(LAYERS, 9))
    assert not list((tmp_path / "s").glob(ASIDE + "*"))
    snapshots.close()


def test_a_restore_finds_a_full_disk_before_it_fetches(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of hundreds of GB is not fetched again and again for a disk that has no room for it; nothing is left of
    the try.
    """
    written(tmp_path / "s", V1)
    store, fetched = MirrorStore(url, "r", "s"), list[int]()
    copy_out(store, tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))

    def is_full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensorfile, "_reserve_space", is_full)
    with pytest.raises(OSError, match="No space left"):
        bring_back(store, tmp_path / "s", "r", "s", V1, fetched.append)
    assert fetched == [] and not list((tmp_path / "s").glob("*@*"))


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_under_a_ledger_is_named(url: str, tmp_path: Path) -> None:
    """The sentence would name the file in the mirror alone, whose disk has room."""
    store = MirrorStore(url, "r", "master")
    store.write_file("base", mirror_store.seal("r", bytes(1 << 16)))
    with full_after(1 << 15), pytest.raises(FailedMirror, match=f"/base: .*File too large: '{tmp_path}/ledger'"):
        mirror_store.fetch_sealed_file(store, "r", "base", tmp_path / "ledger")


class Unread(io.BytesIO):
    """A file that its disk refuses to read behind its beginning."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


def test_a_disk_that_refuses_to_read_a_copied_version_is_named(url: str, tmp_path: Path) -> None:
    """The sentence would name the file in the mirror alone, whose disk works."""
    write_version(tmp_path, ("r", "s", 1), V1, Manifest.from_shapes([("w", (4,))]), (0,), (np.ones(4, np.float32),) * 2)
    manifest = read_manifest(tmp_path)
    record, store = manifest.layers[0], MirrorStore(url, "r", "s")
    path = tmp_path / record.file
    with (
        pytest.raises(FailedMirror, match=f"Input/output error: '{path}'"),
        store.create_file("w", record.size) as target,
    ):
        copy_layer(Unread(path.read_bytes()), target.write, manifest, record, str(path))


def test_a_disk_that_fills_under_a_restore_is_not_taken_for_the_mirror(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be reserved, as on NFS: each layer would be fetched four times, the mirror be told as failing,
    and the operator look for room where there is some.
    """
    large, theta = Manifest.from_shapes([("w", (1 << 14,))]), np.zeros(1 << 14, np.float32)
    folder = tmp_path / "s" / str(V1)
    folder.mkdir(parents=True)
    write_version(folder, ("r", "s", 1), V1, large, (0,), (theta, theta))
    store, fetched = MirrorStore(url, "r", "s"), list[str]()
    copy_out(store, tmp_path / "s", V1, nothing)
    shutil.rmtree(folder)
    open_file = store.open_file

    def open_counted(name: str) -> Any:
        fetched.append(name)
        return open_file(name)

    monkeypatch.setattr(mirror_store, "reserve_file", lambda path, size: path.touch())
    monkeypatch.setattr(store, "open_file", open_counted)
    with full_after(1 << 15), pytest.raises(FailedDisk, match=f"^{tmp_path}/s/.*: File too large") as raised:
        bring_back(store, tmp_path / "s", "r", "s", V1, nothing)
    assert not isinstance(raised.value, FailedMirror) and len(fetched) == 1


def test_a_restore_that_has_failed_fetches_no_more(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may take minutes: one of them is damaged, and those beside it are not fetched to their ends."""
    monkeypatch.setattr(mirror_store, "STREAMS", 2)
    written(tmp_path / "s", V1)
    store, moved = MirrorStore(url, "r", "s"), list[int]()
    copy_out(store, tmp_path / "s", V1, nothing)
    name = f"{V1}/00001.safetensors"
    with store.open_file(name) as file:
        content = bytearray(file.read())
    content[20] ^= 8  # of its header: it is found before a byte is counted
    store.write_file(name, bytes(content))
    both, open_file, before = threading.Barrier(2, timeout=10), store.open_file, {*threading.enumerate()}

    def open_both(opened: str) -> Any:
        both.wait()
        if opened == name:
            until(lambda: bool(moved))
        return open_file(opened)

    def await_failure(nbytes: int) -> None:
        moved.append(nbytes)
        until(lambda: len([t for t in {*threading.enumerate()} - before if t.name == "restore"]) == 1)

    monkeypatch.setattr(store, "open_file", open_both)
    with pytest.raises(CorruptSnapshot, match="its header is not that of layer"):
        bring_back(store, tmp_path / "s", "r", "s", V1, await_failure)
    assert len(moved) == 1, "θ of the layer beside it, and no momentum"


def rot(store: MirrorStore, version: VersionId) -> None:
    """Flip the last bit of a copy."""
    name = f"{version}/00000.safetensors"
    with store.open_file(name) as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    store.write_file(name, bytes(content))


def test_a_restore_says_how_far_it_is(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, rate and what it does, while it lasts and no longer."""
    written(tmp_path / "s", V1)
    clock = iter(range(1000))
    store, meter = MirrorStore(url, "r", "s"), WorkMeter(lambda: float(next(clock)))
    copy_out(store, tmp_path / "s", V1, nothing)
    shutil.rmtree(tmp_path / "s" / str(V1))
    seen = []
    copy_one = mirror_store.copy_layer

    def look(*args: Any) -> None:
        copy_one(*args)
        seen.append(meter.read_progress())

    monkeypatch.setattr(mirror_store, "copy_layer", look)
    SnapshotMirror(store, tmp_path / "s", "r", "s", LOG, time.monotonic, meter).restore(())
    doing, done, total, rate = seen[-1]
    assert doing == f"restores {V1} from its mirror"
    assert done == total == read_copy(store, "r", "s", V1)[1].parameter_bytes > 0
    assert rate == done / len(seen)
    assert meter.read_progress() is None


def test_work_that_ends_late_hides_no_other() -> None:
    """A restore that nobody waits for ends when its mirror is back, in the middle of what was begun since."""
    meter, late = WorkMeter(), ExitStack()
    late.enter_context(meter.long_work("restores", 9))
    with meter.long_work("reads", 5):
        late.close()
        assert meter.read_progress() is not None
    assert meter.read_progress() is None


def test_a_rotten_copy_is_read_once_and_replaced(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before each Register of a slave that waits; the master is not told that it is there, and has it replaced."""
    written(tmp_path / "s", V1)
    store, read, meter = MirrorStore(url, "r", "s"), list[int](), WorkMeter()
    copy_out(store, tmp_path / "s", V1, nothing)
    rot(store, V1)
    shutil.move(tmp_path / "s" / str(V1), tmp_path / "kept")
    copy_one = mirror_store.copy_layer

    def count(
        source: Any, target: Any, manifest: Any, record: Any, where: str, on_piece: Callable[[int], None]
    ) -> None:
        def counted(nbytes: int) -> None:
            on_piece(nbytes)
            read.append(nbytes)

        copy_one(source, target, manifest, record, where, counted)

    monkeypatch.setattr(mirror_store, "copy_layer", count)
    mirror = SnapshotMirror(store, tmp_path / "s", "r", "s", LOG, time.monotonic, meter)
    first = mirror.restore(())
    assert mirror.report() == MirrorReport(()), "the next Register does not tell it"
    assert first.versions == () and "expected xxh3-128" in first.reason
    once = sum(read)
    assert meter.nbytes == once > 0, "a restore that takes minutes is seen to work"
    for _ in range(3):
        assert "its bytes are not its digests'" in mirror.restore(()).reason
        assert mirror.report() == MirrorReport(())
    assert sum(read) == once
    shutil.move(tmp_path / "kept", tmp_path / "s" / str(V1))
    mirror.start()
    mirror.want((V1,))
    until(lambda: mirror.report().held == (V1,))
    shutil.rmtree(tmp_path / "s" / str(V1))
    assert mirror.restore(()).versions == (V1,), "the new copy is another one"
    mirror.close()


def test_a_version_below_a_newer_one_is_brought_back_when_the_master_asks(url: str, tmp_path: Path) -> None:
    """Nothing else that is older than the disk is."""
    written(tmp_path / "s", V1, V2, V3)
    store = MirrorStore(url, "r", "s")
    for version in (V1, V2):
        copy_out(store, tmp_path / "s", version, nothing)
        shutil.rmtree(tmp_path / "s" / str(version))
    assert kept(tmp_path, url).restore((V3,)).versions == ()
    assert kept(tmp_path, url).restore((V3,), (V2,)).versions == (V2,)
    assert kept(tmp_path, url).restore((V2, V3), (V2,)).versions == ()
    assert {path.name for path in (tmp_path / "s").glob("*@*")} == {str(V2), str(V3)}


def test_a_mirror_that_comes_back_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is gone the report says so and the slave goes on; then the newest arrives."""
    monkeypatch.setattr("dips.slave.snapshot_mirror.BACKOFF_S", (0.01, 0.05))
    written(tmp_path / "s", V1, V2)
    mirror = kept(tmp_path, str(tmp_path / "mirror"))
    mirror.start()
    mirror.want((V2,))
    until(lambda: "is not there" in mirror.report().reason)
    (tmp_path / "mirror").mkdir()
    until(lambda: mirror.report().held == (V2,))
    assert mirror.report().reason == ""
    mirror.close()


def test_a_mirror_that_is_gone_is_told_apart_from_one_that_holds_nothing(tmp_path: Path) -> None:
    """One raises, so an empty disk is not taken for a new one; the other may be a mount point: the reason asks."""
    mirror = kept(tmp_path, str(tmp_path / "mirror"))
    with pytest.raises(FailedMirror, match="is not there: mount it"):
        mirror.restore(())
    assert "is not there: mount it" in mirror.report().reason, "the next Register tells it"
    (tmp_path / "mirror").mkdir()
    restored = mirror.restore(())
    assert restored.versions == ()
    assert restored.reason.endswith("mirror/r/s holds no snapshot of it either: is it mounted?")


def test_a_copy_of_other_layers_is_replaced_and_not_restored(tmp_path: Path) -> None:
    """A rebalance leaves the name and changes the layers: the old copy is no copy, whatever its name says."""
    url = str(tmp_path / "mirror")
    (tmp_path / "mirror").mkdir()
    written(tmp_path / "s", V1, V2)
    store = MirrorStore(url, "r", "s")
    for version in (V1, V2):
        copy_out(store, tmp_path / "s", version, nothing)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    mirror = kept(tmp_path, url)
    mirror.bind_layers((0, 1))
    restored = mirror.restore(())
    assert restored.versions == ()
    assert "v2@r5: holds the layers [0, 1, 2, 3], this slave [0, 1] since a rebalance" in restored.reason
    assert mirror.report().held == ()
    snapshots = opened(tmp_path / "s", layers=(0, 1))
    snapshots.write_snapshot(V2, arrays((0, 1), 7), arrays((0, 1), 8))
    snapshots.close()
    mirror.start()
    mirror.want((V2,))
    until(lambda: mirror.report().held == (V2,) and store.list_names() == [str(V2)])
    mirror.close()
    assert snapshot_mirror.list_copies(store, "r", "s", LOG, (0, 1)) == snapshot_mirror.MirrorListing((V2,))


def test_layers_that_are_learned_are_listed_anew(url: str, tmp_path: Path) -> None:
    """The master has told them to a process that had listed already: its thread looks at once, not in an hour."""
    written(tmp_path / "s", V1)
    copy_out(MirrorStore(url, "r", "s"), tmp_path / "s", V1, nothing)
    mirror = kept(tmp_path, url)
    mirror.start()
    until(lambda: mirror.report().held == (V1,))
    mirror.bind_layers((0, 1))
    until(lambda: mirror.report() == MirrorReport(()))
    mirror.close()


def test_what_was_listed_stands_until_it_is_listed_anew() -> None:
    """A report that forgot for a moment would let the others' disks delete what this mirror holds."""
    plan = listed(V1, V2)
    plan.list_again()
    assert plan.report(0.0).held == (V1, V2)
    assert plan.next_job(0.0) == LIST
    plan.on_listed((V2,), outdated=(V1,))
    plan.want((V2,))
    assert plan.report(0.0).held == (V2,)
    assert plan.next_job(1.0) == MirrorJob(MirrorJobKind.DELETE, (V1,))
    plan.on_done(MirrorJob(MirrorJobKind.DELETE, (V1,)))
    assert plan.next_job(2.0) is None


async def test_a_slave_s_mirror_learns_which_layers_are_its_own(tmp_path: Path) -> None:
    """A copy from before a rebalance has a version's name and other layers: a slave that took it for whole would leave
    the version without a copy."""
    written(tmp_path / "r", V1)
    (tmp_path / "mirror").mkdir()
    section = SlaveSection(
        name="s", master="127.0.0.1:1", directory=tmp_path / "s", mirror=(tmp_path / "mirror").as_uri()
    )
    copy_out(MirrorStore(str(section.mirror), "r", "s"), tmp_path / "r", V1, lambda _: None)
    config = RunFile(shared=Shared(run="r"), master=MasterSection(directory=tmp_path), slaves=(section,), tls=False)
    async with AsyncExitStack() as stack:
        parts = app._build_parts(config, section, LOG, stack)
        parts.prepare_memory(Registered(1, 7, Hold(), GENESIS, (0, 1), ("", ""), MANIFEST.to_json()))
        assert parts.mirror is not None
        assert "this slave [0, 1] since a rebalance" in parts.mirror.restore(()).reason
