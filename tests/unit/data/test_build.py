"""A data set holds every token of its sources once, says so when it does not, and reads the same everywhere."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dips.data import DataSet, app
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.data.deal import DOCUMENT
from dips.data.documents import Tokenizer, make_tokenizer
from dips.errors import ConfigError, Corrupt

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "naïve", "café", "résumé"]


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture(name="corpus")
def made_corpus(tmp_path: Path) -> Path:
    """Three sources in three forms: JSON lines (one file packed), plain files, and tokens with their boundaries."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
    lines = [json.dumps({"text": text(i, 40 + i % 100)}) for i in range(300)]
    (tmp_path / "web" / "a.jsonl").write_text("\n".join(lines[:150]))
    (tmp_path / "web" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[150:]).encode()))
    for i in range(60):
        (tmp_path / "code" / f"{i:02}.py").write_text(text(1000 + i, 80))
    tokens = np.random.default_rng(5).integers(0, 256, 20_000).astype("<u2")
    np.save(tmp_path / "books.npy", tokens)
    np.save(tmp_path / "books.documents.npy", np.arange(0, 20_000, 500))
    return tmp_path


def sources(corpus: Path) -> tuple[str, ...]:
    return f"web={corpus}/web/*", f"code={corpus}/code", f"books={corpus}/books.npy"


def plan(corpus: Path, output: str = "set", ranges: int = 20, seed: int = 1, tolerance: float = 0.04) -> BuildPlan:
    made = make_tokenizer("bytes", None)
    chosen = tuple(parse_source(spec) for spec in sources(corpus))
    return BuildPlan(chosen, corpus / output, ranges, seed, made, tolerance=tolerance)


def all_tokens(data: DataSet) -> Counter[int]:
    return Counter(token for number in range(data.ranges) for token in data.tokens(number).tolist())


def test_every_token_is_there_once(corpus: Path) -> None:
    """Over all ranges the tokens are those of the sources, with an end after each document of text."""
    build_dataset(plan(corpus))
    expected: Counter[int] = Counter(np.load(corpus / "books.npy").tolist())
    for i in range(300):
        expected.update([*text(i, 40 + i % 100).encode(), 256])
    for i in range(60):
        expected.update([*text(1000 + i, 80).encode(), 256])
    assert all_tokens(DataSet(corpus / "set", verify=True)) == expected


def test_the_balance_holds_for_what_is_read(corpus: Path) -> None:
    """The printed lengths are those of what a reader gets, and ends of text are in every range."""
    built = build_dataset(plan(corpus))
    assert built.balance.deviation <= 0.04
    data = DataSet(corpus / "set")
    lengths = [len(data.tokens(number)) for number in range(data.ranges)]
    assert (min(lengths), max(lengths)) == (built.balance.shortest, built.balance.longest)
    ends = [int((data.tokens(number) == 256).sum()) for number in range(data.ranges)]
    assert min(ends) >= 10  # of 360: text is in every range


def test_the_same_seed_gives_the_same_bytes_elsewhere(corpus: Path) -> None:
    """Same sources and seed: same digest and batches in another directory; another seed: another data set."""
    digests = [build_dataset(plan(corpus, name, seed=seed)).digest for name, seed in (("x", 1), ("y", 1), ("z", 2))]
    assert digests[0] == digests[1] != digests[2]
    one, two = (list(DataSet(corpus / name).batches(3, 2, 64)) for name in ("x", "y"))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_ranks_share_a_range_and_a_cursor_goes_on(corpus: Path) -> None:
    """The ranks' sequences are disjoint and together those of one rank; `start` skips exactly what was trained."""
    build_dataset(plan(corpus))
    pickled = pickle.dumps(opened := DataSet(corpus / "set"))
    assert len(pickled) < opened._index.documents.nbytes / 2, "a worker's process maps its documents, too"
    data = pickle.loads(pickled)
    whole = list(data.batches(7, 4, 32))
    assert len(whole) == data.steps(7, 4, 32) > 10
    halves = [list(data.batches(7, 2, 32, rank, 2)) for rank in (0, 1)]
    for i, batch in enumerate(whole):
        assert (batch[0::2] == halves[0][i]).all() and (batch[1::2] == halves[1][i]).all()
    rest = list(data.batches(7, 4, 32, start=10))
    assert len(rest) == len(whole) - 10 and (rest[0] == whole[10]).all()


def test_an_epoch_has_the_same_tokens_in_another_order(corpus: Path) -> None:
    """Range ranges + 7 is range 7 in the second epoch."""
    build_dataset(plan(corpus))
    data = DataSet(corpus / "set")
    first, second = (np.concatenate(list(data.batches(n, 1, 32))) for n in (7, 7 + data.ranges))
    assert not np.array_equal(first, second)
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))


