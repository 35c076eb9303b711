"""Conversion between dataclasses and the types of JSON (maps, lists, numbers, text), by type hints.

A member of an enum becomes its value; a number that is not finite becomes null, since JSON cannot write it, and is read
back as NaN. What is read may come from another version of Di-PS: it may lack fields that have a default, and have
fields that are unknown here; a field of another type is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from math import isfinite, nan
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_AS_THEY_ARE = frozenset({int, str, bool, NoneType})


def to_plain(value: Any) -> Any:
    """Convert a value; a dataclass becomes a map of its fields."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in field_types(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the fields of a dataclass with their types."""
    return get_type_hints(cls)


def from_plain(hint: Any, value: Any) -> Any:
    """Build a value of the annotated type. Raises TypeError or ValueError if `value` does not fit."""
    if hint is Any:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        options = [h for h in arguments if h is not NoneType]
        return None if value is None else from_plain(options[0], value)
    if origin is tuple:
        return tuple(from_plain(arguments[0], item) for item in value)
    if origin is Mapping:
        return {key: from_plain(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _build(hint, value)
    if issubclass(hint, Enum):
        return hint(value)
    if hint is float and (type(value) is int or value is None):
        return nan if value is None else float(value)
    if type(value) is not hint:
        raise TypeError(f"expected {hint.__name__}, got {value!r}")
    return value


def _build(cls: Any, fields: Any) -> Any:
    hints = field_types(cls)
    known = {name: from_plain(hint, fields[name]) for name, hint in hints.items() if name in fields}
    return cls(**known)
