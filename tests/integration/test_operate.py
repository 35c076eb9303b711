"""Operators and a run that goes on: who did what, options tuned, a cluster quarantined, and one that is taken from the
list `clusters` in the middle of its work, without a restart."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dips.master.journal import replay_journal
from tests.integration import cluster_harness as harness
from tests.integration.test_mistakes import CLI, type_words
from tests.integration.test_secured_run import type_enrolment
from tests.integration.train_constant import tensors

TINY = str(Path(__file__).parent / "train_tiny.py")
LOADED_S = 10.0  # 0.6 s on a machine that is not busy: two heartbeats of a run are 4 s
NAMES = (
    *(("master", "master"), ("ps0", "slave"), ("west", "cluster"), ("east", "cluster")),
    *(("operator", "operator"), ("eve", "viewer")),
)


@pytest.fixture(name="run")
def secured_run(tmp_path: Path) -> Iterator[harness.Run]:
    security = type_enrolment(tmp_path, NAMES)
    with harness.Run(tmp_path, tensors(), shared={"penalty": {"gates": []}}, slaves=1, security=security) as run:
        yield run


def edit_run_file(run: harness.Run, **keys: Any) -> None:
    run.file.write_text(yaml.safe_dump({**yaml.safe_load(run.file.read_text()), **keys}))


def say(*words: str, code: int = 0) -> str:
    got, said = type_words(*CLI, *words)
    assert got == code, said
    return said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_is_operated_without_a_restart(run: harness.Run, tmp_path: Path) -> None:
    """Tuned numbers stand in the next version's row; who is expelled is gone within two heartbeats; the rest trains."""
    master = run.start_master()
    run.start_slaves()
    west, east = (
        run.start_cluster(name, [sys.executable, TINY, "steps", str(tmp_path / f"{name}.out")], steps=20)  # 0.4 s
        for name in ("west", "east")
    )
    config, viewer = ("--config", str(run.file)), str(tmp_path / "certs" / "eve.viewer.crt")
    with run.ledger() as ledger:
        run.until(lambda: len(ledger.read_history(100)) >= 2, 60, "two rounds")

        # an operator tunes, a viewer may not, and both are known by name
        said = say("set", "outer.lr=0.5", "timing.window_s=0.2", *config)
        assert "outer.lr = 0.5, from the next Apply" in said
        assert json.loads(say("set", "--json", *config)) == {"outer.lr": 0.5, "timing.window_s": 0.2}
        say("set", "outer.lr=0.1", "--master", run.address, "--credentials", viewer, code=77)
        at = len(ledger.read_history(1000))
        run.until(lambda: len(ledger.read_history(1000)) >= at + 3, 60, "three more rounds")
        assert ledger._db.execute("SELECT lr FROM versions ORDER BY round DESC LIMIT 1").fetchone() == (0.5,)

        # quarantined: gated with the reason, and released
        say("cluster", "quarantine", "east", "--reason", "a look at its data", *config)
        reason = "quarantined by an operator: a look at its data"
        run.until(lambda: any(o.reason == reason for r in ledger.read_history(9) for o in r.outcomes), 60, "a gate")
        assert json.loads(say("status", "--json", *config))["clusters"]["east"]["quarantine"] == "a look at its data"
        say("cluster", "readmit", "east", *config)

        # taken from the list: its lease ends at once, its agent is told and ends, west trains on
        edit_run_file(run, clusters=["west"], log_level="debug")
        since = time.monotonic()
        ended = "SELECT count(*) FROM incarnations_ended WHERE cluster = 'east' AND reason LIKE 'clusters: expected%'"
        run.until(lambda: ledger._db.execute(ended).fetchone() == (1,), LOADED_S, "east is expelled")
        took_s = time.monotonic() - since
        run.wait(east, 30, code=77)
        print(f"expelled after {took_s:.2f} s")
        at = len(ledger.read_history(1000))
        run.until(lambda: len(ledger.read_history(1000)) >= at + 3, 60, "west trains on")

        # a certificate is revoked
        say("certs", "revoke", str(tmp_path / "ca"), "west.cluster")
        run.wait(west, 30, code=77)
        run.until(lambda: master.log.read_text().count("cluster expelled") == 2, 10, "both are expelled")
        assert master.code is None
        audit = ledger.read_audit()
    master.terminate()
    replayed = replay_journal(tmp_path / "master")
    assert not any(one.differs or one.other_code for one in replayed), "the same requests are decided in the same way"
    told = [(row.caller, row.action, row.refused) for row in audit]
    assert told == [
        ("operator.operator", "tune", False),
        ("eve.viewer", "tune", True),
        ("operator.operator", "quarantine", False),
        ("operator.operator", "readmit", False),
        ("run file", "reload", False),
    ]
    lines = [json.loads(line) for line in say("history", "--audit", "--json", *config).splitlines()]
    assert [line["arguments"] for line in lines][:2] == ["outer.lr=0.5 timing.window_s=0.2", "outer.lr=0.1"]
    assert lines[-1]["arguments"] == "clusters: west; log_level: debug"
    table = say("history", "--audit", *config)
    assert "eve.viewer" in table and "got that of viewer" in " ".join(table.split())
    assert '"event": "event"' in master.log.read_text(), "debug lines, without a restart"
    ended = [line for line in master.log.read_text().splitlines() if "cluster expelled" in line]
    assert "a name of the run file's list" in ended[0] and "is revoked" in ended[1]
