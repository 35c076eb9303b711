"""Refusals that are the same on all ranks of a job: what one rank cannot accept, no rank goes on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dips.errors import ConfigError, DipsError

Checked = TypeVar("Checked")


class Gathers(Protocol):
    """The collective that this needs."""

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message on all ranks, in rank order."""
        ...


def agree(collectives: Gathers, check: Callable[[], Checked]) -> Checked:
    """Return what `check` returns here; raise its ConfigError on all ranks if it fails on one. Collective."""
    checked: list[Checked] = []
    error = ""
    try:
        checked.append(check())
    except DipsError as refused:
        error = str(refused)
    told = next((of.decode() for of in collectives.all_gather(error.encode()) if of), "")
    if told:
        raise ConfigError(told)
    return checked[0]


def compare(collectives: Gathers, what: str, mine: Mapping[str, Any], groups: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError, the same on all ranks, if ranks of one group hold different values. Collective."""
    spelled = json.dumps(mine, sort_keys=True).encode()
    digests = collectives.all_gather(hashlib.sha256(spelled).digest())
    if all(digests[rank] == digests[group[0]] for group in groups for rank in group):
        return
    told = [json.loads(one) for one in collectives.all_gather(spelled)]
    for group in groups:
        first = told[group[0]]
        for rank in group:
            for key in sorted({*first, *told[rank]}):
                if first.get(key) != told[rank].get(key):
                    raise ConfigError(f"ranks {group[0]} and {rank} differ in {what}: {key}")
