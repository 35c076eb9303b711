"""`dips data build`: sources in, a data set's directory out. Reads every byte once or twice and holds none of them.

text ──tokenizer──▶ tokens/NAME.bin ─┐
token files (stay where they are) ───┴─▶ lengths of all documents ─▶ deal ─▶ documents.npy, ranges.npy, dataset.json
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dips.data import index
from dips.data.balance import Balance, weigh_sources
from dips.data.deal import TOLERANCE, Documents, cut_of, deal_documents
from dips.data.text import Tokenizer, is_text, write_tokens
from dips.data.tokenfile import TokenFile, find_tokens
from dips.errors import ConfigError
from dips.ids import check_name

Progress = Callable[[str, int], None]  # what is being done, bytes done since the last call


@dataclass(frozen=True)
class CorpusSource:
    """One source of the data set, and the files that it is made of, text or tokens."""

    name: str
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True)
class BuildPlan:
    """What is to be made."""

    sources: tuple[CorpusSource, ...]
    output: Path
    ranges: int
    seed: int
    tokenizer: Tokenizer | None = None  # for sources that are text
    key: str = "text"  # of a line of JSON
    dtype: str | None = None  # of raw token files
    eos: int | None = None  # of token files without boundaries
    tolerance: float = TOLERANCE
    cut: int | None = None  # tokens; None: as long as the tolerance allows; 0: no document is cut


@dataclass(frozen=True)
class Built:
    """What was made."""

    digest: str
    tokens: int
    documents: tuple[int, ...]  # of each source, as they came
    sources: tuple[int, ...]  # tokens of each
    cut: int
    balance: Balance


def parse_source(spec: str) -> CorpusSource:
    """Read NAME=PATH; PATH is a file, a directory, or a pattern. Raise ConfigError if nothing is there."""
    name, equals, where = spec.partition("=")
    if not equals:
        raise ConfigError(f"--source: expected NAME=PATH, got {spec!r}")
    check_name(name, "source")
    path = Path(where)
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(where))
    files = tuple(sorted(p for p in found if p.is_file() and not _is_index(p)))
    if not files:
        raise ConfigError(f"--source {spec}: there is no file")
    return CorpusSource(name, files)


def _is_index(path: Path) -> bool:
    """A file that only says where the documents of its neighbour begin."""
    return path.name.endswith(".documents.npy") or (path.suffix == ".idx" and path.with_suffix(".bin").exists())


def build_dataset(plan: BuildPlan, progress: Progress = lambda *_: None) -> Built:
    """Make the data set; raise ConfigError if a source cannot be read or the directory is taken."""
    names = [s.name for s in plan.sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"--source: each name once, got {', '.join(names)}")
    if (plan.output / index.MANIFEST).exists():
        raise ConfigError(f"--output {plan.output}: a data set is there already; name another directory")
    plan.output.mkdir(parents=True, exist_ok=True)
    files = [_token_files(plan, s, progress) for s in plan.sources]
    documents = _list_documents(files)
    sizes = tuple(int(d.tokens.sum()) for d in documents)
    cut = cut_of(sum(sizes), plan.ranges, plan.tolerance) if plan.cut is None else plan.cut
    dealt = deal_documents(documents, plan.ranges, plan.seed, cut)
    weighed = weigh_sources(dealt.shares)
    manifest: dict[str, Any] = {
        "format": index.FORMAT,
        "ranges": plan.ranges,
        "tokens": sum(sizes),
        "seed": plan.seed,
        "cut": cut,
        "tokenizer": plan.tokenizer.name if plan.tokenizer else None,
        "sources": [_source_entry(plan, s.name, fs, progress) for s, fs in zip(plan.sources, files, strict=True)],
        "balance": weighed.to_dict(),
    }
    digest = index.write_index(plan.output, manifest, dealt.documents, dealt.bounds)
    return Built(digest, sum(sizes), tuple(len(d) for d in documents), sizes, cut, weighed)


def _token_files(plan: BuildPlan, one: CorpusSource, progress: Progress) -> list[TokenFile]:
    texts = [file for file in one.files if is_text(file)]
    made = [find_tokens(file, plan.dtype, plan.eos) for file in one.files if not is_text(file)]
    if texts:
        if plan.tokenizer is None:
            raise ConfigError(f"source {one.name} is text ({texts[0]}): give --tokenizer")
        output = plan.output / "tokens" / f"{one.name}.bin"
        output.parent.mkdir(exist_ok=True)
        made.append(
            write_tokens(texts, plan.key, plan.tokenizer, output, lambda n: progress(f"tokens of {one.name}", n))
        )
    return made


def _list_documents(files: Sequence[Sequence[TokenFile]]) -> list[Documents]:
    found, at = [], 0
    for of_source in files:
        numbers = [np.full(len(f.starts), at + i, np.int64) for i, f in enumerate(of_source)]
        starts, tokens = [f.starts for f in of_source], [f.tokens for f in of_source]
        found.append(Documents(*(np.concatenate(parts) for parts in (numbers, starts, tokens))))
        at += len(of_source)
    return found


def _source_entry(plan: BuildPlan, name: str, files: Sequence[TokenFile], progress: Progress) -> dict[str, Any]:
    """A source in the manifest; a path inside the directory is relative to it, another is absolute."""
    listed = []
    for file in files:
        inside = file.path.is_relative_to(plan.output)
        listed.append(
            {
                "path": os.fspath(file.path.relative_to(plan.output) if inside else file.path.resolve()),
                "dtype": file.dtype,
                "skip": file.skip,
                "bytes": file.path.stat().st_size,
                "documents": len(file.starts),
                "tokens": int(file.tokens.sum()),
                "xxh3": index.file_checksum(file.path, lambda n: progress(f"checksum of {name}", n)),
            }
        )
    return {"name": name, "files": listed}
