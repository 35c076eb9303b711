"""Docstrings, comments and messages of assertions name what exists: files, members of classes, functions, keys."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("dips", "tests", "benchmarks")
FILE = re.compile(r"(?<![\w./{*<-])((?:\w[\w-]*/)*\w+\.py)\b")
CALLED = re.compile(r"(?<![\w.`])([a-z_][a-z_0-9]*)\(\)")  # plain text: fold()
MEMBER = re.compile(r"\b([A-Z]\w+)\.([a-z_]\w*)\b")  # Class.member
LITERAL = r'''("{3}|'{3})(?:\\[\s\S]|[^\\])*?\1|'(?:\\[\s\S]|[^'\\\n])*'|"(?:\\[\s\S]|[^"\\\n])*"'''
COMMENT = re.compile(LITERAL + r"|(?P<comment>#.*)")  # none begins within a literal; tokenize takes ten times as long
TICKED = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`")  # `name`, `a.b`
NAMING = frozenset({"id", "attr", "arg", "name", "asname", "module"})  # fields of a node that hold an identifier
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Files that a text names as an example, or that belong to somebody else's repository.
FOREIGN_FILES = frozenset({"EXAMPLE.py", "mymodel.py", "pretrain_gpt.py", "train.py", "subprocess.py"})
FOREIGN_NAMES = frozenset(dir(builtins)) | frozenset(keyword.kwlist)
# Of torch, Megatron-core, transformers, gRPC and CPython, and the one metric whose name is made of a prefix.
FOREIGN_NAMES |= {"get_device_module", "make_vocab_size_divisible_by", "tok_embeddings", "initial_metadata", "unshard"}
FOREIGN_NAMES |= {"posix_fallocate", "_posixsubprocess", "fork_exec", "dips_refusals_total"}
FOREIGN_CLASSES = frozenset({"Trainer"})  # transformers' own; ours has the name, too


def _sources() -> list[Path]:
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return sorted(path for path in files if "generated" not in path.parts)


@dataclass
class SourceWords:
    """What one file defines, names and says."""

    docstrings: list[tuple[int, str]] = field(default_factory=list)  # by line
    texts: list[tuple[int, str]] = field(default_factory=list)  # comments and messages of assertions, by line
    classes: list[tuple[str, set[str], set[str]]] = field(default_factory=list)  # name, own members, names of bases
    names: set[str] = field(default_factory=set)  # identifiers, and words of strings that are no sentence
    callables: set[str] = field(default_factory=set)  # defined as a function or a class, or called


@cache
def read_words(path: Path) -> SourceWords:
    """Read a file once; its syntax tree is not kept."""
    words = words_of(path.read_text())
    words.names |= {path.stem, *path.relative_to(ROOT).parts}
    return words


def words_of(source: str) -> SourceWords:
    """Return the words of a module's text."""
    words, docs = SourceWords(), set[int]()
    for node in walk(ast.parse(source)):  # a docstring comes after what it documents
        if isinstance(node, DOCUMENTED):
            if text := ast.get_docstring(node, clean=False):
                words.docstrings.append((node.body[0].lineno, text))
                docs.add(id(node.body[0].value))  # type: ignore[attr-defined]
            if not isinstance(node, ast.Module):
                words.callables.add(node.name)
            if isinstance(node, ast.ClassDef):
                words.classes.append((node.name, *_members_of(node)))
        elif isinstance(node, ast.Call):
            words.callables.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            parts = (part.value for part in walk(node.msg) if isinstance(part, ast.Constant))
            words.texts += [(node.lineno, text) for text in parts if isinstance(text, str)]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and not (" " in node.value or id(node) in docs)
        ):
            words.names.update(re.findall(r"\w+", node.value))
        for name in _naming_fields(type(node)):
            if isinstance(value := getattr(node, name), str):
                words.names.update(value.split("."))
    comments = (found for found in COMMENT.finditer(source) if found["comment"])
    words.texts += [(source.count("\n", 0, found.start()) + 1, found["comment"]) for found in comments]
    return words


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each node before those below it, but for how a name is used (`ctx`); ast.walk takes twice as long."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for name, value in vars(node).items():
            if type(value) is list:
                left += [each for each in value if isinstance(each, ast.AST)]
            elif name != "ctx" and isinstance(value, ast.AST):
                left.append(value)


@cache
def _naming_fields(kind: type[ast.AST]) -> frozenset[str]:
    return NAMING.intersection(kind._fields)


