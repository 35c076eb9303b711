"""Check of the distribution that owns the package `dips`: ours is `di-ps`; `dips` on PyPI is an astronomy project
with the same package and script. If both are installed, each has overwritten files of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from dips.errors import ConfigError

OURS, OTHERS = "di-ps", "dips"


def refuse_other_dips(path: Sequence[str] | None = None) -> None:
    """Raise ConfigError if the other project is installed beside this one; `path` is searched, None: sys.path."""
    found = metadata.distributions(name=OTHERS) if path is None else metadata.distributions(name=OTHERS, path=[*path])
    for other in found:
        where = other.locate_file("")
        raise ConfigError(
            f"{where} holds the distribution {OTHERS!r} {other.version}, another project with the same package and "
            f"script as Di-PS ({OURS!r}): files of one have overwritten files of the other. Uninstall both "
            f"(`pip uninstall {OTHERS} {OURS}`), then install {OURS} alone, or use an environment for each"
        )
