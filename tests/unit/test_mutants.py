"""The table of mutants is sound: every anchor holds, names are unique, and the tests exist."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.drawing import draw_mutants, widened
from tests.mutants.mutant import EQUIVALENT, LostAnchor, Mutant, apply, locate
from tests.mutants.tables import MUTANTS

ROOT = Path(__file__).parents[2]
LEAST = 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    """Its old text stands once where it says; what takes its place is Python, and not the same."""
    path = locate(mutant, ROOT)
    changed = path.read_text().replace(mutant.old, mutant.new)
    assert changed != path.read_text()
    compile(changed, str(path), "exec")


def test_the_table_is_one_that_can_be_run() -> None:
    """Names tell mutants apart; selections are files and directories that exist; an equivalent one says why."""
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []
    for mutant in MUTANTS:
        if mutant.equivalent:
            assert len(mutant.tests) > len(EQUIVALENT) + 20
        else:
            assert [p for p in shlex.split(mutant.tests) if not (ROOT / p.partition("::")[0]).exists()] == []


def test_a_lost_anchor_is_loud(tmp_path: Path) -> None:
    """No place, or two, is an error that says where the text stands."""
    (tmp_path / "dips" / "room").mkdir(parents=True)
    (tmp_path / "dips" / "a.py").write_text("x = 1\n")
    (tmp_path / "dips" / "room" / "b.py").write_text("y = 2\ny = 2\n")
    with pytest.raises(
        LostAnchor, match=r"'x = 1' must stand once in dips/room, got nowhere; in the package: dips/a\.py"
    ):
        locate(Mutant("m", "dips/room", "x = 1", "x = 2", "tests"), tmp_path)
    with pytest.raises(LostAnchor, match=r"got dips/room/b\.py, dips/room/b\.py"):
        locate(Mutant("m", "dips", "y = 2", "y = 3", "tests"), tmp_path)
    assert apply(Mutant("m", "dips", "x = 1", "x = 2", "tests"), tmp_path).read_text() == "x = 2\n"


def test_drawn_mutants_apply_and_are_the_same_for_a_seed() -> None:
    """Each is Python, changes its file, and has tests that exist; what tells people something is not drawn."""
    drawn = draw_mutants(40, 7)
    assert [m.name for m in drawn] == [m.name for m in draw_mutants(40, 7)] != [m.name for m in draw_mutants(40, 8)]
    for mutant in drawn:
        path = locate(mutant, ROOT)
        changed = path.read_text().replace(mutant.old, mutant.new)
        assert changed != path.read_text() and "emit_note" not in mutant.name
        compile(changed, str(path), "exec")
        words = shlex.split(mutant.tests) + shlex.split(widened(mutant).tests)
        assert [word for word in words if not word.startswith("-") and not (ROOT / word).exists()] == []
