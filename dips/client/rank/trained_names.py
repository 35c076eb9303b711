"""The names of the parameters that the script trains: those with requires_grad when the loop was created, and no
others.

A parameter that is unfrozen or added later is not in the run's manifest: each cluster would train its own, without an
error. A parameter that is frozen later is still pushed and pulled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dips.client.parallel.tensors import plain_name
from dips.client.rank.collectives import JobCollectives
from dips.errors import ConfigError


class TrainedNames:
    """The names of one rank's trained parameters."""

    def __init__(self, parts: Sequence[nn.Module], collectives: JobCollectives) -> None:
        self._parts, self._collectives = parts, collectives
        self._known = self._list_names()

    def check_names(self) -> None:
        """Raise ConfigError, the same on all ranks, for a parameter that trains and is not shared. Collective."""
        added = min(self._list_names() - self._known, default="")
        (none,) = self._collectives.all_min([int(not added)])
        if none:
            return
        by_rank = [name.decode() for name in self._collectives.all_gather(added.encode())]
        raise ConfigError(
            f"{next(filter(None, by_rank))}: a parameter that was unfrozen or added after OuterLoop was made: it is "
            "trained here and not shared. Make the run (`dips init`) and the loop with requires_grad=True for all that "
            "will ever be trained, and freeze it afterwards until then"
        )

    def _list_names(self) -> set[str]:
        return {plain_name(name) for part in self._parts for name, p in part.named_parameters() if p.requires_grad}
