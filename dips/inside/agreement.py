"""Refusals that are the same on all ranks of a job: what one rank cannot accept, no rank goes on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dips.errors import ConfigError, DipsError, Unavailable

Checked = TypeVar("Checked")


class Gathers(Protocol):
    """The collective that this needs."""

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message on all ranks, in rank order."""
        ...


def agree(collectives: Gathers, check: Callable[[], Checked]) -> Checked:
    """Return what `check` returns here; raise its ConfigError on all ranks if it refuses on one. What else it raises is
    raised on its rank, and Unavailable on the others. Collective.
    """
    checked: list[Checked] = []
    refusal, failed = "", None
    try:
        checked.append(check())
    except DipsError as error:
        refusal = str(error)
    except Exception as error:  # noqa: BLE001 (raised below: the other ranks wait in the collective)
        failed = error
    told = json.dumps([refusal, "" if failed is None else repr(failed)])
    by_rank = [json.loads(of) for of in collectives.all_gather(told.encode())]
    if failed is not None:
        raise failed
    for rank, (refused, failure) in enumerate(by_rank):
        if refused:
            raise ConfigError(refused)
        if failure:
            raise Unavailable(f"rank {rank} failed: {failure}")
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
