"""Mutants drawn at random: one line of the package each, and the tests that execute it.

A table of mutants that people wrote measures the lines that they thought of. These are drawn by a seed from all that
runs in production: a call whose value nobody takes is left out, a comparison or `and`/`or` is turned, `min` becomes
`max`. What only tells people something (logs, notes, sentences of errors) is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from xml.etree import ElementTree

import coverage

from tests.mutants.mutant import Mutant, find_definitions, find_fragment, parse_fragment, put, walk_around

ROOT = Path(__file__).parents[2]
COVERAGE = ROOT / "build" / "coverage"
LONGEST_S = 180.0  # of tests that one mutant meets, as long as they took under `make coverage`
UNSEEN = {  # by coverage: files that run as copies, and what numba compiles; with what runs them
    "templates": "tests/unit/commands/test_templates.py",
    "kernels.py": "tests/unit/outer",
}
UNITS = "tests/unit/"
SETUP = " (setup)"  # of a test, in which a line was executed: in a process that was started then, or a fixture
PHASE = re.compile(r" \((setup|call|teardown)\)$")
LEFT_OUT = ("demo", "page", "sim", "study", "generated")  # rooms of dips/ from which nothing is drawn
TELLS = frozenset(  # calls for people, who are no test
    (
        *("debug", "info", "warning", "error", "exception", "log", "print", "warn"),
        *("emit_note", "record_mark", "remark", "append_line", "write_line"),
    )
)
TURNED: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
AGAINST: dict[type[ast.AST], str] = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<"}
CLOCKS = frozenset(("monotonic", "perf_counter", "time", "now", "_now"))  # no test can stand on the edge of a reading
WORDS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def draw_mutants(count: int, seed: int, executing: ExecutingTests) -> list[Mutant]:
    """Draw `count` mutants of different places; for a seed the same ones, but where code has changed or is new."""
    places = _find_places() if count else []
    chosen = sorted(places, key=lambda place: place.draw_lot(seed))[:count]
    return [_mutant(place, executing.of(place.path, place.areas, place.is_called)) for place in chosen]


class ExecutingTests:
    """Which tests of `make test` execute a line, and their seconds, as `make coverage` noted them."""

    def __init__(self, directory: Path = COVERAGE) -> None:
        if not (notes := directory / "data").is_file():
            raise FileNotFoundError(f"{notes} is not there: run make coverage first")
        self._data = coverage.CoverageData(str(notes))
        self._data.read()
        self._noted = notes.stat().st_mtime
        cases = ElementTree.parse(directory / "tests.xml").iter("testcase")
        passed = (case for case in cases if not len(case))  # one that failed or was skipped holds what it met
        self._seconds = {f"{c.get('file')}::{c.get('name')}": float(c.get("time", "0")) for c in passed}
        self._by_file = defaultdict[str, set[str]](set)
        for test in self._seconds:
            self._by_file[test.partition("::")[0]].add(test)

    def of(self, path: Path, areas: Sequence[range], called: bool) -> list[str]:
        """Return the tests that execute the first of these areas of a file that any executes, LONGEST_S of them: those
        that are named for it first, then the units' of its room and of all rooms, then the others, of each file some.

        Files of tests that are newer than the notes are taken whole, also those that may execute it since: they import
        it. So are all that import a line that is not `called`: it runs once in a process.
        """
        if unseen := UNSEEN.get(path.parent.name) or UNSEEN.get(path.name):
            return [unseen]
        if path.stat().st_mtime > self._noted:
            raise ValueError(f"{path.relative_to(ROOT)} has changed since make coverage ran: run it again")
        contexts = self._data.contexts_by_lineno(str(path))
        noted = next(filter(None, (self._noted_in(contexts, lines) for lines in areas)), set())
        stem = path.stem.removesuffix("s")
        of_file = Counter[str]()
        near = f"{UNITS}{path.relative_to(ROOT / 'dips').parts[0]}/"
        ranked = list[tuple[bool, bool, bool, int, float, str]]()  # of each file the quickest, then of each the next
        for seconds, test in sorted((self._seconds[test], test) for test in noted):
            of_file[file := test.partition("::")[0]] += 1
            far = not test.startswith(near), not test.startswith(UNITS)
            ranked.append((stem not in test, *far, of_file[file], seconds, test))
        order = [test for *_, test in sorted(ranked)]
        took = accumulate(self._seconds[test] for test in order)
        tests = [test for test, total in zip(order, took, strict=True) if total < LONGEST_S]
        newer = _newer(self._noted)
        old = [test for test in tests if test.partition("::")[0] not in newer]
        importing = [test for test, text in (newer if called else _newer(0.0)).items() if _imports(text, path)]
        return [*importing, *old]

    def _noted_in(self, contexts: Mapping[int, Sequence[str]], lines: range) -> set[str]:
        return {test for line in lines for context in contexts.get(line, ()) for test in self._tests_of(context)}

    def _tests_of(self, context: str) -> set[str]:
        """Return the tests that see what was executed in a test: all of its file if a fixture did, which may be a
        module's.
        """
        test = PHASE.sub("", context)
        if context.endswith(SETUP):
            return self._by_file[test.partition("::")[0]]
        return {test} & self._seconds.keys()


@cache
def _newer(since: float) -> dict[str, str]:
    """The files of tests that were written after a time, and what is in them."""
    files = [test for test in sorted((ROOT / "tests").rglob("test_*.py")) if test.stat().st_mtime > since]
    return {str(test.relative_to(ROOT)): test.read_text() for test in files}


def _imports(text: str, path: Path) -> bool:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    parent, _, name = module.rpartition(".")
    forms = rf"^from {parent} import .*\b{name}\b|^(from|import) {module}\b"
    return name in text and re.search(forms, text, re.MULTILINE) is not None


@dataclass(frozen=True, slots=True)
class DrawnPlace:
    """A node that can be turned, in the definition of this name; `number` tells it from its like in there."""

    path: Path
    name: str
    node: ast.AST
    around: tuple[ast.AST, ...]
    new: str
    number: int

    @property
    def is_called(self) -> bool:
        """Whether it is in a function; else it runs on import."""
        return any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for n in self.around)

    @property
    def areas(self) -> list[range]:
        """Its lines, then those of the functions around it, from within: coverage does not see every line that is
        executed, as on gRPC's own threads, or after an `await` at a loop's head.
        """
        functions = [n for n in reversed(self.around) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [_lines_of(node) for node in (self.node, *functions)]

    def draw_lot(self, seed: int) -> bytes:
        """Return what depends on the seed and on this code alone, neither on its file nor on other code."""
        words = f"{seed} {self.name} {ast.unparse(self.node)} {self.new} {self.number}"
        return hashlib.blake2b(words.encode(), digest_size=8).digest()


def _lines_of(node: ast.AST) -> range:
    assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


@cache
def _find_places() -> list[DrawnPlace]:
    files = sorted((ROOT / "dips").rglob("*.py"))
    drawn = [path for path in files if not set(LEFT_OUT) & set(path.relative_to(ROOT).parts)]
    return [place for path in drawn for place in _places_of(path)]


def _places_of(path: Path) -> Iterator[DrawnPlace]:
    definitions = find_definitions(path)
    (tree,) = definitions[""]
    told = {id(node) for part in _told(tree) for node in ast.walk(part)}
    names = {id(one): name for name, found in definitions.items() for one in found}
    seen = Counter[tuple[str, str, str]]()
    for node, around in walk_around(tree):
        if id(node) not in told and (new := _turned(node)):
            name = next(names[id(one)] for one in (node, *reversed(around)) if id(one) in names)
            seen[like := (name, ast.unparse(node), new)] += 1
            yield DrawnPlace(path, name, node, around, new, seen[like])


def _told(tree: ast.AST) -> Iterator[ast.AST]:
    """What tells people something, and asserts: no test can or must see it."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                yield node
            case ast.Call(func=function) if _name(function) in TELLS:
                yield node
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node
            case ast.FunctionDef(name=name) if name.startswith(("explain_", "describe_", "__repr__")):
                yield node


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _turned(node: ast.AST) -> str:
    """The text that takes a node's place; empty if this one is not turned."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        return "" if isinstance(node.value, ast.Call) and _name(node.value.func) in TELLS else "pass"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        turned = TURNED | AGAINST if any(_reads_clock(part) for part in ast.walk(node)) else TURNED
        return f"({left} {turned[type(node.ops[0])]} {right})"
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        return "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WORDS:
        return WORDS[node.func.id] + ast.unparse(node)[len(node.func.id) :]
    return ""


def _reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and not node.args and _name(node.func) in CLOCKS


def _mutant(place: DrawnPlace, tests: Sequence[str]) -> Mutant:
    file, node = place.path.relative_to(ROOT), place.node
    where = ".".join([*file.relative_to("dips").with_suffix("").parts, place.name]).removesuffix(".")
    title = f"{file}:{place.areas[0].start}: {ast.unparse(node).splitlines()[0][:60]} → {place.new[:60]}"
    change = grow(node, place.new, place.around, find_definitions(place.path)[place.name])
    return Mutant(title, where, *change, shlex.join(tests))


def grow(node: ast.AST, new: str, around: tuple[ast.AST, ...], definitions: list[ast.AST]) -> tuple[str, str]:
    """A node and what becomes of it, with as much around it as stands once in some definitions."""
    made = parse_fragment(new)[0]
    for parent in reversed(around):
        stands = isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Slice | ast.Starred)
        if stands and len(find_fragment(ast.unparse(node), definitions)) == 1:
            break
        node, made = parent, put(parent, [node], [made])
    return ast.unparse(node), ast.unparse(made)
