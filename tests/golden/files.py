"""All golden files: where they are, and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.golden import frames, history, ledger, snapshot

DATA = Path(__file__).parent / "data"
MAKERS: Mapping[str, Callable[[], dict[str, bytes]]] = {
    "frames": frames.make,
    "snapshot": snapshot.make,
    "ledger": ledger.make,
    "history": history.make,
}


def different(made: Mapping[str, bytes]) -> list[str]:
    """Names of files that are not as they were."""
    return [name for name, raw in made.items() if not (DATA / name).exists() or (DATA / name).read_bytes() != raw]
