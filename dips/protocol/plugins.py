"""User-defined rules and gates: entry points of the groups `dips.rules` and `dips.gates`.

A package names them in its pyproject.toml, and run files use them like built-in names (docs/guides/rules.md,
docs/guides/gates.md). Every process that reads `shared` refuses a name that is not installed on its machine; only the
Coordinator loads and calls the object behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dips.errors import ConfigError

GATES, RULES = "dips.gates", "dips.rules"


def require_names(key: str, names: Iterable[str], ours: Iterable[str], group: str) -> None:
    """Raise ConfigError, listing known and installed names, unless each name is one of them."""
    known, asked = set(ours), list(names)
    if all(name in known for name in asked):
        return
    installed = _find_entries(group)
    strays = [name for name in asked if name not in known and name not in installed]
    if strays:
        listed = f"installed here: {', '.join(sorted(installed))}" if installed else "none is installed here"
        raise ConfigError(
            f"{key}: expected {' or '.join(ours)}, or an entry point of the group {group} ({listed}), got {strays[0]!r}"
        )


@cache
def load_plugin(group: str, name: str) -> Any:
    """Import the object of an entry point; raise ConfigError if that fails, or if the name is not installed."""
    entry = _find_entries(group).get(name)
    if entry is None:
        raise ConfigError(f"{name!r} is no entry point of the group {group} on this machine; install its package")
    try:
        return entry.load()
    except Exception as error:  # any exception that a foreign package raises when it is imported
        raise ConfigError(
            f"entry point {name} of the group {group}: {entry.value} cannot be loaded: {error}"
        ) from error


def _find_entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}
