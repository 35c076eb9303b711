"""Older versions that stay in memory without readers, for pushes that are measured against them."""

from __future__ import annotations

import pytest

from dips.errors import StaleVersion
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from tests.loading import load_version
from tests.unit.outer.test_bites_versions import fill, prepared


def made(pinned: int, keeps_older: bool = True) -> Versions:
    versions = Versions(KernelPool(reference), 2, pinned, keeps_older=keeps_older)
    versions.allocate_banks({0: 4})
    load_version(versions, GENESIS, lambda theta, m: fill(theta, 1.0) or fill(m, 0.0))
    return versions


def flip(versions: Versions, *numbers: int) -> list[VersionId]:
    flipped = []
    for number in numbers:
        flipped.append(prepared(versions, number))
        versions.flip_version(flipped[-1])
    return flipped


def test_the_newest_older_versions_stay_while_there_is_room() -> None:
    """As many as there are pinned banks; with none, or unless told to, nothing is kept."""
    versions = made(pinned=2)
    v1, v2, v3 = flip(versions, 1, 2, 3)
    assert [v for v in (GENESIS, v1, v2, v3) if versions.held.is_older(v)] == [v1, v2]
    assert versions.held.older_versions == () and versions.held.excess_versions == 0  # nobody reads them
    for other in (made(pinned=0), made(pinned=2, keeps_older=False)):
        flip(other, 1)
        assert not other.held.is_older(GENESIS)


def test_readers_take_the_banks_of_what_is_only_kept() -> None:
    """A version that is read is not freed for one that nobody reads; the sum of banks is what it is without."""
    versions = made(pinned=1)
    pull = PullId("a", 1, 1)
    versions.held.pin_version(pull, GENESIS)
    (v1, v2) = flip(versions, 1, 2)
    assert versions.held.is_older(GENESIS) and not versions.held.is_older(v1)
    prepared(versions, 3)
    assert versions.used_bytes <= versions.limit_bytes
    versions.unpin_version(pull)
    assert versions.held.is_older(GENESIS) and versions.served_version == v2  # until the bank is wanted


def test_every_slot_and_the_next_version_find_their_banks() -> None:
    """With all kept and all slots open an outer step goes on as before."""
    versions = made(pinned=1)
    for number in range(1, 6):
        others = [PushId("b", 1, number)]
        for push in others:
            versions.open_slot(push)
        flip(versions, number)
        for push in others:
            versions.free_slot(push)
    assert versions.used_bytes <= versions.limit_bytes


def test_what_readers_left_behind_is_freed_before_anybody_waits() -> None:
    """Two older versions were read, one more than there are pinned banks; now nobody does, and θ′ finds its bank."""
    versions = made(pinned=1)
    for number in (1, 2):
        assert versions.served_version is not None
        versions.held.pin_version(PullId("a", 1, number), versions.served_version)
        flip(versions, number)
    for number in (1, 2):
        versions.unpin_version(PullId("a", 1, number))
    fill(versions.open_slot(PushId("b", 1, 3)), 0.5)
    versions.fold_push(PushId("b", 1, 3), 1.0)
    for number in (4, 5):
        versions.open_slot(PushId("b", 1, number))
    versions.prepare_version(VersionId(3, 3), nesterov_step(1.0, 1.0, 0.0))
    assert not versions.held.is_older(GENESIS) and versions.used_bytes == versions.limit_bytes


def test_a_load_forgets_them() -> None:
    """After a rollback they may be of another lineage."""
    versions = made(pinned=2)
    (v1,) = flip(versions, 1)
    load_version(versions, GENESIS, lambda theta, m: fill(theta, 1.0) or fill(m, 0.0))
    assert not versions.held.is_older(v1) and not versions.held.is_older(GENESIS)
    assert len(versions.bank_holders()) == 2


@pytest.mark.parametrize("flips", [0, 1])
def test_a_load_of_what_is_read_leaves_its_readers_where_they_are(flips: int) -> None:
    """The head again, or by a rollback: one bank for its θ, which is served on, and its reader ends as ever."""
    versions = made(pinned=1)
    reader = PullId("a", 1, 9)
    read = versions.held.pin_version(reader, GENESIS)
    for number in range(1, flips + 1):
        flip(versions, number)
    load_version(versions, GENESIS, lambda theta, m: fill(theta, 1.0) or fill(m, 0.5))
    assert sorted(versions.bank_holders()) == ["m v0@r0", "θ v0@r0"]
    assert versions.theta(GENESIS)[0] is read[0] and versions.momentum(GENESIS)[0][0] == 0.5
    versions.unpin_version(reader)
    assert versions.served_version == GENESIS and not versions.held.pins


def test_measured_and_folded_from_the_anchor() -> None:
    """Both take the same θ; one that is not held is refused, and nothing changes."""
    versions = made(pinned=1)
    (v1,) = flip(versions, 1)
    assert v1 == versions.served_version
    push = PushId("a", 1, 2)
    fill(versions.open_slot(push), 0.25)
    with pytest.raises(StaleVersion):
        versions.measure_push(push, VersionId(7, 7))
    assert versions.measure_push(push, GENESIS).layer_sq == (4 * 0.75**2,)
    assert versions.fold_push(push, 1.0, (), GENESIS) == (4 * 0.75**2,)


def test_a_version_whose_readers_move_is_none() -> None:
    """Its bank is about to be free: it is no anchor from then on."""
    versions = made(pinned=1)
    pull = PullId("a", 1, 1)
    versions.held.pin_version(pull, GENESIS)
    flip(versions, 1)
    assert versions.held.is_older(GENESIS)
    versions.held.move_readers(GENESIS)
    assert not versions.held.is_older(GENESIS)
    versions.held.on_reader_moved(pull)
    assert len(versions.bank_holders()) == 2  # θ and m
