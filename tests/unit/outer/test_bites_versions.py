"""What the memory of a slave refuses, and when an older version is one too many."""

from __future__ import annotations

import pytest

from dips.errors import LocalProtocolError
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.pool import Pool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from tests.loading import load_version


def fill(arrays: dict, value: float) -> None:
    for array in arrays.values():
        array.fill(value)


def made(pinned: int) -> Versions:
    versions = Versions(KernelPool(reference), 2, pinned)
    versions.allocate_banks({0: 4})
    load_version(versions, GENESIS, lambda theta, m: fill(theta, 1.0) or fill(m, 0.0))
    return versions


def prepared(versions: Versions, number: int) -> VersionId:
    assert versions.served_version is not None
    push, version = PushId("a", 1, number), VersionId(versions.served_version.version + 1, number)
    fill(versions.open_slot(push), 0.5)
    versions.fold_push(push, 1.0)
    versions.prepare_version(version, nesterov_step(1.0, 1.0, 0.0))
    return version


def test_a_flip_is_to_what_was_prepared() -> None:
    """A Commit of another version than the prepared one changes nothing."""
    versions = made(pinned=1)
    version = prepared(versions, 1)
    for other in (VersionId(1, 2), VersionId(2, 1)):
        with pytest.raises(LocalProtocolError):
            versions.flip_version(other)
    assert (versions.served_version, versions.prepared) == (GENESIS, version)
    versions.flip_version(version)
    assert versions.served_version == version


def test_pinned_older_versions_are_no_excess() -> None:
    """With one pinned bank the first older version that is read keeps it; the second is one too many."""
    versions = made(pinned=1)
    excess = []
    for number in (1, 2):
        assert versions.served_version is not None
        versions.held.pin_version(PullId("a", 1, number), versions.served_version)
        versions.flip_version(prepared(versions, number))
        excess.append(versions.held.excess_versions)
    assert excess == [0, 1]


def test_a_bank_is_given_back_once() -> None:
    """A second time somebody else may hold it already."""
    pool = Pool({0: 4}, 2)
    bank = pool.take_bank("slot")
    pool.give_back(bank)
    with pytest.raises(LocalProtocolError, match="given back twice"):
        pool.give_back(bank)
