"""The table of mutants is sound: every change applies, names are unique, and the tests exist."""

from __future__ import annotations

import ast
import os
import shlex
from collections import Counter
from pathlib import Path

import coverage
import pytest

from tests.mutants.drawing import LONGEST_S, ExecutingTests, draw_mutants
from tests.mutants.mutant import EQUIVALENT, LostAnchor, Mutant, apply, find_definitions, mutate
from tests.mutants.tables import MUTANTS, read_table

ROOT = Path(__file__).parents[2]
LEAST = 600


def _why_lost(mutant: Mutant) -> str:
    """Return why a mutant does not apply any more; "" if it does."""
    try:
        path, changed = mutate(mutant, ROOT)
        compile(_what_differs(path, changed), str(path), "exec", annotations.compiler_flag)
    except (LostAnchor, SyntaxError) as error:
        return str(error)
    return ""


def _what_differs(path: Path, changed: str) -> str:
    """Return the statements of a module's top level in which a text differs from the file: all else compiles."""
    before, after = path.read_text().split("\n"), changed.split("\n")
    first = next(at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    last = next(at for at, (old, new) in enumerate(zip(before[::-1], after[::-1], strict=False)) if old != new)
    (module,) = find_definitions(path)[""]
    assert isinstance(module, ast.Module)
    spans = [(min(n.lineno for n in (s, *getattr(s, "decorator_list", ()))) - 1, s.end_lineno) for s in module.body]
    begin = max(begin for begin, _ in spans if begin <= first)
    end = min(end for _, end in spans if end and end >= len(before) - last)
    return "\n".join(after[begin : end + len(after) - len(before)])


def test_every_mutant_still_applies() -> None:
    """Its fragment stands once in its place; the module with the change is Python, and another program."""
    assert {mutant.name: why for mutant in MUTANTS if (why := _why_lost(mutant))} == {}


def test_the_table_is_one_that_can_be_run() -> None:
    """Names tell mutants apart; selections are files and directories that exist; an equivalent one says why."""
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []
    for mutant in MUTANTS:
        if mutant.equivalent:
            assert len(mutant.tests) > len(EQUIVALENT) + 20
        else:
            assert [p for p in shlex.split(mutant.tests) if not (ROOT / p.partition("::")[0]).exists()] == []


@pytest.mark.parametrize(
    ("old", "new", "source", "changed"),
    [
        ("x < ...", "x <= ...", "if x < y + 1: z()", "if x <= y + 1: z()"),
        ("a", "", "b = a and c and d", "b = c and d"),
        ("a", "", "b = c and a", "b = c"),
        ("f(...)", "", "for x in y: f(x, key=1)", "for x in y: pass"),
        ("await f()", "pass", "async def g():\n  await f()", "async def g():\n  pass"),
        ("g(y, ...)", "h(...)", "f(g(y, z, *b, key=c))", "f(h(z, *b, key=c))"),
        ("g(key=1, *...)", "g(key=2, *...)", "f(g(*b, key=1))", "f(g(*b, key=2))"),
        ("f(...); g()", "f(...)", "f(x); g(); f(y); h()", "f(x); f(y); h()"),
        ("with f(x): ...", "if True: ...", "with f(x):\n  a()\n  b()", "if True:\n  a()\n  b()"),
        ("'b c'", "'b d'", "x = 'a b c'", "x = 'a b d'"),
        ("1", "2", "if x: y = 1\nelif f'{z:{1}}': y = 3", None),
        ("z", "a", "x = f'{z} b'", "x = f'{a} b'"),
        ("0", "n", "x = y[0:3]", "x = y[n:3]"),
        ("if z: ...", "", "if x:\n  y()\nelif z:\n  f()", "if x:\n  y()\nelse:\n  pass"),
        ("r", "", "x = [y for y in z if r if q]", "x = [y for y in z if q]"),
        ("f(...)", "f(..., 1)", "f()", "f(1)"),
    ],
)
def test_a_change(tmp_path: Path, old: str, new: str, source: str, changed: str | None) -> None:
    """`...` stands for whatever is there, what is left out leaves valid Python, and all else stays as it was."""
    (tmp_path / "dips").mkdir()
    path = tmp_path / "dips" / "a.py"
    path.write_text(source)
    mutant = Mutant("m", "a", old, new, "tests")
    if changed is None:
        with pytest.raises(LostAnchor, match=r"must stand once in a, got dips/a\.py:1, dips/a\.py:2"):
            apply(mutant, tmp_path)
        assert path.read_text() == source
    else:
        assert apply(mutant, tmp_path) == path
        assert ast.dump(ast.parse(path.read_text())) == ast.dump(ast.parse(changed))


def test_what_does_not_matter_to_a_place(tmp_path: Path) -> None:
    """Line breaks, comments, the same text in another function, and a module that moved change nothing."""
    (tmp_path / "dips" / "room").mkdir(parents=True)
    mutant = Mutant("m", "room.a.Door.close", "len(x) > 1", "False", "tests")
    (tmp_path / "dips" / "room" / "a.py").write_text(
        "def close(x):\n    return len(x) > 1\n"
        "class Door:\n    def close(self, x):\n        if (len(  # how many\n            x) > 1):\n            pass\n"
    )
    path, changed = mutate(mutant, tmp_path)
    assert changed.split("class Door:\n")[1] == "    def close(self, x):\n        if ((False)):\n            pass\n"
    moved = path.rename(tmp_path / "dips" / "b.py")
    assert mutate(mutant, tmp_path) == (moved, changed)


def test_a_lost_anchor_is_loud(tmp_path: Path) -> None:
    """No place, or two, is an error that says where the fragment stands."""
    (tmp_path / "dips" / "room").mkdir(parents=True)
    (tmp_path / "dips" / "room" / "b.py").write_text("def f(): y = 2; y = 2; z = 3\n")
    with pytest.raises(LostAnchor, match=r"'y = 2' must stand once in room\.b\.f, got dips/room/b\.py:1, dips/room/b"):
        mutate(Mutant("m", "room.b.f", "y = 2", "y = 3", "tests"), tmp_path)
    with pytest.raises(LostAnchor, match=r"'y = 4' must stand once in room\.b\.f, got nowhere"):
        mutate(Mutant("m", "room.b.f", "y = 4", "y = 3", "tests"), tmp_path)
    with pytest.raises(LostAnchor, match=r"room\.b\.g must be defined once in dips, got nowhere"):
        mutate(Mutant("m", "room.b.g", "y = 2", "y = 3", "tests"), tmp_path)
    with pytest.raises(LostAnchor, match="a mutant must change something, got '3' as it was"):
        mutate(Mutant("m", "room.b.f", "3", "3", "tests"), tmp_path)
    with pytest.raises(LostAnchor, match="cannot be left out"):
        mutate(Mutant("m", "room.b.f", "3", "", "tests"), tmp_path)
    for name in ("c", "d"):
        (tmp_path / "dips" / "room" / f"{name}.py").write_text("def g(): y = 2\n")
    with pytest.raises(LostAnchor, match=r"must be defined once in dips, got dips/room/c\.py, dips/room/d\.py"):
        mutate(Mutant("m", "room.b.g", "y = 2", "y = 3", "tests"), tmp_path)


def test_a_line_that_is_no_mutant_is_refused() -> None:
    """A table says at which line it is wrong; several lines of tests are one selection."""
    head = "# words\ntests/a.py\ntests/b.py\nroom.f\n"
    assert list(read_table(head + "    a name: x → y\n    another: without x\n")) == [
        Mutant("a name", "room.f", "x", "y", "tests/a.py tests/b.py"),
        Mutant("another", "room.f", "x", "", "tests/a.py tests/b.py"),
    ]
    for table in (head + "    a name: x\n", head + "    a name x → y\n", "tests/a.py\n    a name: x → y\n"):
        with pytest.raises(ValueError, match=f"t.txt:{table.count(chr(10))}: a mutant must be"):
            list(read_table(table, "t.txt"))


def _note(directory: Path, contexts: dict[str, dict[Path, list[int]]], seconds: dict[str, float]) -> ExecutingTests:
    data = coverage.CoverageData(str(directory / "data"))
    for context, lines in contexts.items():
        data.set_context(context)
        data.add_lines({str(path): numbers for path, numbers in lines.items()})
    data.write()
    data.close()
    cases = "".join(
        f'<testcase file="{test.partition("::")[0]}" name="{test.partition("::")[2]}" time="{time}"/>'
        for test, time in seconds.items()
    )
    skipped = '<testcase file="tests/c.py" name="t" time="0"><skipped/></testcase>'
    (directory / "tests.xml").write_text(f"<testsuites><testsuite>{cases}{skipped}</testsuite></testsuites>")
    return ExecutingTests(directory)


def test_a_drawn_mutant_meets_what_executes_its_line(tmp_path: Path) -> None:
    """Tests named for the file, then units', then others, as long as three minutes; what failed finds nothing. What a
    fixture's process executed is looked at by any test of its file.
    """
    path, other = ROOT / "dips" / "ids.py", ROOT / "dips" / "errors.py"
    names = (
        "tests/a.py::slow",
        "tests/a.py::t[x (y)]",
        "tests/unit/b.py::t",
        "tests/unit/test_ids.py::t",
        "tests/c.py::t",
    )
    contexts = {f"{name} (call)" if name.startswith("tests/unit/b") else name: {path: [3, 4]} for name in names}
    seconds = dict(zip(names, (LONGEST_S, 2.0, 2.5, 3.0), strict=False))
    executing = _note(tmp_path, contexts | {"tests/unit/test_config.py::t": {other: [3], path: [5]}}, seconds)
    assert executing.of(path, [range(3, 5)], True) == [
        "tests/unit/test_ids.py::t",
        "tests/unit/b.py::t",
        "tests/a.py::t[x (y)]",
    ]
    assert "tests/unit/master/test_orders.py" in executing.of(path, [range(6, 7)], False), "it runs on import"
    (tmp_path / "fixture").mkdir()
    executing = _note(tmp_path / "fixture", {"tests/a.py::t[x (y)] (setup)": {path: [3]}}, seconds)
    areas = [range(9, 10), range(3, 4)]  # what no test executes meets those of what is around it
    assert executing.of(path, areas, True) == ["tests/a.py::t[x (y)]"], "the other one takes too long"
    executing = _note(tmp_path / "fixture", {"tests/a.py::t[x (y)] (setup)": {path: [3]}}, seconds | {names[0]: 4.0})
    assert executing.of(path, areas, True) == ["tests/a.py::t[x (y)]", "tests/a.py::slow"]
    os.utime(tmp_path / "data", (0, 0))
    with pytest.raises(ValueError, match=r"dips/ids\.py has changed since make coverage ran: run it again"):
        ExecutingTests(tmp_path).of(path, [range(3, 5)], True)
    with pytest.raises(FileNotFoundError, match="run make coverage first"):
        ExecutingTests(tmp_path / "nowhere")


@pytest.mark.slow
def test_drawn_mutants_apply_and_are_the_same_for_a_seed(tmp_path: Path) -> None:
    """Each is another program; what tells people something is not drawn."""
    executing = _note(tmp_path, {"tests/a.py::t": {ROOT / "dips" / "ids.py": [1]}}, {"tests/a.py::t": 1.0})
    drawn, again, other = (draw_mutants(40, seed, executing) for seed in (7, 7, 8))
    assert [m.name for m in drawn] == [m.name for m in again] != [m.name for m in other]
    for mutant in drawn:
        assert not _why_lost(mutant)
        assert "emit_note" not in mutant.name
