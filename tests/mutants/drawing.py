"""Mutants drawn at random: one line of the package each, and the tests that should find it, the nearest first.

A table of mutants that people wrote measures the lines that they thought of. These are drawn by a seed from all that
runs in production: a call whose value nobody takes is left out, a comparison or `and`/`or` is turned, `min` becomes
`max`. What only tells people something (logs, notes, sentences of errors) is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.mutants.mutant import Mutant, find_definitions, find_fragment, parse_fragment, put, walk_around

ROOT = Path(__file__).parents[2]
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
WORDS = {"min": "max", "max": "min", "any": "all", "all": "any"}
WIDE = {  # room: what else drives its lines, where the tests of its own name find nothing
    "protocol": "tests/unit/protocol tests/transcripts tests/simulation/test_seeds.py",
    "master": "tests/unit/master tests/unit/view tests/unit/test_recover.py tests/transcripts "
    "tests/integration/test_control.py tests/integration/test_operate.py tests/integration/test_mutual_tls.py "
    "tests/integration/test_seed.py tests/integration/test_up.py tests/simulation/test_seeds.py",
    "slave": "tests/unit/slave tests/unit/test_watching.py tests/unit/test_recover.py "
    "tests/unit/commands/test_rebalance.py tests/integration/test_flow.py tests/simulation/test_seeds.py",
    "outer": "tests/unit/outer tests/unit/slave tests/integration/test_outer_step.py tests/simulation/test_seeds.py",
    "wire": "tests/unit/wire tests/unit/slave tests/integration/test_flow.py tests/golden",
    "transport": "tests/unit/transport tests/integration/test_flow.py tests/integration/test_sealed_lanes.py "
    "tests/integration/test_mutual_tls.py tests/integration/test_control.py tests/integration/test_call_gate.py",
    "client": "tests/unit/client tests/integration/test_client_agent.py tests/integration/test_client_ranks.py "
    "tests/integration/test_lazy_install.py tests/integration/test_adapters.py",
    "data": "tests/unit/data tests/integration/test_ranges.py",
    "identity": "tests/unit/identity tests/integration/test_operate.py tests/integration/test_mutual_tls.py",
    "config": "tests/unit/test_config.py tests/unit/commands tests/unit/test_watching.py",
    "commands": "tests/unit/commands tests/unit/telemetry tests/unit/test_cli.py tests/unit/test_recover.py "
    "tests/integration/test_operator.py tests/integration/test_operate.py tests/integration/test_up.py "
    "tests/integration/test_export_lanes.py tests/integration/test_seed.py tests/integration/test_mistakes.py "
    "tests/integration/test_follow.py tests/integration/test_rebalance.py",
    "view": "tests/unit/view tests/unit/commands tests/unit/telemetry tests/integration/test_page.py",
    "http": "tests/unit/http tests/integration/test_http_port.py",
    "telemetry": "tests/unit/telemetry tests/unit/http tests/unit/test_errors.py tests/integration/test_scrapes.py",
    "store": "tests/unit/slave tests/unit/master tests/unit/commands tests/unit/test_recover.py",
    "inside": "tests/unit/inside tests/integration/test_mesh.py",
    "local": "tests/unit/commands tests/unit/demo tests/integration/test_up.py",
    "templates": "tests/unit/commands tests/integration/test_template_run.py",
}
ELSEWHERE = "tests/unit --ignore=tests/unit/study --ignore=tests/unit/demo"  # of files that lie in no room


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants of different places; for a seed the same ones, but where code has changed or is new."""
    places = _find_places() if count else []
    return [_mutant(place) for place in sorted(places, key=lambda place: place.draw_lot(seed))[:count]]


def widened(mutant: Mutant) -> Mutant:
    """The same mutant, with all tests that drive its room, and those elsewhere that import its module."""
    wide = WIDE.get(mutant.room, ELSEWHERE)
    module = "dips." + mutant.name.partition(".py:")[0].removeprefix("dips/").replace("/", ".")
    covered = [ROOT / test for test in wide.split() if not test.startswith("-")]
    imports = re.compile(rf"^(from|import) {re.escape(module)}\b", re.MULTILINE)
    more = (t for t in sorted((ROOT / "tests").rglob("test_*.py")) if imports.search(t.read_text()))
    tests = [str(t.relative_to(ROOT)) for t in more if not any(t == part or part in t.parents for part in covered)]
    return replace(mutant, tests=" ".join([wide, *tests]))


@dataclass(frozen=True, slots=True)
class DrawnPlace:
    """A node that can be turned, in the definition of this name; `number` tells it from its like in there."""

    path: Path
    name: str
    node: ast.AST
    around: tuple[ast.AST, ...]
    new: str
    number: int

    def draw_lot(self, seed: int) -> bytes:
        """Return what depends on the seed and on this code alone, neither on its file nor on other code."""
        words = f"{seed} {self.name} {ast.unparse(self.node)} {self.new} {self.number}"
        return hashlib.blake2b(words.encode(), digest_size=8).digest()


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
        return f"({left} {TURNED[type(node.ops[0])]} {right})"
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        return "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WORDS:
        return WORDS[node.func.id] + ast.unparse(node)[len(node.func.id) :]
    return ""


def _mutant(place: DrawnPlace) -> Mutant:
    file, node = place.path.relative_to(ROOT), place.node
    where = ".".join([*file.relative_to("dips").with_suffix("").parts, place.name]).removesuffix(".")
    title = f"{file}:{getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0][:60]} → {place.new[:60]}"
    change = grow(node, place.new, place.around, find_definitions(place.path)[place.name])
    return Mutant(title, where, *change, _nearest(place.path))


def grow(node: ast.AST, new: str, around: tuple[ast.AST, ...], definitions: list[ast.AST]) -> tuple[str, str]:
    """A node and what becomes of it, with as much around it as stands once in some definitions."""
    made = parse_fragment(new)[0]
    for parent in reversed(around):
        stands = isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Slice | ast.Starred)
        if stands and len(find_fragment(ast.unparse(node), definitions)) == 1:
            break
        node, made = parent, put(parent, [node], [made])
    return ast.unparse(node), ast.unparse(made)


def _nearest(path: Path) -> str:
    """Tests of the module's own name; else the unit tests of its room."""
    room = path.relative_to(ROOT / "dips").parent
    tests = ROOT / "tests" / "unit" / room
    while not tests.is_dir():
        tests = tests.parent
    stem = path.stem.removesuffix("s")
    found = sorted(
        t for t in tests.rglob("test_*.py") if stem in t.stem or f"{'.'.join(room.parts)}.{path.stem}" in t.read_text()
    )
    if not found and tests != ROOT / "tests" / "unit":
        found = [tests]
    return " ".join(str(t.relative_to(ROOT)) for t in found) or ELSEWHERE