def test_what_was_changed_is_found(corpus: Path) -> None:
    """A token file of another size, of other bytes, an edited manifest, a missing file: each is named."""
    build_dataset(plan(corpus))
    directory, web = corpus / "set", corpus / "set" / "tokens" / "web.bin"
    good = web.read_bytes()
    web.write_bytes(good[:-2])
    with pytest.raises(Corrupt, match=r"web.bin: expected \d+ bytes"):
        DataSet(directory)
    web.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    DataSet(directory)  # a look at sizes is quick and sees nothing
    with pytest.raises(Corrupt, match=r"web.bin: its checksum"):
        DataSet(directory, verify=True)
    web.write_bytes(good)
    manifest = directory / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(Corrupt, match="edited"):
        DataSet(directory)
    with pytest.raises(ConfigError, match="no data set"):
        DataSet(corpus / "elsewhere")


@pytest.mark.parametrize("name", ["documents.npy", "ranges.npy"])
def test_a_data_set_that_is_half_copied_is_refused(corpus: Path, name: str) -> None:
    """Its manifest comes first in the alphabet: a copy that is under way has it, and not what it lists."""
    build_dataset(plan(corpus))
    (corpus / "set" / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: a file of the data set cannot be read: No such file"):
        DataSet(corpus / "set")


@pytest.mark.parametrize("tokens", [50, 1_000_000])
def test_tokens_that_were_written_anew_under_a_reader_are_not_read(corpus: Path, tokens: int) -> None:
    """Files are opened when they are first read, by each worker anew: by then they may be of another data set."""
    build_dataset(plan(corpus))
    data = DataSet(corpus / "set")
    for path in (corpus / "set" / "tokens").iterdir():
        np.zeros(tokens, np.uint16).tofile(path)
    for read in (lambda: data.tokens(0), lambda: list(data.batches(0, 1, 32))):
        with pytest.raises(Corrupt, match=rf"expected \d+ bytes, it has {2 * tokens}"):
            read()


def test_what_a_killed_build_left_is_no_source(corpus: Path) -> None:
    """The data set is made in a directory of its source; the same command again reads the texts alone."""
    spec, output, reader = f"x={corpus}/code", corpus / "code" / "set", make_tokenizer("bytes", None)
    (output / "tokens").mkdir(parents=True)
    (output / "tokens" / "x.bin").write_bytes(bytes(1000))
    np.save(output / "documents.npy", np.empty(2, DOCUMENT))
    np.save(output / "ranges.npy", np.arange(3))
    (output / "dataset.json.new").write_text("{}\n")
    build_dataset(BuildPlan((parse_source(spec),), output, 2, 0, reader))
    made = DataSet(output)
    build_dataset(BuildPlan((parse_source(f"x={corpus}/code/*.*"),), corpus / "other", 2, 0, reader))
    assert made.digest == DataSet(corpus / "other").digest


def test_token_files_in_a_directory_of_the_builds_own_name_are_read(corpus: Path) -> None:
    """A user's own tokens/ in the directory of the data set was taken for a killed build's, and left out unsaid."""
    (corpus / "tokens").mkdir()
    for file in ("books.npy", "books.documents.npy"):
        (corpus / file).rename(corpus / "tokens" / file)
    np.arange(256, dtype="<u2").tofile(corpus / "tokens" / "more.bin")
    chosen = parse_source(f"books={corpus}/tokens"), parse_source(f"code={corpus}/code")
    reader = make_tokenizer("bytes", None)
    built = build_dataset(BuildPlan(chosen, corpus, 2, 0, reader, dtype="uint16", eos=255))
    assert built.sources[0] == 20_000 + 256


def test_bad_sources_are_refused(corpus: Path) -> None:
    """Each message names the file and what was expected."""
    (corpus / "bad.jsonl").write_text('{"text": "good"}\n{"body": "bad"}\n')
    (corpus / "raw.bin").write_bytes(bytes(100))
    np.save(corpus / "floats.npy", np.zeros(10))
    np.save(corpus / "few.npy", np.zeros(10, np.uint16))
    for spec, words in (
        ("x=nowhere/*", "there is no file"),
        ("nowhere", "NAME=PATH"),
        (f"Web pages={corpus}/code", "source name 'Web pages' is not usable"),
        (f"x={corpus}/bad.jsonl", r"bad.jsonl, line 2"),
        (f"x={corpus}/raw.bin", "--dtype"),
        (f"x={corpus}/floats.npy", "whole numbers as tokens"),
        (f"x={corpus}/few.npy", "few.documents.npy beside it, or --eos"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_dataset(BuildPlan((parse_source(spec),), corpus / "bad", 2, 0, make_tokenizer("bytes", None)))
    with pytest.raises(ConfigError, match="give --tokenizer"):
        build_dataset(BuildPlan((parse_source(f"x={corpus}/code"),), corpus / "bad", 2, 0))


@pytest.mark.parametrize(
    ("tokens", "words"), [([1, 2], "or --eos"), ([-1, 0], "tokens of 0 or more, got -1"), ([], r"with the key 'text'")]
)
def test_all_sources_are_looked_at_before_text_is_tokenised(tmp_path: Path, tokens: list[int], words: str) -> None:
    """What is wrong with a later one, as its key, was said when all text before it was tokenised, after hours."""
    calls, made = list[int](), make_tokenizer("bytes", None)
    made = replace(made, encode=lambda texts: (calls.append(len(texts)), [[1]] * len(texts))[1])
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "b.npy", np.array(tokens, np.int16))
    if -1 in tokens:
        np.save(tmp_path / "b.documents.npy", np.zeros(1, np.int64))
    (tmp_path / "b.jsonl").write_text('{"content": "a"}')
    later = tmp_path / ("b.npy" if tokens else "b.jsonl")
    chosen = tuple(parse_source(spec) for spec in (f"a={tmp_path}/a.txt", f"b={later}"))
    with pytest.raises(ConfigError, match=words):
        build_dataset(BuildPlan(chosen, tmp_path / "set", 1, 0, made))
    assert calls == []


@pytest.mark.parametrize(("most", "kind"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_tokens_are_those_of_the_vocabulary(tmp_path: Path, most: int, kind: str) -> None:
    """From 0 to the last one, in as few bytes as hold it; who makes others has them named."""
    (tmp_path / "a.txt").write_text("text")
    source, made = (parse_source(f"x={tmp_path}/a.txt"),), list[int]()
    own = Tokenizer("own", lambda texts: [made for _ in texts], most, 1)
    made[:] = [0, most - 1]
    build_dataset(BuildPlan(source, tmp_path / "set", 1, 0, own))
    (tokens,) = (DataSet(tmp_path / "set").tokens(number) for number in range(1))
    assert tokens.tolist() == [0, most - 1, 1] and str(tokens.dtype) == kind
    for odd in (-1, most):
        made[:] = [2, odd]
        with pytest.raises(ConfigError, match=f"own made token {odd}, expected 0 to below {most}"):
            build_dataset(BuildPlan(source, tmp_path / "bad", 1, 0, own))


def test_what_lies_beside_tokens_is_no_source(tmp_path: Path) -> None:
    """Boundaries of documents, and Megatron's index of a file that is there; another file may have any name."""
    for name in ("a.npy", "a.documents.npy", "b.bin", "b.idx", "c.idx", ".hidden"):
        (tmp_path / name).touch()
    for where in (tmp_path, tmp_path / "*"):
        assert [path.name for path in parse_source(f"x={where}").files] == ["a.npy", "b.bin", "c.idx"]


def test_a_pattern_reaches_as_deep_as_a_directory(tmp_path: Path) -> None:
    """`**` are directories at any depth, as in a shell: what lies deeper would be missing, and nothing would say so."""
    paths = [tmp_path / "web" / name for name in ("a.txt", "b/b.txt", "b/c/c.txt")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    for where in (f"{tmp_path}/web", f"{tmp_path}/web/**/*.txt", f"{tmp_path}/**/**/*.txt"):
        assert list(parse_source(f"x={where}").files) == paths, where


@pytest.mark.parametrize("where", ["", "/*.txt", "/b.txt"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, where: str) -> None:
    """As a cache or git-annex has them of files that were not fetched: the data set would lack these."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "blobs" / "b")
    with pytest.raises(ConfigError, match=r"b\.txt is a link to a file that is not there"):
        parse_source(f"x={tmp_path}{where}")


@pytest.mark.parametrize("where", ["", "/**/*.txt"])
def test_a_file_that_is_found_twice_is_named(tmp_path: Path, where: str) -> None:
    """As in a cache, whose snapshots are links to its blobs: each document would have been trained twice."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a.txt").write_text("text")
    (tmp_path / "snapshot").symlink_to(tmp_path / "blobs")
    with pytest.raises(ConfigError, match=r"blobs/a\.txt and .*snapshot/a\.txt are one file"):
        parse_source(f"x={tmp_path}{where}")
    assert [path.name for path in parse_source(f"x={tmp_path}/snapshot").files] == ["a.txt"]


def test_documents_that_end_with_a_token(corpus: Path) -> None:
    """Without boundaries beside it, a raw file is split after each end token; nothing of it is copied."""
    rows = [*[[5, 6, 0]] * 50, *[[7, 0]] * 50]
    (corpus / "raw.bin").write_bytes(np.concatenate(rows).astype("<u4").tobytes())
    built = build_dataset(
        BuildPlan((parse_source(f"x={corpus}/raw.bin"),), corpus / "raw", 5, 0, dtype="uint32", eos=0)
    )
    assert (built.documents, built.tokens) == ((100,), 250)
    assert not (corpus / "raw" / "tokens").exists()
    assert all_tokens(DataSet(corpus / "raw")) == Counter({0: 100, 5: 50, 6: 50, 7: 50})


def test_the_word_prints_the_balance(corpus: Path) -> None:
    """`dips data build` ends 0 when the ranges are fair and 1 when they are not, and says by how much."""
    words = [word for spec in sources(corpus) for word in ("--source", spec)]
    wanted = ["build", *words, "--tokenizer", "bytes", "--ranges", "20"]
    fair = CliRunner().invoke(app.words, [*wanted, "-o", str(corpus / "fair"), "--tolerance", "0.04"])
    assert fair.exit_code == 0, fair.output
    assert "balanced: no share is off by more than" in fair.stdout and "books" in fair.stdout
    assert "vocabulary: 257, of bytes" in fair.stdout and "no document was cut" not in fair.stdout
    held = DataSet(corpus / "fair")
    lengths = [len(held.tokens(number)) for number in range(20)]
    ends = rf"a range\W+{sum(lengths) / 20:.0f}\W+{min(lengths)}\W+{max(lengths)}\W"
    assert re.search(ends, fair.stdout), "the mean, the shortest and the longest"
    assert re.search(r"\d+ documents of more than \d+ tokens were cut into \d+ pieces", fair.stdout)
    unfair = CliRunner().invoke(
        app.words, [*wanted, "-o", str(corpus / "unfair"), "--cut", "0", "--tolerance", "0.002"]
    )
    assert unfair.exit_code == 1 and "NOT BALANCED" in unfair.stdout
    shown = CliRunner().invoke(app.words, ["show", str(corpus / "fair"), "--verify"])
    assert shown.exit_code == 0 and DataSet(corpus / "fair").digest in shown.stdout
    assert "vocabulary: 257, of bytes" in shown.stdout
    assert re.search(rf"books\W+20000\W+{20_000 / sum(lengths):.2%}", shown.stdout)


def test_a_range_smaller_than_a_step_is_refused(corpus: Path) -> None:
    """With what is long enough; nothing is written then, and the same directory takes the next try."""
    chosen = (parse_source(f"books={corpus}/books.npy"),)
    with pytest.raises(ConfigError, match=r"shortest range has 1000 tokens, an inner step takes 1024 .* about 19 "):
        build_dataset(BuildPlan(chosen, corpus / "small", 20, 1, step_tokens=1024))
    with pytest.raises(ConfigError, match="shortest range has 1000 tokens, an inner step takes 1000"):
        build_dataset(BuildPlan(chosen, corpus / "small", 19, 1, step_tokens=1000))
    built = build_dataset(BuildPlan(chosen, corpus / "small", 19, 1, step_tokens=999))
    assert built.balance.shortest == 1000


@pytest.mark.parametrize(("cut", "documents", "pieces"), [(500, 0, 0), (499, 40, 80)])
def test_longer_documents_are_cut_as_said(corpus: Path, cut: int, documents: int, pieces: int) -> None:
    """One of exactly that length is whole."""
    chosen = (parse_source(f"books={corpus}/books.npy"),)
    built = build_dataset(BuildPlan(chosen, corpus / "cut", 20, 1, cut=cut))
    assert (built.cut, built.cut_documents, built.cut_pieces) == (cut, documents, pieces)


def test_a_vocabulary_of_tokens_is_counted(corpus: Path) -> None:
    """Of files that came as tokens it is one more than the largest; beside text, the tokenizer's if that is more."""
    chosen = (parse_source(f"books={corpus}/books.npy"),)
    largest = int(np.load(corpus / "books.npy").max())
    assert build_dataset(BuildPlan(chosen, corpus / "books", 20, 1)).vocabulary == largest + 1
    assert build_dataset(plan(corpus)).vocabulary == 257


def test_progress_ends_with_all_of_it(corpus: Path) -> None:
    """Each piece of the work ends at 100 %, packed files and those with empty lines at the end, too."""
    with (corpus / "web" / "a.jsonl").open("a") as file:
        file.write("\n\n\n")
    shown: dict[str, tuple[int, int]] = {}

    def show_progress(what: str, done: int, total: int) -> None:
        shown[what] = (done, total)

    build_dataset(plan(corpus), show_progress)
    names = {f"{piece} of {name}" for piece in ("tokens", "checksum") for name in ("web", "code")}
    assert {*shown} == names | {"checksum of books"}
    assert all(done == total > 0 for done, total in shown.values())