def _members_of(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    own, bases = set[str](), {base.id if isinstance(base, ast.Name) else "?" for base in node.bases}
    for each in walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Assign(targets=targets):
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own.add(name)
    return own, bases


@cache
def members() -> dict[str, tuple[set[str], set[str]]]:
    """By class: its own members, and the names of its bases."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for path in _sources():
        for name, own, bases in read_words(path).classes:
            found[name][0].update(own)
            found[name][1].update(bases)
    return dict(found)


def has_member(cls: str, name: str) -> bool:
    """Whether a class has a member; True where a base is not ours."""
    if cls not in members() or cls in FOREIGN_CLASSES:
        return True
    own, bases = members()[cls]
    return name in own or any(has_member(base, name) for base in bases - {cls, "Protocol", "ABC", "object", "StrEnum"})


@cache
def names() -> frozenset[str]:
    """Every identifier of the code, and every word of a string that is no sentence: keys, paths, modules of others."""
    found = FOREIGN_NAMES.union(*(read_words(path).names for path in _sources() if path != Path(__file__)))
    for path in (*(ROOT / "protos").rglob("*.proto"), *(ROOT / "dips" / "templates").iterdir()):
        found |= set(re.findall(r"\w+", path.read_text()))
    return found


@cache
def callables() -> frozenset[str]:
    """Every name that is defined as a function or a class, or called."""
    return FOREIGN_NAMES.union(*(read_words(path).callables for path in _sources() if path != Path(__file__)))


@cache
def files() -> frozenset[str]:
    """Each Python file by its name and by every tail of its path."""
    found = set()
    places = [path for path in ROOT.iterdir() if path.name != "build" and not path.name.startswith(".")]
    for path in (*ROOT.glob("*.py"), *(p for place in places for p in place.rglob("*.py"))):
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[i:]) for i in range(len(parts))}
    return frozenset(found)


def strays(text: str) -> list[str]:
    """What a text names that is nowhere."""
    found = [name for name in FILE.findall(text) if name not in files() and name not in FOREIGN_FILES]
    plain = FILE.sub("", text)
    found += [f"{name}()" for name in CALLED.findall(plain) if name not in callables()]
    found += [f"{cls}.{name}" for cls, name in MEMBER.findall(plain) if not has_member(cls, name)]
    found += [
        ticked for ticked in TICKED.findall(plain) if not set(ticked.split(".")) <= names() and "__" not in ticked
    ]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_text_names_exists(room: str) -> None:
    """A rename or a deletion mends the sentences that name what was renamed or deleted."""
    paths = (path for path in _sources() if path.relative_to(ROOT).parts[0] == room and path != Path(__file__))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {stray}"
        for path in paths
        for line, text in read_words(path).docstrings + read_words(path).texts
        for stray in strays(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "stray"),
    [
        ("See nowhere/mover.py.", "nowhere/mover.py"),
        ("As fold_sideways() does.", "fold_sideways()"),
        ("Coordinator.view_everything says it.", "Coordinator.view_everything"),
        ("Of `no_such_name_anywhere`.", "no_such_name_anywhere"),
    ],
)
def test_what_does_not_exist_is_found(text: str, stray: str) -> None:
    """A file, a function, a member and a name."""
    assert strays(text) == [stray]
    assert not strays("`Coordinator.step` of dips/protocol/coordinator.py, and fold().")


def test_a_comment_is_no_part_of_a_string() -> None:
    """Of one line or several, with escapes, raw and formatted; its line is counted."""
    source = 'a = "# 1"\nb = f\'{a} \\\'# 2\'  # 3\nc = r"""\\"\n# 4\n"""  # 5 "\n# 6 \'\n'
    assert words_of(source).texts == [(2, "# 3"), (5, '# 5 "'), (6, "# 6 '")]


# Packages whose docstrings say in a sentence what a thing is or does; the rest follows (issue 28).
HEADLESS = re.compile(r"\s*(What|Whose|Somebody|Nobody|Of|It|So)\b")  # a relative clause or a pronoun, without a noun


def headless(words: SourceWords) -> list[tuple[int, str]]:
    """Return (line, first line) of each docstring that begins without a verb or a noun."""
    return [(line, text.strip().split("\n")[0]) for line, text in words.docstrings if HEADLESS.match(text)]


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    """A reader understands the sentence without the code."""
    paths = [path for path in _sources() if path.is_relative_to(ROOT / "dips")]
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in paths for line, text in headless(read_words(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["What it is.", "Whose it is.", "Somebody asks.", "Of a slave.", "It is over.", "So."])
def test_a_headless_docstring_is_found(text: str) -> None:
    """In a module, a class and a method; a docstring that begins with a noun or a verb is not."""
    module, method = f'"""{text}"""\n', f'class A:\n    """An offer."""\n    def f(self):\n        """{text}"""\n'
    assert headless(words_of(module)) == [(1, text)]
    assert headless(words_of(method)) == [(4, text)]
    assert not headless(words_of('"""Offers of slaves."""\ndef f():\n    """Return what it is."""\n'))
