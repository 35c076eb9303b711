"""Documents and the references to them: each file and anchor that is named exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))  # longer texts, each for one occasion
DOCUMENTS = [
    *DOCS,
    *GUIDES,
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md", "benchmarks/README.md")
    ),
]

TREES = ("dips", "tests", "benchmarks", "deploy", "configs", "protos")
TOP = ("Makefile", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SKIPPED = {"generated", "__pycache__"}
TEXT = {"", ".md", ".py", ".proto", ".txt", ".yaml", ".sh", ".sbatch", ".service", ".Dockerfile"}

# `docs/rationale.md#12, #24 and #30`: a file, then the anchors in it that are meant.
REFERENCE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.md)((?:#[\w-]+(?:(?:,\s+|\s+and\s+)(?=#\w))?)*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def texts() -> Iterator[Path]:
    """Every text file that may hold a reference."""
    yield from (ROOT / name for name in TOP)
    yield from (*DOCS, *GUIDES)
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if path.is_file() and path.suffix in TEXT and not SKIPPED & set(inside) and path != Path(__file__):
                yield path


@cache
def anchors(document: Path) -> frozenset[str]:
    """What `#…` may name in a document: its headings as GitHub spells them, and `<a id="…">`."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return frozenset(slugs | set(re.findall(r'<a id="([\w-]+)">', text)))


def unresolved(path: Path, name: str, names: list[str]) -> Iterator[str]:
    """Say what of one reference does not exist; a path counts from the root or from the file that names it."""
    document = next((at / name for at in (ROOT, path.parent) if (at / name).is_file()), None)
    if document is None:
        yield f"{path.relative_to(ROOT)}: {name} is not in the repository"
        return
    yield from (f"{path.relative_to(ROOT)}: {name} has no #{a}" for a in names if a not in anchors(document))


def references(text: str) -> list[tuple[str, list[str]]]:
    """The documents that a text names, each with the anchors."""
    if ".md" not in text:
        return []
    return [(m[1], re.findall(r"#([\w-]+)", m[2])) for m in REFERENCE.finditer(text)]


def problems(path: Path, text: str) -> list[str]:
    """Every reference of a text that does not resolve."""
    return [problem for name, names in references(text) for problem in unresolved(path, name, names)]


def test_every_reference_resolves() -> None:
    """A document that a comment, docstring or document names is in the repository, and so is the anchor."""
    assert not [problem for path in texts() for problem in problems(path, path.read_text())]


@pytest.mark.parametrize(
    "text",
    [
        "design.md section 4",  # a document of another place
        "see why" + ".md 12",
        "docs/rationale.md#12, #999",
        "docs/architecture.md#invariant-13",
        "docs/nowhere.md",
    ],
)
def test_a_wrong_reference_is_found(text: str) -> None:
    """What does not exist is reported, also as the second of several anchors."""
    assert problems(ROOT / "dips" / "ids.py", text)


def test_references_are_walked() -> None:
    """The walk sees the code: stories and invariants are cited from it."""
    code = [path.read_text() for path in texts() if path.suffix == ".py"]
    cited = {name for text in code for name, names in references(text) if names}
    assert {"docs/architecture.md", "docs/protocol.md", "docs/rationale.md"} <= cited


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    """A link within the repository leads to a file, and to an anchor in it."""
    for target in LINK.findall(document.read_text()):
        name, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        leads_to = document.parent / name if name else document
        assert leads_to.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(leads_to.resolve()), f"{document.name}: {target}"


def test_every_document_is_reached_from_the_readme() -> None:
    """A reader finds each of docs/ by a link."""
    links = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {document.relative_to(ROOT).as_posix() for document in (*DOCS, *GUIDES)} <= links


def test_stories_have_a_rule() -> None:
    """Each entry of the rationale says what went wrong, then, after an arrow, the rule."""
    blocks = (ROOT / "docs" / "rationale.md").read_text().split("\n\n")
    stories = [block for block in blocks if block.startswith("<a id=")]
    assert len(stories) >= 40
    for story in stories:
        assert "→" in story, story


def test_the_glossary_says_each_term_once() -> None:
    """One row a term, in the order of the alphabet."""
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(terms) > 30
    assert terms == sorted(set(terms))
