"""What a mutant is, and how its change is made in a tree.

A mutant names a place and a change. The place is a qualified name of the package, `protocol.round.extend_window`: a
function, a class, a constant or a module. It is looked for in its module; when it has moved, wherever it stands once.

The change is `old → new`, two fragments of Python: an expression, or statements that follow each other. `old` must
stand exactly once in the place. Fragments are compared as syntax trees, so that line breaks, comments and quotes do not
matter, and `...` stands for whatever is there: any one expression, any number of arguments, any block. In `new`, the
first `...` is what the first one of `old` stood for, and so on. A fragment that is one string literal may be a part of
a longer literal. Where `new` is empty, `old` is left out: a statement, an operand of `and` or `or`, an argument, an
element, a condition of a comprehension.

A mutant whose place or fragment is not there, or there twice, or that changes nothing raises LostAnchor.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

EQUIVALENT = "equivalent: "
PACKAGE = "dips"
WITHOUT, BECOMES = "without ", " → "


class LostAnchor(Exception):
    """A mutant that no longer applies."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `where`, `old` becomes `new`; `tests` are arguments of pytest, or `equivalent: ` and why no test can tell."""

    name: str
    where: str
    old: str
    new: str
    tests: str

    @property
    def equivalent(self) -> bool:
        return self.tests.startswith(EQUIVALENT)

    @property
    def change(self) -> str:
        return f"{self.old}{BECOMES}{self.new}" if self.new else WITHOUT + self.old

    @property
    def room(self) -> str:
        """The package in which it is, `protocol`."""
        return self.where.partition(".")[0]


def apply(mutant: Mutant, tree: Path) -> Path:
    """Write the mutant into a tree; return the file that changed."""
    path, text = mutate(mutant, tree)
    path.write_text(text)
    return path


def mutate(mutant: Mutant, tree: Path) -> tuple[Path, str]:
    """Return the file of a mutant, and its text with the change; raise LostAnchor if it does not apply once."""
    path, places = find_place(mutant.where, tree)
    found = find_fragment(mutant.old, places)
    if len(found) != 1:
        lines = ", ".join(f"{path.relative_to(tree)}:{one.line}" for one in found) or "nowhere"
        raise LostAnchor(f"mutant no longer applies: {mutant.old!r} must stand once in {mutant.where}, got {lines}")
    return path, found[0].replace(path.read_text(), mutant.new)


# ---- places


def find_place(where: str, tree: Path) -> tuple[Path, list[ast.AST]]:
    """Return the file of a qualified name and its definitions there: more than one for a property that can be set."""
    parts = where.split(".")
    for count in range(len(parts), 0, -1):
        module = (tree / PACKAGE).joinpath(*parts[:count])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file() and (found := find_definitions(path).get(".".join(parts[count:]))):
                return path, found
    return _find_moved(where, tree)


def _find_moved(where: str, tree: Path) -> tuple[Path, list[ast.AST]]:
    """A definition of the same name in another module: the one in the same room, else the only one in the package."""
    found = [
        (path, name)
        for path in sorted((tree / PACKAGE).rglob("*.py"))
        for name in find_definitions(path)
        if name and where.endswith(f".{name}")
    ]
    longest = max((name.count(".") for _, name in found), default=0)
    found = [(path, name) for path, name in found if name.count(".") == longest]
    near = [(path, name) for path, name in found if path.relative_to(tree).parts[1] == where.partition(".")[0]]
    if len(chosen := near or found) == 1:
        return chosen[0][0], find_definitions(chosen[0][0])[chosen[0][1]]
    files = ", ".join(str(path.relative_to(tree)) for path, _ in chosen) or "nowhere"
    raise LostAnchor(f"mutant no longer applies: {where} must be defined once in {PACKAGE}, got {files}")


def find_definitions(path: Path) -> dict[str, list[ast.AST]]:
    """Return what a module defines by its qualified names; the module itself is called ""."""
    return _definitions_of(path.read_text())


@lru_cache(maxsize=1024)
def _definitions_of(text: str) -> dict[str, list[ast.AST]]:
    module = ast.parse(text)
    found: dict[str, list[ast.AST]] = {"": [module]}
    for name, node in _defined(module, ""):
        found.setdefault(name, []).append(node)
    return found


