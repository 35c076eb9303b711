"""Public keys of the ranks of a push or pull: what their cluster names with its request, and slaves admit for it.

Rank r shows the key at place r on every lane (docs/guides/certificates.md#lanes). Keys are Z85, as libzmq spells them.
Plain lanes, on loopback, ask for none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KEY_CHARS = 40  # of 32 bytes
TRANSFER_RANKS = 256  # of a cluster that move bytes; in a larger job the others hand theirs to one on their host
MOST_KEYS = 16_384  # of one transfer, that are read: 672 kB
MOST_FLIP_KEYS = 131_072  # of all pulls that one Commit opens: 5.5 MB of a message that may have 16; the rest ask

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def is_key(key: str) -> bool:
    """Whether it is spelled as a public key."""
    return _KEY.fullmatch(key) is not None


def find_wrong_keys(keys: Sequence[str], ranks: int, needed: bool) -> str:
    """Say why these cannot be the keys of `ranks` ranks; "" if they can.

    needed  lanes are encrypted; otherwise no key at all is right as well
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
