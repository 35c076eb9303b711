"""`dataclass` for what is made by the thousand: events, effects, actions, messages, names.

The same as `dataclasses.dataclass`, but with `frozen=True` it is mypy that forbids an assignment, and nothing does at
run time: the generated `__init__` of the standard library sets each field through `object.__setattr__`, which costs
three times what a plain assignment does, and a master makes some dozen such objects for each message. `__init__` takes
every field (no `init=False`), so that `replace` is short.
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
        """Make `cls` a dataclass; one that is called frozen is hashed by its fields, like a frozen one."""

        def make_dataclass(cls: type) -> type:
            hashed = frozen and eq and "__hash__" not in cls.__dict__
            made = dataclasses.dataclass(eq=eq, unsafe_hash=hashed, **options)(cls)
            made.__dataclass_params__.frozen = frozen  # so classes inherit, and codec.py shares, as if it were
            return made

        return make_dataclass if cls is None else make_dataclass(cls)

    def replace(made: Any, /, **changes: Any) -> Any:
        """A copy with these fields changed, as `dataclasses.replace` makes it, which looks at each field anew."""
        return _spell_replace(type(made), tuple(changes))(made, *changes.values())


@cache
def _spell_replace(cls: type, changed: tuple[str, ...]) -> Callable[..., Any]:
    """A function of an object and the new values of its fields `changed`, spelled as a person would write it."""
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in changed if name not in names]:
        raise TypeError(f"{cls.__name__} has the fields {', '.join(names)}, got {', '.join(unknown)}")
    values = ", ".join(name if name in changed else f"made.{name}" for name in names)
    text = f"lambda made, {', '.join(changed)}: cls({values})"
    spelled: Callable[..., Any] = eval(text, {"cls": cls})  # noqa: S307 (names of fields only, as in a made __init__)
    return spelled
