"""What JSON makes of values, and what is read of it: also of another version of Di-PS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from dips.dataclass import dataclass
from dips.plain import from_plain, to_plain


@dataclass(frozen=True, slots=True)
class _Plain:
    ratio: float
    names: tuple[str, ...] = ()
    counts: Mapping[str, int] | None = None


def test_a_number_without_a_fraction_is_a_float() -> None:
    """JavaScript and other writers of JSON spell 3.0 as 3; what is not finite has no spelling, and is null."""
    whole = from_plain(_Plain, {"ratio": 3})
    assert whole == _Plain(3.0) and type(whole.ratio) is float
    for number in (math.nan, math.inf):
        assert to_plain(_Plain(number))["ratio"] is None
    assert math.isnan(from_plain(_Plain, {"ratio": None}).ratio)


def test_unknown_fields_are_passed_over_and_others_checked() -> None:
    """A later version may have more fields; one of another type is no value of ours."""
    full = _Plain(0.5, ("a",), {"b": 1})
    assert from_plain(_Plain, {**to_plain(full), "later": 7}) == full
    wrong: list[tuple[Any, Any]] = [("ratio", "3"), ("names", [1]), ("counts", {"b": True})]
    for name, value in wrong:
        with pytest.raises(TypeError, match="expected"):
            from_plain(_Plain, {**to_plain(full), name: value})
