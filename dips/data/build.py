"""`dips data build`: makes a data set's directory from sources. Reads every byte once or twice without holding any.

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
from dips.data.deal import TOLERANCE, Balance, Documents, cut_of, deal_documents, weigh_sources
from dips.data.documents import Tokenizer, check_texts, is_tokens, read_documents, write_tokens
from dips.data.index import TokenFile, find_tokens
from dips.errors import ConfigError
from dips.files import explain_unwritable
from dips.ids import check_name

TOKENS = "tokens"  # below the data set's directory, for sources of text
Progress = Callable[[str, int, int], None]  # (kind of work, bytes done, bytes in all)


class _Meter:
    """Reports the progress of one kind of work, which ends when `total` bytes are done."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._done, self._total = progress, what, 0, total

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._what, self._done, self._total)


@dataclass(frozen=True)
class CorpusSource:
    """One source of the data set, with its files of text or tokens."""

    name: str
    files: tuple[Path, ...]

    @property
    def texts(self) -> tuple[Path, ...]:
        return tuple(file for file in self.files if not is_tokens(file))


@dataclass(frozen=True)
class BuildPlan:
    """The input of a build."""

    sources: tuple[CorpusSource, ...]
    output: Path
    ranges: int
    seed: int
    tokenizer: Tokenizer | None = None  # for sources that are text
    key: str = "text"  # of a line of JSON
    dtype: str | None = None  # of raw token files
    eos: int | None = None  # token that ends a document in files without boundaries
    tolerance: float = TOLERANCE
    cut: int | None = None  # longest document in tokens; None: as long as the tolerance allows; 0: no document is cut
    step_tokens: int = 0  # tokens of a cluster's inner step: a range must have more; 0: not checked


@dataclass(frozen=True)
class Built:
    """The result of a build."""

    digest: str
    tokens: int
    documents: tuple[int, ...]  # number of documents of each source, before cutting
    sources: tuple[int, ...]  # number of tokens of each source
    cut: int
    balance: Balance
    vocabulary: int  # all tokens are smaller
    cut_documents: int  # documents that were longer than `cut`
    cut_pieces: int  # pieces into which these were cut


def parse_source(spec: str) -> CorpusSource:
    """Parse NAME=PATH; PATH is a file, a directory, or a pattern. Raise ConfigError if no file matches.

    A directory stands for all files in it at any depth, except hidden files and directories; so does `**` in a pattern.
    Links are followed; a file that is found twice is refused, since its tokens would count twice.
    """
    name, equals, where = spec.partition("=")
    if not equals:
        raise ConfigError(f"--source: expected NAME=PATH, got {spec!r}")
    check_name(name, "source")
    path = Path(where)
    if path.is_file():  # whatever its name: it may have brackets, or be an index that stands for its tokens
        return CorpusSource(name, (path,))
    pattern = f"{glob.escape(where)}/**" if path.is_dir() else where
    found = sorted({*map(Path, glob.iglob(pattern, recursive=True))})  # two `**` find a file twice
    for path in found:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"--source {spec}: {path} is a link to a file that is not there")
    files = tuple(p for p in found if p.is_file() and not _is_index(p))
    if not files:
        raise ConfigError(f"--source {spec}: there is no file")
    meant: dict[Path, Path] = {}
    for file in files:
        if (first := meant.setdefault(file.resolve(), file)) is not file:
            raise ConfigError(
                f"--source {spec}: {first} and {file} are one file, by a link: name a directory or a pattern that has "
                "it once"
            )
    return CorpusSource(name, files)


def _is_index(path: Path) -> bool:
    """Whether a file only has the boundaries of the documents in the file beside it."""
    return path.name.endswith(".documents.npy") or (path.suffix == ".idx" and path.with_suffix(".bin").exists())


def build_dataset(plan: BuildPlan, progress: Progress = lambda *_: None) -> Built:
    """Make the data set; raise ConfigError if a source cannot be read or the directory is taken."""
    names = [s.name for s in plan.sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"--source: each name once, got {', '.join(names)}")
    if (plan.output / index.MANIFEST).exists():
        raise ConfigError(f"--output {plan.output}: a data set is there already; name another directory")
    sources = [_without_own(plan, source) for source in plan.sources]
    for source in sources:
        _check_texts(plan, source)
    with explain_unwritable(f"--output {plan.output}"):
        plan.output.mkdir(parents=True, exist_ok=True)
        (probe := plan.output / f"{index.MANIFEST}.new").touch()  # better before everything is read than after it
        probe.unlink()
    ready = [[find_tokens(f, plan.dtype, plan.eos) for f in s.files if is_tokens(f)] for s in sources]
    vocabulary = _find_vocabulary(plan, ready)
    files = [[*found, *_write_texts(plan, s, progress)] for found, s in zip(ready, sources, strict=True)]
    documents = _list_documents(files)
    sizes = tuple(int(d.tokens.sum()) for d in documents)
    cut = cut_of(sum(sizes), plan.ranges, plan.tolerance) if plan.cut is None else plan.cut
    dealt = deal_documents(documents, plan.ranges, plan.seed, cut)
    weighed = weigh_sources(dealt.shares)
    _check_shortest(plan, weighed.shortest)
    entries = [_source_entry(plan, s.name, fs, progress) for s, fs in zip(plan.sources, files, strict=True)]
    manifest: dict[str, Any] = {
        "format": index.FORMAT,
        "ranges": plan.ranges,
        "tokens": sum(sizes),
        "seed": plan.seed,
        "cut": cut,
        "tokenizer": plan.tokenizer.name if plan.tokenizer else None,
        "vocabulary": vocabulary,
        "sources": entries,
        "balance": weighed.to_dict(),
    }
    with explain_unwritable(f"--output {plan.output}"):
        digest = index.write_index(plan.output, manifest, dealt.documents, dealt.bounds)
    counts, long = tuple(len(d) for d in documents), _count_cut(documents, cut)
    return Built(digest, sum(sizes), counts, sizes, cut, weighed, vocabulary, *long)


