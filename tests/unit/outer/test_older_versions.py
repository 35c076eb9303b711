"""Older versions that stay in memory for their readers."""

from __future__ import annotations

import pytest

from dips.errors import Busy
from dips.ids import GENESIS, PullId, VersionId
from dips.outer import reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from tests.loading import load_version
from tests.unit.outer.test_bites_versions import fill, prepared


def made(pinned: int) -> Versions:
    versions = Versions(KernelPool(reference), 2, pinned)
    versions.allocate_banks({0: 4})
    load_version(versions, GENESIS, lambda theta, m: fill(theta, 1.0) or fill(m, 0.0))
    return versions


def flip(versions: Versions, *numbers: int) -> list[VersionId]:
    flipped = []
    for number in numbers:
        flipped.append(prepared(versions, number))
        versions.flip_version(flipped[-1])
    return flipped


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
    assert (
        versions.held.older == [] and versions.theta(GENESIS)[0] is read[0] and versions.momentum(GENESIS)[0][0] == 0.5
    )
    versions.unpin_version(reader)
    assert versions.served_version == GENESIS and not versions.held.pins


def test_a_load_waits_only_for_readers_of_what_it_replaces() -> None:
    """A rollback that a reader of an older version held up would wait for it; one of the head, beside it, has to."""
    versions, old, new = made(pinned=0), PullId("a", 1, 1), PullId("a", 1, 2)
    versions.held.pin_version(old, GENESIS)
    (head,) = flip(versions, 1)
    versions.held.pin_version(new, head)
    with pytest.raises(Busy, match="v2@r2 cannot be loaded: older versions are still read by"):
        versions.begin_load(VersionId(2, 2))
    versions.unpin_version(new)
    load_version(versions, VersionId(2, 2), lambda theta, m: fill(theta, 1.0) or fill(m, 0.5))
    assert versions.served_version == VersionId(2, 2) and versions.held.older_versions == (GENESIS,)


def test_a_version_whose_readers_move_is_none() -> None:
    """Its bank is about to be free: from then on nobody is counted on to leave it."""
    versions = made(pinned=1)
    pull = PullId("a", 1, 1)
    versions.held.pin_version(pull, GENESIS)
    flip(versions, 1)
    assert versions.held.older_versions == (GENESIS,)
    versions.held.move_readers(GENESIS)
    assert versions.held.older_versions == ()
    versions.held.on_reader_moved(pull)
    assert len(versions.bank_holders()) == 2  # θ and m
