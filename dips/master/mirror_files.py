"""The files of a ledger's mirror, `<mirror>/<run>/master/ledger/`: bases and what was written since.

    0000000003-0000000120.base   the ledger's file as it was in term 3, after the 120th transaction of that term
    0000000003-0000000121.log    the records of the 121st, as codec.py spells them, with their wall-clock time

Each begins with one line of JSON: format, run, and the length and xxh3-128 of what follows; a file that does not agree
with its line was not written to its end, and is not believed. A ledger is the newest base of the newest term with every
transaction that follows it without a gap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import xxhash

from dips.errors import Corrupt
from dips.master.ledger_rebuild import MirroredLedger, MirroredTransaction
from dips.mirror import MirrorStore
from dips.protocol import codec

FORMAT = 1
FOLDER = "ledger"
MOST_LOG_BYTES = 256 << 20  # a transaction of a run with thousands of clusters has some MB
MOST_BASE_BYTES = 64 << 30
_NAME = re.compile(r"(\d{10})-(\d{10})\.(base|log)")


def newest_term(store: MirrorStore) -> int:
    """The newest term of which something lies there; 0 if nothing does."""
    return max((int(found[1]) for found in map(_NAME.fullmatch, store.list_names(FOLDER)) if found), default=0)


def write_base(store: MirrorStore, run: str, term: int, number: int, content: bytes) -> None:
    """Write a base, then remove everything of this and earlier terms that it replaces."""
    name = f"{term:010d}-{number:010d}.base"
    store.write_file(f"{FOLDER}/{name}", _seal_content(run, content))
    for other in store.list_names(FOLDER):
        found = _NAME.fullmatch(other)
        if found and other != name and (int(found[1]), int(found[2])) <= (term, number):
            store.remove_path(f"{FOLDER}/{other}")


def write_transaction(store: MirrorStore, run: str, term: int, number: int, written: MirroredTransaction) -> None:
    """Write what a transaction wrote."""
    content = json.dumps([written.wall, codec.encode_value(written.records)], separators=(",", ":")).encode()
    store.write_file(f"{FOLDER}/{term:010d}-{number:010d}.log", _seal_content(run, content))


def read_newest(store: MirrorStore, run: str) -> MirroredLedger | None:
    """Read the newest ledger that lies whole in the mirror, None if none does.

    A master that is cut off may still write there: what it replaces meanwhile is read again. Raise Corrupt if what is
    there is of another run, or cannot be read as what it says it is.
    """
    while True:
        bases = _list_bases(store)
        found = _read_first(store, run, bases)
        if bases == _list_bases(store):
            break
    if found is None and bases:
        raise Corrupt(f"{store.url}/{FOLDER}: none of its {len(bases)} bases is whole")
    return found


def _list_bases(store: MirrorStore) -> list[tuple[int, int]]:
    """Term and number of every base, the newest first."""
    found = [match for match in map(_NAME.fullmatch, store.list_names(FOLDER)) if match and match[3] == "base"]
    return sorted(((int(m[1]), int(m[2])) for m in found), reverse=True)


def _read_first(store: MirrorStore, run: str, bases: Sequence[tuple[int, int]]) -> MirroredLedger | None:
    """The first of these that is whole, with what follows it."""
    for term, number in bases:
        base = _read_sealed(store, run, f"{term:010d}-{number:010d}.base", MOST_BASE_BYTES)
        if base is not None:
            return MirroredLedger(term, base, tuple(_read_transactions(store, run, term, number)))
    return None


def _read_transactions(store: MirrorStore, run: str, term: int, number: int) -> Sequence[MirroredTransaction]:
    """All that follow a base without a gap; the last one may have been cut short by the end of its master."""
    followed = []
    while (content := _read_sealed(store, run, f"{term:010d}-{number + 1:010d}.log", MOST_LOG_BYTES)) is not None:
        wall, spelled = json.loads(content)
        followed.append(MirroredTransaction(codec.decode_value(spelled), wall))
        number += 1
    return followed


def _seal_content(run: str, content: bytes) -> bytes:
    head = {"format": FORMAT, "run": run, "bytes": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}
    return json.dumps(head).encode() + b"\n" + content


def _read_sealed(store: MirrorStore, run: str, name: str, most: int) -> bytes | None:
    """What a file holds; None if there is none, or it is not whole."""
    raw = store.read_file(f"{FOLDER}/{name}", most)
    if raw is None:
        return None
    line, _, content = raw.partition(b"\n")
    where = f"{store.url}/{FOLDER}/{name}"
    try:
        head = json.loads(line)
        whole = (len(content), xxhash.xxh3_128_hexdigest(content)) == (head["bytes"], head["xxh3"])
        written_by, of = head["format"], head["run"]
    except (ValueError, KeyError, TypeError):
        return None  # cut short within its first line
    if not whole:
        return None
    if written_by != FORMAT:
        raise Corrupt(
            f"{where}: expected a mirror of format {FORMAT}, got {written_by!r}; restore it with the Di-PS that "
            "wrote it, or begin a new run from its `dips export`"
        )
    if of != run:
        raise Corrupt(f"{where}: expected the ledger of run {run!r}, got one of {of!r}")
    return content
