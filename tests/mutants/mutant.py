"""What a mutant is, and where its line is found in a tree.

A mutant names a directory (or a file) of the package and a short text that stands exactly once in it, so it survives
when code moves from file to file of the same directory. Where the text no longer stands, or stands twice, the mutant
fails loudly: an anchor that is lost must be set anew, or the mutant would test nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EQUIVALENT = "equivalent: "


class LostAnchor(Exception):
    """A mutant that no longer applies."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` becomes `new`; `tests` are arguments of pytest, or `equivalent: ` and why no test can tell."""

    name: str
    where: str  # directory or file, relative to the repository
    old: str
    new: str
    tests: str

    @property
    def equivalent(self) -> bool:
        return self.tests.startswith(EQUIVALENT)


def locate(mutant: Mutant, tree: Path) -> Path:
    """Return the one file in which `old` stands, once; raise LostAnchor if it does not, naming where it stands."""
    places = _places(tree / mutant.where, mutant.old)
    if len(places) == 1:
        return places[0]
    found = ", ".join(str(path.relative_to(tree)) for path in places) or "nowhere"
    elsewhere = {str(path.relative_to(tree)) for path in _places(tree / "dips", mutant.old)}
    hint = f"; in the package: {', '.join(sorted(elsewhere))}" if elsewhere and not places else ""
    raise LostAnchor(f"mutant no longer applies: {mutant.old!r} must stand once in {mutant.where}, got {found}{hint}")


def apply(mutant: Mutant, tree: Path) -> Path:
    """Write the mutant into a tree; return the file that changed."""
    path = locate(mutant, tree)
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    return path


def _places(where: Path, text: str) -> list[Path]:
    """The files that hold a text, each as often as it holds it."""
    files = [where] if where.is_file() else sorted(p for p in where.rglob("*.py") if "generated" not in p.parts)
    return [path for path in files for _ in range(path.read_text().count(text))]
