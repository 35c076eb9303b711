"""Documents come out of a file as they went in, however it is packed; what is no text is refused by its name."""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dips.data import documents
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.data.documents import check_texts, make_tokenizer, read_documents
from dips.errors import ConfigError

TEXTS = [f"The naïve fox number {i} jumps over the lazy dog." for i in range(2000)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def zstd(content: bytes) -> bytes:
    return bytes(importlib.import_module("backports.zstd").compress(content))


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def parquet(path: Path, **columns: Any) -> Path:
    arrow: Any = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    return path


def texts_of(path: Path) -> list[str]:
    check_texts("web", [path])
    return [text for text, _ in read_documents(path, "text")]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("form", [".jsonl", ".ndjson", ".json"])
def test_records_are_read_however_they_are_packed(tmp_path: Path, form: str, suffix: str) -> None:
    """Compressed files were tokenised as they lay on the disk, without a word: the Pile's and the Hub's usual forms."""
    path = tmp_path / f"a{form}{suffix}"
    path.write_bytes(PACK[suffix](LINES))
    assert texts_of(path) == TEXTS
    assert [at for _, at in read_documents(path, "text")][-1] == path.stat().st_size


@pytest.mark.parametrize("suffix", PACK)
def test_plain_text_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix]("naïve\n".encode() * 1000))
    assert texts_of(path) == ["naïve\n" * 1000]


def test_two_frames_of_zstandard_are_both_read(tmp_path: Path) -> None:
    """As pzstd and `cat a.zst b.zst` write them."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd(LINES) + zstd(LINES))
    assert texts_of(path) == TEXTS * 2


def test_strings_of_parquet_that_are_no_utf_8_are_named(tmp_path: Path) -> None:
    """A writer may put any bytes into a column of strings."""
    arrow: Any = importlib.import_module("pyarrow")
    ends, text = arrow.array([0, 2], arrow.int32()).buffers()[1], arrow.py_buffer(b"\xff\xfe")
    path = parquet(tmp_path / "a.parquet", text=arrow.Array.from_buffers(arrow.string(), 1, [None, ends, text]))
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read to its end: 'utf-8' codec"):
        texts_of(path)


def test_a_column_of_parquet_is_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", id=range(2000), text=TEXTS)
    found = list(read_documents(path, "text"))
    assert [text for text, _ in found] == TEXTS and found[-1][1] == path.stat().st_size
    with pytest.raises(ConfigError, match="expected the column 'body', got id, text"):
        list(read_documents(path, "body"))
    nothing = parquet(tmp_path / "b.parquet", text=["a", None])
    with pytest.raises(ConfigError, match="row 2: expected text under 'text', got nothing"):
        list(read_documents(nothing, "text"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_ends_too_early_is_named(tmp_path: Path, name: str) -> None:
    """Its end would be missing in the data set."""
    path = tmp_path / name
    if name == "a.parquet":
        parquet(path, text=TEXTS)
    else:
        path.write_bytes(PACK[path.suffix](LINES))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read to its end"):
        list(read_documents(path, "text"))


REFUSED = {
    "picture.txt": (bytes(range(256)) * 40, "zero bytes"),
    "latin.txt": ("café ".encode("latin-1") * 100, "expected UTF-8"),
    "wide.txt": ("text ".encode("utf-16") * 100, "zero bytes"),
    "inside.txt.gz": (gzip.compress("café ".encode("latin-1") * 100), "expected UTF-8"),
    "array.json": (json.dumps([{"text": "a"}]).encode(), "a JSON array, expected an object a line: jq -c"),
    "text.jsonl.zst": (LINES, "its name says zstd, its first bytes do not"),
    "not-fetched.jsonl.gz": (b"", "its name says gzip, its first bytes do not"),
    "text.parquet": (LINES, "do not agree whether it is Parquet"),
    "archive.zip": (b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(range(256)), "zero bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    content, reason = REFUSED[name]
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / name).write_bytes(content)
    good = tmp_path / "good.txt"
    good.write_text("good")
    sources = parse_source(f"good={good}"), parse_source(f"web={tmp_path}/web")
    with pytest.raises(ConfigError, match=rf"source web: 1 of 1 files .*\n.*{name}: .*{reason}"):
        build_dataset(BuildPlan(sources, tmp_path / "set", 2, 0, make_tokenizer("bytes", None)))
    assert not (tmp_path / "set").exists()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.txt: cannot be read: No such file"):
        check_texts("web", [tmp_path / "gone.txt"])


def test_many_refused_files_are_counted(tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / f"{i}.txt").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"9 of 9 files(.*\n)+  and 4 more"):
        check_texts("web", sorted(tmp_path.iterdir()))
    with pytest.raises(ConfigError, match=r"5 of 5 files(.*\n)+.*4\.txt: [^\n]*$"):
        check_texts("web", sorted(tmp_path.iterdir())[:5])


def test_a_stray_byte_is_forgiven_and_another_encoding_later_on_is_not(tmp_path: Path) -> None:
    """One wrong byte in a source file of 20 kB is no reason to stop a corpus; a file that turns into Latin-1 is."""
    path = tmp_path / "a.c"
    path.write_bytes(b"int x;\n" * 3000 + b"// caf\xe9\n")
    assert texts_of(path)[0].endswith("// caf\ufffd\n")
    path.write_bytes(b"// caf\xe9\n")
    assert texts_of(path), "a short file, too, may have one"
    path.write_bytes(b"// \xe9\xe9\n")
    with pytest.raises(ConfigError, match="no text that can be read"):
        check_texts("code", [path])
    path.write_bytes(b"int x;\n" * 20_000 + b"// caf\xe9\n" * 2000)
    with pytest.raises(ConfigError, match=r"a\.c: expected UTF-8"):
        texts_of(path)


def test_half_a_pair_of_surrogates_is_forgiven(tmp_path: Path) -> None:
    """As JSON has them where a text was cut inside an emoji: no tokenizer takes them, and there is no UTF-8 of them."""
    path = tmp_path / "web.jsonl"
    path.write_text('{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    assert texts_of(path) == ["cut \ufffd", "whole \U0001f600"]
    build_dataset(BuildPlan((parse_source(f"x={path}"),), tmp_path / "set", 1, 0, make_tokenizer("bytes", None)))


def test_long_documents_are_not_tokenised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 blocks of a text file were: a file of 4 GB lay in memory several times over, and the build was killed."""
    monkeypatch.setattr(documents, "TEXT_BLOCK", 1000)
    (tmp_path / "long.txt").write_text("all of it\n" * 1000)
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n' * 600)
    calls, bytewise = list[int](), make_tokenizer("bytes", None)

    def encode(texts: Sequence[str]) -> Sequence[Any]:
        calls.append(sum(map(len, texts)))
        return bytewise.encode(texts)

    made = replace(bytewise, encode=encode)
    files = [tmp_path / "long.txt", tmp_path / "short.jsonl"]
    tokens = documents.write_tokens(files, "text", made, tmp_path / "tokens.bin", lambda _: None).tokens
    assert tokens.tolist() == [1011] * 9 + [911] + [2] * 600 and calls == [1010] * 9 + [910] + [256, 256, 88]


