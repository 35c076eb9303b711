"""The ledger of a toy run, as the SQL that makes it: any version of SQLite reads it, and a person, too."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

from dips.master.ledger import Ledger
from dips.protocol.records import Record, RunRow
from tests.golden.toy import played, rounded
from tests.unit.protocol.scripted_run import MANIFEST

FILE = "ledger.sql"
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
                ledger.write_records([_rounded_record(effect)])
        ledger.close()
        return {FILE: dump(path)}


def dump(path: Path) -> bytes:
    db = sqlite3.connect(path)
    pragmas = [f"PRAGMA {name} = {db.execute(f'PRAGMA {name}').fetchone()[0]};" for name in PRAGMAS]
    text = "\n".join([*pragmas, *db.iterdump()]) + "\n"
    db.close()
    return text.encode()


def _rounded_record(value: Any) -> Any:
    """The same with rounded numbers; of what is printed before it is written, the chain has a hash."""
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, str):
        return type(value)(_LONG.sub(lambda number: repr(rounded(float(number[0]))), value))
    if isinstance(value, tuple):
        return tuple(map(_rounded_record, value)) if type(value) is tuple else value
    if is_dataclass(value) and not isinstance(value, type):
        kept = {field.name: _rounded_record(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **kept)
    return value


def restore(sql: str, path: Path) -> None:
    """Make the file that a dump was taken of."""
    db = sqlite3.connect(path)
    db.executescript(sql)
    db.close()
