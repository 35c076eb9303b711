"""Public keys of the ranks of a push or pull, named by their cluster with its request and admitted by slaves.

Rank r uses the key at place r on every lane (docs/guides/certificates.md#lanes). Keys are in Z85, libzmq's encoding.
Unencrypted lanes, on loopback, need none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KEY_CHARS = 40  # for 32 bytes
TRANSFER_RANKS = 256  # of a cluster that move bytes; in a larger job others hand theirs to one on their host
MOST_KEYS = 16_384  # keys that are read for one transfer: 672 kB
MOST_FLIP_KEYS = 20_480  # of all pulls that one Commit opens: 860 kB of an order's 1 MiB; other clusters ask

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def is_key(key: str) -> bool:
    """Whether this is a public key in Z85."""
    return _KEY.fullmatch(key) is not None


def find_wrong_keys(keys: Sequence[str], ranks: int, needed: bool) -> str:
    """Return why these cannot be the keys of `ranks` ranks; "" if they can.

    needed  lanes are encrypted; otherwise no keys are legal as well
    """
    if not keys and not needed:
        return ""
    if not keys:
        return f"keys: expected {ranks}, one for each rank, got none: the lanes of this run are encrypted"
    if len(keys) != ranks or len(keys) > MOST_KEYS:
        return f"keys: expected one for each of {ranks} ranks, at most {MOST_KEYS}, got {len(keys)}"
    wrong = next((rank for rank, key in enumerate(keys) if not is_key(key)), None)
    return (
        "" if wrong is None else f"keys: rank {wrong}: expected {KEY_CHARS} characters of Z85, got {keys[wrong]!r:.60}"
    )