def test_one_source_is_of_one_kind(tmp_path: Path) -> None:
    """A dataset's README is not trained, nor what git keeps beside it."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / ".gitattributes").write_text("*.jsonl filter=lfs")
    assert [file.name for file in parse_source(f"web={tmp_path}").files] == ["a.jsonl"]
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(ConfigError, match=r"records \(.*a\.jsonl\) and plain text \(.*README\.md\): name one kind"):
        check_texts("web", parse_source(f"web={tmp_path}").files)


def test_a_relative_pattern_is_read_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("web").mkdir()
    Path("web/a.jsonl").write_bytes(LINES)
    assert parse_source("web=web/*.jsonl").files == parse_source("web=web").files == (Path("web/a.jsonl"),)


def test_a_tokenizer_of_one_s_own_stands_beside_where_the_command_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MODULE:FUNCTION is found in the working directory; what it returns must be a tokenizer."""
    (tmp_path / "mytokens.py").write_text(
        "from dips.data.documents import Tokenizer\n"
        "def build(): return Tokenizer('mine', lambda texts: [[1] for _ in texts], 7, 0)\n"
        "def wrong(): return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    try:
        assert make_tokenizer("mytokens:build", None).vocabulary == 7
        for spec, said in (
            ("mytokens:wrong", "expected a dips.data.documents.Tokenizer, got int"),
            ("mytokens:none", "no attribute 'none'"),
            ("nowhere:build", "No module named 'nowhere'"),
            ("mytokens", "MODULE:FUNCTION, got 'mytokens'"),
        ):
            with pytest.raises(ConfigError, match=said):
                make_tokenizer(spec, None)
    finally:
        sys.modules.pop("mytokens", None)
