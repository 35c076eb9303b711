"""Figures of how the code is cut: lines per file and per function, and how many function names are a single word.

    python tests/structure.py [FOLDER ...]      # default: dips

A comparison, not a limit: the last lines give the same figures of h11 and torchft, which we learned from. Generated
code does not count, nor do names with two leading underscores. Then the keys of the run file and of the cluster file,
each where it may stand; those of `shared` count once.
"""

from __future__ import annotations

import ast
import statistics
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from pydantic import BaseModel

from dips.config import ClusterFile, RunFile

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Figures:
    """What is compared of one code base."""

    files: tuple[int, int, int]  # lines per file: median, 90th percentile, largest
    functions: tuple[int, int, int]  # lines per function, likewise
    one_word: float  # share of function names that are one word, 0 to 1


# Measured by `measure` on 2026-11-22, tests left out.
PEERS = {
    "h11": Figures((153, 369, 659), (7, 38, 64), 0.12),  # 62c5068, 2025-04
    "torchft": Figures((108, 415, 2023), (9, 34, 189), 0.41),  # 73dafea, 2025-10; 0.33 with its tests
}


def python_files(folders: Iterable[Path]) -> list[Path]:
    """Every file that a person wrote: generated code lies in folders of that name."""
    return sorted(p for folder in folders for p in folder.rglob("*.py") if "generated" not in p.parts)


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def measure(files: list[Path]) -> Figures:
    """Read all files once."""
    lengths = [len(path.read_text().splitlines()) for path in files]
    functions = [function for path in files for function in functions_of(path)]
    spans = [(f.end_lineno or f.lineno) - f.lineno + 1 for f in functions]
    names = [f.name.strip("_") for f in functions if not f.name.startswith("__")]
    one_word = sum("_" not in name for name in names) / len(names)
    return Figures(_spread(lengths), _spread(spans), one_word)


def _spread(values: list[int]) -> tuple[int, int, int]:
    ordered = sorted(values)
    return int(statistics.median(ordered)), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]


def config_keys(section: object, above: str = "") -> Iterator[str]:
    """Every key that has a value of its own, as `master.timing.window_s`."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        below = {name: field.annotation for name, field in section.model_fields.items()}
    elif isinstance(section, type) and is_dataclass(section):
        hints = typing.get_type_hints(section)
        below = {field.name: hints[field.name] for field in fields(section)}
    elif typing.get_origin(section) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        found = {key for part in typing.get_args(section) for key in config_keys(part, above)} - {above}
        yield from sorted(found) or [above]
        return
    else:
        yield above
        return
    for name, annotation in below.items():
        yield from config_keys(annotation, f"{above}.{name}" if above else name)


def row(name: str, figures: Figures) -> str:
    files, functions = (" / ".join(map(str, spread)) for spread in (figures.files, figures.functions))
    return f"{name:<12}{files:>20}{functions:>20}{figures.one_word:>14.0%}"


def main() -> None:
    folders = [Path(word) for word in sys.argv[1:]] or [ROOT / "dips"]
    print(f"{'':<12}{'lines per file':>20}{'per function':>20}{'one-word names':>16}")
    print(f"{'':<12}{'median / p90 / max':>20}{'median / p90 / max':>20}")
    print(row(", ".join(f.name for f in folders), measure(python_files(folders))))
    for name, figures in PEERS.items():
        print(row(name, figures))
    run, cluster = list(config_keys(RunFile)), list(config_keys(ClusterFile))
    own = [key for key in cluster if not key.startswith("shared.")]
    print(f"keys: {len(run) + len(own)}, {len(run)} of the run file and {len(own)} of the cluster file")


if __name__ == "__main__":
    main()