def _without_own(plan: BuildPlan, source: CorpusSource) -> CorpusSource:
    """Leave out what an earlier try, which was ended, has written below a source that `output` lies in."""
    at = plan.output.resolve()
    # Not all below TOKENS: token files of the user may have been there before.
    tokens = {at / TOKENS / f"{one.name}.bin" for one in plan.sources if one.texts}
    own = tokens | {at / name for name in (index.DOCUMENTS, index.RANGES, f"{index.MANIFEST}.new")}
    files = tuple(file for file in source.files if file.resolve() not in own)
    if not files:
        raise ConfigError(f"source {source.name}: there is no file but those that a build has written to {at}")
    return CorpusSource(source.name, files)


def _check_shortest(plan: BuildPlan, shortest: int) -> None:
    """Raise ConfigError if a range is too short: a step predicts the tokens after its range's first one."""
    if plan.step_tokens and shortest <= plan.step_tokens:
        most = max(1, plan.ranges * shortest // (plan.step_tokens + 1))
        raise ConfigError(
            f"--ranges {plan.ranges}: the shortest range has {shortest} tokens, an inner step takes {plan.step_tokens} "
            f"(--step-tokens): about {most} ranges are long enough, and far fewer are better"
        )


def _find_vocabulary(plan: BuildPlan, ready: Sequence[Sequence[TokenFile]]) -> int:
    """Return the tokenizer's vocabulary size, or one more than the largest token of token files."""
    made = plan.tokenizer.vocabulary if plan.tokenizer else 0
    return max((made, *(f.largest_token() + 1 for fs in ready for f in fs)))


def _count_cut(documents: Sequence[Documents], cut: int) -> tuple[int, int]:
    """Return (documents that were longer than `cut`, pieces into which these were cut)."""
    if not cut:
        return 0, 0
    long = [d.tokens[d.tokens > cut] for d in documents]
    return sum(len(tokens) for tokens in long), sum(int((-(-tokens // cut)).sum()) for tokens in long)


def _check_texts(plan: BuildPlan, one: CorpusSource) -> None:
    """Raise ConfigError for unreadable text before the first token is written."""
    if one.texts and plan.tokenizer is None:
        raise ConfigError(f"source {one.name} is text ({one.texts[0]}): give --tokenizer")
    check_texts(one.name, one.texts)
    if one.texts:
        next(read_documents(one.texts[0], plan.key), None)  # raises for a key that its records do not have


def _write_texts(plan: BuildPlan, one: CorpusSource, progress: Progress) -> list[TokenFile]:
    """Tokenise a source's texts, if it has any, into one file."""
    texts = one.texts
    if not texts or plan.tokenizer is None:
        return []
    output = plan.output / TOKENS / f"{one.name}.bin"
    output.parent.mkdir(exist_ok=True)
    meter = _Meter(progress, f"tokens of {one.name}", sum(file.stat().st_size for file in texts))
    return [write_tokens(texts, plan.key, plan.tokenizer, output, meter.advance)]


def _list_documents(files: Sequence[Sequence[TokenFile]]) -> list[Documents]:
    found, at = [], 0
    for of_source in files:
        numbers = [np.full(len(f.starts), at + i, np.int64) for i, f in enumerate(of_source)]
        starts, tokens = [f.starts for f in of_source], [f.tokens for f in of_source]
        found.append(Documents(*(np.concatenate(parts) for parts in (numbers, starts, tokens))))
        at += len(of_source)
    return found


def _source_entry(plan: BuildPlan, name: str, files: Sequence[TokenFile], progress: Progress) -> dict[str, Any]:
    """Return a source's entry of the manifest; a path inside the directory is relative to it, another is absolute."""
    listed = []
    meter = _Meter(progress, f"checksum of {name}", sum(file.path.stat().st_size for file in files))
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
                "xxh3": index.file_checksum(file.path, meter.advance),
            }
        )
    return {"name": name, "files": listed}
