"""Grouping of parameters into layers of the manifest, by their names alone: keys of the section `shared`."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from dips.dataclass import dataclass
from dips.protocol.enums import LayerUnit

AVERAGED_LAYER = "<buffers>"  # the layer of shared buffers; no path of a module has this form


@dataclass(frozen=True, slots=True)
class Grouping:
    """`shared.layers` and `shared.share_buffers`."""

    layers: LayerUnit = LayerUnit.BLOCK
    share_buffers: tuple[str, ...] = ()  # patterns of names of buffers; their layer is the last

    def layer_of(self, name: str) -> str:
        """Return the layer of a parameter or a shared buffer."""
        if is_shared_buffer(name, self.share_buffers):
            return AVERAGED_LAYER
        return block_of(name) if self.layers is LayerUnit.BLOCK else module_of(name)


PLAIN_GROUPING = Grouping()


def is_shared_buffer(name: str, share_buffers: Iterable[str]) -> bool:
    """Whether `shared.share_buffers` has a pattern for this name. No parameter may match: the adapter refuses it."""
    return any(fnmatchcase(name, pattern) for pattern in share_buffers)


def block_of(parameter: str) -> str:
    """Return the path of a parameter up to and with the first number, else its module."""
    parts = parameter.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return module_of(parameter)


def module_of(parameter: str) -> str:
    """Return the path of the module that holds a parameter; the parameter's own name if it is the model's."""
    return parameter.rpartition(".")[0] or parameter
