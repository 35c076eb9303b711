"""`dips seed` begins a run at a master that has no ledger: the same run as `dips init` makes, or none."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dips.errors import ConfigError, CorruptManifest, RemoteProtocolError, UnavailableMaster
from dips.master.genesis import INITIAL_SHARED, INITIAL_VERSION, ledger_path, make_run
from dips.master.ledger import Ledger
from dips.master.waiting import ASIDE, ModelAwaiting, begin_run, check_repeated, propose_run
from dips.protocol.grouping import PLAIN_GROUPING
from tests.unit.master.test_genesis import model, run_file


def wall() -> float:
    return 0.0


def test_the_run_is_the_one_that_dips_init_makes(tmp_path: Path) -> None:
    """Digests, norms, placement and targets alike; only the model's bytes are not at the master."""
    made = make_run(run_file(tmp_path / "init"), model())
    config = run_file(tmp_path / "seed")
    (tmp_path / "seed" / ASIDE).mkdir(parents=True)  # of a master that died over it
    assert begin_run(config, propose_run(model(), PLAIN_GROUPING), wall) == made
    ledger = Ledger.open(ledger_path(config), readonly=True)
    assert ledger.run_row() == made
    ledger.close()
    assert (tmp_path / "seed" / INITIAL_SHARED).exists() and not (tmp_path / "seed" / INITIAL_VERSION).exists()
    assert not (tmp_path / "seed" / ASIDE).exists()


def test_nobody_is_told_to_seed_what_has_its_ledger(tmp_path: Path) -> None:
    """From Begin until the master serves is a moment, in which it answers still."""
    config = run_file(tmp_path)
    waiting = ModelAwaiting(config)
    with pytest.raises(UnavailableMaster, match="run 'toy' waits for the first model: run `dips seed`"):
        waiting.put_event(None)
    begin_run(config, propose_run(model(), PLAIN_GROUPING), wall)
    with pytest.raises(UnavailableMaster, match="run 'toy' begins: its master cannot be reached for a moment"):
        waiting.put_event(None)


def test_a_run_begins_once(tmp_path: Path) -> None:
    """The same model again is no news, another one is refused by the names of its layers."""
    config, proposed = run_file(tmp_path), propose_run(model(), PLAIN_GROUPING)
    row = begin_run(config, proposed, wall)
    check_repeated(row, proposed)
    other = model()
    other["layers.0.b"] = other["layers.0.b"] + 1
    with pytest.raises(ConfigError, match=r"got another: they differ in layers\.0; a new run"):
        check_repeated(row, propose_run(other, PLAIN_GROUPING))
    with pytest.raises(ConfigError, match="a ledger is here already"):
        begin_run(config, proposed, wall)


def spelled(text: str) -> dict[str, Any]:
    """The changes that make a proposal of this manifest."""
    return {"packed": zlib.compress(text.encode()), "digest": hashlib.sha256(text.encode()).hexdigest()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"genesis": ("0" * 32,)}, "expected 4 digests and norms, got 1 and 4"),
        ({"genesis": ("x" * 32,) * 4}, "32 hexadecimal digits"),
        ({"genesis_norms": (float("inf"),) * 4}, "finite"),
        (spelled('{"format": 1, "layers": []}'), "manifest"),
        (spelled('{"format": 1, "layers": [{"name": "a", "parameters": [["b.w", [2]]]}]}'), "groups parameters"),
        ({"packed": b"junk"}, "cannot be unpacked"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Before anything is written."""
    proposed = replace(propose_run(model(), PLAIN_GROUPING), **changes)
    with pytest.raises((RemoteProtocolError, CorruptManifest), match=said):
        begin_run(run_file(tmp_path / "m"), proposed, wall)
    assert not (tmp_path / "m").exists()


def test_more_slaves_than_layers(tmp_path: Path) -> None:
    """Refused as `dips init` does."""
    with pytest.raises(ConfigError):
        begin_run(run_file(tmp_path / "m", slaves=9), propose_run(model(), PLAIN_GROUPING), wall)
    assert not ledger_path(run_file(tmp_path / "m")).exists()