def _defined(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield prefix + name, node
                yield from _defined(node, f"{prefix}{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if isinstance(parent, ast.Module | ast.ClassDef):
                    yield prefix + name, node
            case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                yield from _defined(node, prefix)


# ---- fragments

Wildcards = dict[
    int, tuple[list[ast.AST], list[ast.keyword]]
]  # what each `...` stands for, by its number in the fragment


@dataclass(frozen=True, slots=True)
class FragmentMatch:
    """Where a fragment stands: its expression or its statements, with all nodes around them, outermost first."""

    old: list[ast.AST]
    nodes: list[ast.AST]
    around: tuple[ast.AST, ...]
    wildcards: Wildcards

    @property
    def line(self) -> int:
        return int(getattr(self.nodes[0], "lineno", 0))

    def replace(self, text: str, new: str) -> str:
        """Return the text of the module with `new` at the place of this fragment."""
        made = parse_fragment(new) if new else []
        nodes, around = self.nodes, [*self.around]
        if isinstance(around[-1], ast.Expr) and not (made and isinstance(made[0], ast.expr)):
            nodes = [around.pop()]  # a call that is a statement
        changed = [self._fill_in(node) for node in made]
        if isinstance(nodes[0], ast.stmt):
            changed = [ast.Expr(node) if isinstance(node, ast.expr) else node for node in changed] or [ast.Pass()]
        if list(map(ast.dump, changed)) == list(map(ast.dump, nodes)):
            raise LostAnchor(f"a mutant must change something, got {ast.unparse(nodes[0])!r} as it was")
        while not changed or not _is_replaceable(nodes[0], around, text):
            parent = around.pop()
            nodes, changed = [parent], [put(parent, nodes, changed)]
        return _splice(text, nodes, changed)

    def _fill_in(self, new: ast.AST) -> ast.AST:
        match self.old[0], self.nodes[0], new:
            case ast.Constant(value=str(part)), ast.Constant(value=str(whole)), ast.Constant(value=str(other)):
                return ast.Constant(whole.replace(part, other))
        return _fill(new, self.wildcards)


def parse_fragment(text: str) -> list[ast.AST]:
    """Parse an expression or statements, and number each `...`."""
    made: list[ast.AST]
    try:
        made = [ast.parse(text, mode="eval").body]
    except SyntaxError:
        made = [*ast.parse(text).body]
    places = [n for part in made for n in ast.walk(part) if isinstance(n, ast.Constant) and n.value is ...]
    for number, node in enumerate(sorted(places, key=lambda n: (n.lineno, n.col_offset))):
        node.kind = str(number)
    return made


def find_fragment(text: str, definitions: list[ast.AST]) -> list[FragmentMatch]:
    """Return where a fragment stands in some definitions."""
    old, found = parse_fragment(text), []
    for definition in definitions:
        for node, around in walk_around(definition):
            for nodes in [[node]] if isinstance(old[0], ast.expr) else _runs_of(node, len(old)):
                if _is_within(old[0], nodes[0]) or all(map(partial(_match, found=(wildcards := {})), old, nodes)):
                    found.append(FragmentMatch(old, nodes, around if nodes[0] is node else (*around, node), wildcards))
    return found


def _runs_of(node: ast.AST, count: int) -> Iterator[list[ast.AST]]:
    """So many statements that follow each other in a block."""
    for _, block in ast.iter_fields(node):
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield from (block[first : first + count] for first in range(len(block) - count + 1))


def walk_around(node: ast.AST, around: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield each node of a tree with all nodes around it, outermost first."""
    yield node, around
    for child in ast.iter_child_nodes(node):
        yield from walk_around(child, (*around, node))


def _is_within(old: ast.AST, node: ast.AST) -> bool:
    """Whether a literal text is part of another."""
    match old, node:
        case ast.Constant(value=str(part)), ast.Constant(value=str(whole)):
            return whole.count(part) == 1
    return False


def _number(node: object) -> int | None:
    """The number of a `...`; None for all else."""
    match node:
        case ast.Constant(value=value, kind=kind) | ast.Expr(value=ast.Constant(value=value, kind=kind)):
            return int(kind) if value is ... and kind else None
    return None


def _match(old: object, node: object, found: Wildcards) -> bool:
    """Compare two trees; note what each `...` stands for."""
    if (number := _number(old)) is not None and isinstance(node, ast.expr):
        found[number] = ([node], [])
        return True
    if isinstance(old, list) and isinstance(node, list):
        return _match_lists(old, node, found)
    if not isinstance(old, ast.AST) or not isinstance(node, ast.AST):
        return type(old) is type(node) and old == node
    if type(old) is not type(node):
        return False
    if isinstance(old, ast.Call) and isinstance(node, ast.Call):
        return _match_calls(old, node, found)
    return all(_match(getattr(old, name, None), getattr(node, name, None), found) for name in old._fields)


def _match_lists(old: list[ast.AST], nodes: list[ast.AST], found: Wildcards) -> bool:
    if not old:
        return not nodes
    if (number := _number(old[0])) is None:
        return bool(nodes) and _match(old[0], nodes[0], found) and _match_lists(old[1:], nodes[1:], found)
    for count in range(len(nodes) + 1):
        found[number] = (nodes[:count], [])
        if _match_lists(old[1:], nodes[count:], found):
            return True
    return False


def _match_calls(old: ast.Call, node: ast.Call, found: Wildcards) -> bool:
    """Keywords that `old` does not name are part of its last `...`, if it has one among its arguments."""
    if not _match(old.func, node.func, found) or not _match_lists([*old.args], [*node.args], found):
        return False
    numbers = [number for argument in old.args if (number := _number(argument)) is not None]
    if not numbers:
        return _match_lists([*old.keywords], [*node.keywords], found)
    named = {keyword.arg for keyword in old.keywords}
    found[numbers[-1]][1].extend(keyword for keyword in node.keywords if keyword.arg not in named)
    return _match_lists([*old.keywords], [keyword for keyword in node.keywords if keyword.arg in named], found)


# ---- what takes a fragment's place


def _fill(new: ast.AST, found: Wildcards) -> ast.AST:
    """Put what each `...` stands for in its place."""
    if (number := _number(new)) is not None:
        (one,) = found[number][0]
        return one
    made = copy.copy(new)
    for name, value in ast.iter_fields(new):
        if isinstance(value, ast.AST):
            setattr(made, name, _fill(value, found))
        elif isinstance(value, list):
            setattr(made, name, [part for item in value for part in _fill_item(item, found)])
    if isinstance(made, ast.Call) and isinstance(new, ast.Call):
        numbers = [number for argument in new.args if (number := _number(argument)) is not None]
        made.keywords += [keyword for number in numbers for keyword in found[number][1]]
    return made


def _fill_item(item: object, found: Wildcards) -> list[object]:
    if (number := _number(item)) is not None:
        return [*found[number][0]]
    return [_fill(item, found) if isinstance(item, ast.AST) else item]


def put(parent: ast.AST, nodes: list[ast.AST], new: list[ast.AST]) -> ast.AST:
    """Return a parent with other nodes at the place of some that follow each other, or without them."""
    made = copy.copy(parent)
    for name, value in ast.iter_fields(parent):
        if value is nodes[0] and new:
            setattr(made, name, new[0])
            return made
        places = [at for at, item in enumerate(value) if item is nodes[0]] if isinstance(value, list) else []
        if places:
            left = [*value[: places[0]], *new, *value[places[0] + len(nodes) :]]
            setattr(made, name, left)
            return left[0] if isinstance(made, ast.BoolOp) and len(left) == 1 else made
    raise LostAnchor(f"{ast.unparse(nodes[0])!r} is no statement, operand, argument or element: it cannot be left out")


def _is_replaceable(node: ast.AST, around: list[ast.AST], text: str) -> bool:
    """Whether another node may be written at the place of this one."""
    if any(isinstance(one, ast.JoinedStr) for one in around):
        return False
    if isinstance(node, ast.stmt):
        return not text.splitlines()[node.lineno - 1][node.col_offset :].startswith("elif")
    return isinstance(node, ast.expr) and not isinstance(node, ast.Slice | ast.Starred)


def _splice(text: str, nodes: list[ast.AST], new: list[ast.AST]) -> str:
    """Return a module's text with other nodes at the place of some that follow each other."""
    first, last = nodes[0], nodes[-1]
    assert isinstance(first, ast.expr | ast.stmt) and isinstance(last, ast.expr | ast.stmt)
    assert last.end_lineno and last.end_col_offset is not None
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    code = "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in new)
    code = code.replace("\n", "\n" + " " * first.col_offset) if isinstance(first, ast.stmt) else f"({code})"
    return (text.encode()[:start] + code.encode() + text.encode()[end:]).decode()
