"""The ledger of a toy run, as the SQL that makes it: any version of SQLite reads it, and a person, too."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from pathlib import Path
from typing import get_args

from dips.master.ledger import Ledger
from dips.protocol.records import Record, RunRow
from tests.golden.toy import played, rounded
from tests.unit.protocol.scripted_run import MANIFEST

FILE = "ledger.sql"
OLD_FILE = "ledger8.sql"  # the same run, as format 8 had it; never written again
ROW = RunRow("golden", "c0ff1e", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (100.0,))
_LONG = re.compile(r"-?\d+\.\d{9,}(?:e[-+]?\d+)?")  # a number of more than nine digits
PRAGMAS = ("application_id", "user_version")  # what iterdump leaves out


def make() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.sqlite"
        ledger = Ledger.create(path, ROW)
        ledger.start_term()
        for effect in played().effects:
            if isinstance(effect, get_args(Record)):
                ledger.write_records([effect])
        ledger.close()
        return {FILE: dump(path)}


def dump(path: Path) -> bytes:
    db = sqlite3.connect(path)
    pragmas = [f"PRAGMA {name} = {db.execute(f'PRAGMA {name}').fetchone()[0]};" for name in PRAGMAS]
    text = "\n".join([*pragmas, *db.iterdump()]) + "\n"
    db.close()
    return _LONG.sub(lambda number: repr(rounded(float(number[0]))), text).encode()


def restore(sql: str, path: Path) -> None:
    """Make the file that a dump was taken of."""
    db = sqlite3.connect(path)
    db.executescript(sql)
    db.close()
