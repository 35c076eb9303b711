"""A `dataclass` for objects that are created in large numbers: events, effects, actions, messages, names.

Like `dataclasses.dataclass`, but with `frozen=True` only mypy forbids an assignment, and nothing does at
run time: the standard library's generated `__init__` sets each field through `object.__setattr__`, which costs
three times as much as a plain assignment, and a master makes about a dozen such objects per message. `__init__` takes
every field (no `init=False`), which keeps `replace` simple.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Make `cls` a dataclass; with `frozen` it is hashed by its fields, as the standard one is."""

        def make_dataclass(cls: type) -> type:
            hashed = frozen and eq and "__hash__" not in cls.__dict__
            made = dataclasses.dataclass(eq=eq, unsafe_hash=hashed, **options)(cls)
            made.__dataclass_params__.frozen = frozen  # so that inheritance and codec.py treat it as frozen
            return made

        return make_dataclass if cls is None else make_dataclass(cls)

    def replace(made: Any, /, **changes: Any) -> Any:
        """Return a copy with these fields changed, as `dataclasses.replace`, which inspects all fields at each call."""
        return _spell_replace(type(made), tuple(changes))(made, *changes.values())


@cache
def _spell_replace(cls: type, changed: tuple[str, ...]) -> Callable[..., Any]:
    """Return a generated function of an object and new values of its fields `changed`, which makes the copy."""
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in changed if name not in names]:
        raise TypeError(f"{cls.__name__} has the fields {', '.join(names)}, got {', '.join(unknown)}")
    values = ", ".join(name if name in changed else f"made.{name}" for name in names)
    text = f"lambda made, {', '.join(changed)}: cls({values})"
    spelled: Callable[..., Any] = eval(text, {"cls": cls})  # noqa: S307 (names of fields only, as in a made __init__)
    return spelled
