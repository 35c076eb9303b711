"""The files of a ledger's mirror, `<mirror>/<run>/master/ledger/`: bases and the transactions since.

    0000000003-0000000120.base   the ledger's file as it was in term 3, after the 120th transaction of that term
    0000000003-0000000121.log    the records of the 121st, encoded by codec.py, with their wall-clock time

Each begins with one line of JSON: format, run, and the length and xxh3-128 of the rest; a file that does not match its
line is incomplete and is not used. A ledger is the newest base of the newest term with every transaction that follows
it without a gap.
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
    """Return the newest term with a file in the mirror; 0 if there is none."""
    return max((int(found[1]) for found in map(_NAME.fullmatch, store.list_names(FOLDER)) if found), default=0)


def write_base(store: MirrorStore, run: str, term: int, number: int, content: bytes) -> None:
    """Write a base, then remove all files of this and earlier terms that it replaces."""
    name = f"{term:010d}-{number:010d}.base"
    store.write_file(f"{FOLDER}/{name}", _seal_content(run, content))
    for other in store.list_names(FOLDER):
        found = _NAME.fullmatch(other)
        if found and other != name and (int(found[1]), int(found[2])) <= (term, number):
            store.remove_path(f"{FOLDER}/{other}")


def write_transaction(store: MirrorStore, run: str, term: int, number: int, written: MirroredTransaction) -> None:
    """Write the file of one transaction."""
    content = json.dumps([written.wall, codec.encode_value(written.records)], separators=(",", ":")).encode()
    store.write_file(f"{FOLDER}/{term:010d}-{number:010d}.log", _seal_content(run, content))


def read_newest(store: MirrorStore, run: str) -> MirroredLedger | None:
    """Return the newest complete ledger in the mirror, None if there is none.

    A master that is cut off may still write there: if it replaces files meanwhile, they are read again. Raise Corrupt
    if a file is of another run, or cannot be decoded.
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
    """Return term and number of every base, the newest first."""
    found = [match for match in map(_NAME.fullmatch, store.list_names(FOLDER)) if match and match[3] == "base"]
    return sorted(((int(m[1]), int(m[2])) for m in found), reverse=True)


def _read_first(store: MirrorStore, run: str, bases: Sequence[tuple[int, int]]) -> MirroredLedger | None:
    """Return the first of these bases that is complete, with the transactions that follow it."""
    for term, number in bases:
        base = _read_sealed(store, run, f"{term:010d}-{number:010d}.base", MOST_BASE_BYTES)
        if base is not None:
            return MirroredLedger(term, base, tuple(_read_transactions(store, run, term, number)))
    return None


def _read_transactions(store: MirrorStore, run: str, term: int, number: int) -> Sequence[MirroredTransaction]:
    """Return all transactions that follow a base without a gap; the last one may be incomplete if its master ended."""
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
    """Return the content of a file; None if there is none, or it is incomplete."""
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
        return None  # incomplete within its first line
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
