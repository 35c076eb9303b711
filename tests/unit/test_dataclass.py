"""Dataclasses that are frozen for mypy only: everything else is as the standard library has it."""

from __future__ import annotations

import dataclasses

import pytest

from dips.dataclass import dataclass, replace
from dips.ids import PullId, PushId, VersionId


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    number: int = 0


def test_it_is_equal_and_hashed_by_its_fields() -> None:
    """Two with equal fields are one key of a dictionary, as two frozen ones are; a mutable one is none."""
    assert _Named("a", 1) == _Named("a", 1) != _Named("a", 2)
    assert len({_Named("a", 1), _Named("a", 1), _Named("b", 1)}) == 2
    assert repr(_Named("a")) == "_Named(name='a', number=0)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(dataclass(type("_Open", (), {"__annotations__": {"name": str}}))("a"))


def test_a_frozen_one_may_inherit() -> None:
    """The standard library takes it for frozen: a frozen subclass is allowed, one that is not is refused."""
    dataclasses.dataclass(frozen=True)(type("_Below", (_Named,), {}))
    with pytest.raises(TypeError, match="non-frozen"):
        dataclasses.dataclass(type("_Loose", (_Named,), {}))


def test_replace_changes_these_fields() -> None:
    """`replace` copies, changes what was named, and refuses a field that is none."""
    before = _Named("a", 1)
    assert (replace(before, number=2), before) == (_Named("a", 2), _Named("a", 1))
    with pytest.raises(TypeError, match="other"):
        replace(before, other=1)


def test_names_are_hashed_by_what_differs() -> None:
    """Names have a hash of their own: equal names have equal ones, and a push is no pull."""
    assert hash(VersionId(3, 4)) == hash(VersionId(3, 4))
    assert hash(PushId("a", 1, 2)) == hash(PushId("a", 1, 2))
    assert len({PushId("a", 1, 2), PullId("a", 1, 2), PushId("a", 2, 2)}) == 3
