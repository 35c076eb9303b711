"""`dips history`: what operators did, and what was tuned among the rounds; as a table and as JSON."""

from __future__ import annotations

import io
import json
import math
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dips import cli
from dips.commands.history import draw_audit
from dips.ids import PushId
from dips.master.ledger import Ledger
from dips.protocol.enums import OutcomeKind, RoundResult
from dips.protocol.options import TunedOption
from dips.protocol.records import (
    ClusterQuarantined,
    OperatorActed,
    OptionsTuned,
    OutcomeRow,
    RoundEnded,
    RoundReserved,
    RunRow,
)
from tests.run_files import write_run_file
from tests.typed import type_dips

ROWS = (
    OperatorActed("alice.operator", "tune", "outer.lr=0.5", "done", False, 1e9),
    OperatorActed("eve.viewer", "drain", "slave-0", "is for operator or slave", True, 1e9 + 61, 7),
)


@pytest.fixture(name="run_file")
def made_run_file(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    row = RunRow("r", "c0ff1e", '{"format": 1, "layers": []}', (("s", (0,)),), ("0" * 32,), (1.0,))
    ledger = Ledger.create(tmp_path / "m" / "ledger.sqlite", row)
    ledger.start_term()
    changes = (TunedOption("outer.lr", 0.5), TunedOption("timing.window_s", 0.0, off=True))
    ledger.write_records([OptionsTuned(changes, 1.0), ROWS[0], ClusterQuarantined("west", "why", 2.0), ROWS[1]])
    ledger.close()
    return write_run_file(tmp_path, ["s"])


def test_a_push_that_was_not_finite_is_json(run_file: Path) -> None:
    """Its norm was printed as `Infinity`, which is none: jq ended there, with all rounds behind it unread."""
    outcome = OutcomeRow(PushId("west", 1, 1), OutcomeKind.GATED, "not finite", 7, 4, math.inf, math.inf, ())
    with closing(Ledger.open(run_file.parent / "m" / "ledger.sqlite")) as ledger:
        ledger.write_records([RoundReserved(1, 0.0)])
        ledger.write_records([RoundEnded(1, RoundResult.UNCHANGED, "all were gated", (outcome,), (), 0.0)])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    *_, told = type_dips("history", "-c", str(run_file), "--json").splitlines()
    (push,) = json.loads(told, parse_constant=refuse)["outcomes"]
    assert push["norm"] is push["score"] is None and push["kind"] == "gated" and push["reason"] == "not finite"


def test_the_audit_is_listed(run_file: Path) -> None:
    said = [json.loads(line) for line in type_dips("history", "-c", str(run_file), "--audit", "--json").splitlines()]
    assert [OperatorActed(**row) for row in said] == list(ROWS)
    assert [row["caller"] for row in said] == ["alice.operator", "eve.viewer"]
    newest = type_dips("history", "-c", str(run_file), "--audit", "--json", "--last", "1")
    assert json.loads(newest)["action"] == "drain"
    out = io.StringIO()
    Console(file=out, width=120).print(draw_audit(ROWS))
    text = " ".join(out.getvalue().split())
    assert "2001-09-09 01:46:40 alice.operator tune outer.lr=0.5" in text
    assert "before it 7 requests that changed nothing, without rows" in text


def test_what_was_tuned_stands_among_the_rounds(run_file: Path) -> None:
    said = [json.loads(line) for line in type_dips("history", "-c", str(run_file), "--json").splitlines()]
    assert [(row["kind"], row["key"], row["value"]) for row in said] == [
        ("tuned", "outer.lr", 0.5),
        ("tuned", "timing.window_s", None),
    ]
    assert "timing.window_s = off" in type_dips("history", "-c", str(run_file))


def test_what_looks_says_json(run_file: Path) -> None:
    """Empty, but the names are there."""
    assert json.loads(type_dips("plot", "-c", str(run_file), "--json")) == {"pushes": [], "results": []}
    (run_file.parent / "s").mkdir()
    said = json.loads(CliRunner().invoke(cli.cli, ["verify", "-c", str(run_file), "--json"]).stdout)
    assert said.keys() == {"intact", "verdict", "slaves"} and said["intact"]
