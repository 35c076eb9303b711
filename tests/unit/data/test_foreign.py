"""Data sets that other libraries wrote are read as those libraries read them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dips.data import DataSet
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.data.documents import make_tokenizer
from dips.data.index import _check_starts, find_tokens
from dips.errors import ConfigError

SEQUENCES = [np.arange(10 * i, 10 * i + 3 + i, dtype=np.uint16) for i in range(40)]


def megatron(path: Path) -> Path:
    """Write Megatron's indexed data set byte for byte, with two sequences in every document."""
    path.with_suffix(".bin").write_bytes(b"".join(s.tobytes() for s in SEQUENCES))
    lengths = [len(s) for s in SEQUENCES]
    starts = [2 * (sum(lengths[:i])) for i in range(len(lengths))]
    documents = range(0, 41, 2)
    with path.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents)))
        index.write(np.array(lengths, "<i4").tobytes() + np.array(starts, "<i8").tobytes())
        index.write(np.array(documents, "<i8").tobytes())
    return path


def test_a_megatron_data_set_is_read_where_it_lies(tmp_path: Path) -> None:
    """Its documents are dealt whole, and over all ranges every token is there once."""
    found = find_tokens(megatron(tmp_path / "corpus").with_suffix(".bin"), None, None)
    assert found.tokens.tolist() == [len(SEQUENCES[i]) + len(SEQUENCES[i + 1]) for i in range(0, 40, 2)]
    build_dataset(BuildPlan((parse_source(f"m={tmp_path}/corpus.*"),), tmp_path / "set", 4, 0, cut=0))
    data = DataSet(tmp_path / "set")
    read = np.concatenate([data.tokens(number) for number in range(4)])
    assert sorted(read) == sorted(np.concatenate(SEQUENCES))
    assert read.dtype == np.uint16


@pytest.mark.parametrize("name", ["corpus.idx", "part[1].bin"])
def test_a_file_that_is_named_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    """An index stands for the tokens beside it, and brackets are no pattern where there is such a file."""
    path = megatron(tmp_path / name).with_name(name)
    (found,) = parse_source(f"m={path}").files
    assert find_tokens(found, None, None).path == path.with_suffix(".bin")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Megatron's own
def test_megatron_itself_wrote_it(tmp_path: Path) -> None:
    """megatron.core's own builder writes what we read."""
    library = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = library.IndexedDatasetBuilder(str(tmp_path / "real.bin"), dtype=np.int32)
    for first, second in zip(SEQUENCES[0::2], SEQUENCES[1::2], strict=True):
        builder.add_document(
            torch.from_numpy(np.concatenate([first, second]).astype(np.int32)), [len(first), len(second)]
        )
    builder.finalize(str(tmp_path / "real.idx"))
    found = find_tokens(tmp_path / "real.bin", None, None)
    assert found.tokens.tolist() == [len(SEQUENCES[i]) + len(SEQUENCES[i + 1]) for i in range(0, 40, 2)]
    assert found.open()[int(found.starts[3]) :][:4].tolist() == SEQUENCES[6][:4].tolist()


@pytest.mark.parametrize("scan_tokens", [1, 8, 13, 1000])
def test_documents_begin_behind_eos_however_much_is_looked_through_at_once(tmp_path: Path, scan_tokens: int) -> None:
    """As in a corpus of more than 16 M tokens, which is looked through in blocks."""
    ends = [6, 7, 8, 16, 23, 41]
    tokens = np.ones(50, np.uint16)
    tokens[ends] = 0
    np.save(tmp_path / "corpus.npy", tokens)
    found = find_tokens(tmp_path / "corpus.npy", None, 0, scan_tokens)
    assert found.starts.tolist() == [0, *(end + 1 for end in ends)] and int(found.tokens.sum()) == 50


@pytest.mark.parametrize(("cut", "words"), [(20, "40 tokens, as its header says, got 30"), (-6, "got 43"), (200, "")])
def test_a_row_of_another_length_than_its_header_says_is_refused(tmp_path: Path, cut: int, words: str) -> None:
    """A copy that was broken off at a whole token, or begins in the header; two that were written into one file."""
    path = tmp_path / "corpus.npy"
    np.save(path, np.arange(40, dtype=np.uint16))
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut] if cut > 0 else raw + raw[cut:])
    with pytest.raises(ConfigError, match=rf"corpus.npy: .*{words}"):
        find_tokens(path, None, 0)


@pytest.mark.parametrize("left", [0, 5, 100, 150])
def test_starts_that_were_half_copied_are_named(tmp_path: Path, left: int) -> None:
    """Nothing of the file, half of its magic, of its header and of its numbers."""
    np.save(tmp_path / "corpus.npy", np.arange(40, dtype=np.uint16))
    starts = tmp_path / "corpus.documents.npy"
    np.save(starts, np.arange(0, 40, 4))
    starts.write_bytes(starts.read_bytes()[:left])
    with pytest.raises(ConfigError, match=r"corpus.documents.npy: not a .npy file"):
        find_tokens(tmp_path / "corpus.npy", None, None)


@pytest.mark.parametrize("at", [0, 9, 17, -4])
def test_a_megatron_index_that_is_wrong(tmp_path: Path, at: int) -> None:
    """A wrong magic, version, dtype or document list is refused by name."""
    path = megatron(tmp_path / "corpus").with_suffix(".idx")
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"corpus.idx"):
        find_tokens(path, None, None)


@pytest.mark.parametrize(
    ("at", "words", "left"),
    [(0, b"", 17), (0, b"", 33), (26, bytes(8), None), (34 + 12 * 40, struct.pack("<q", 1), None)],
    ids=["half of its header", "all but a byte of it", "no documents", "documents that begin later"],
)
def test_a_megatron_index_that_names_too_little(tmp_path: Path, at: int, words: bytes, left: int | None) -> None:
    """By a sentence, not by a traceback; sequences before the first document would be trained by nobody."""
    path = megatron(tmp_path / "corpus").with_suffix(".idx")
    raw = path.read_bytes()
    path.write_bytes((raw[:at] + words + raw[at + len(words) :])[:left])
    with pytest.raises(ConfigError, match=r"corpus.idx"):
        find_tokens(path, None, None)


def test_tokens_of_another_type_than_they_were_written_with_are_refused(tmp_path: Path) -> None:
    """Tokens above 32,767 that are read as int16 are below 0, where no embedding is; a type that is none is named."""
    np.array([1, 40_000, 0], np.uint16).tofile(tmp_path / "t.bin")
    source = (parse_source(f"x={tmp_path}/t.bin"),)
    with pytest.raises(ConfigError, match=r"t\.bin: expected tokens of 0 or more, got -25536.*\(int16\)"):
        build_dataset(BuildPlan(source, tmp_path / "set", 1, 0, dtype="int16", eos=0))
    with pytest.raises(ConfigError, match="--dtype: expected uint16 or uint32, got 'u16'"):
        build_dataset(BuildPlan(source, tmp_path / "set", 1, 0, dtype="u16", eos=0))
    assert build_dataset(BuildPlan(source, tmp_path / "set", 1, 0, dtype="uint16", eos=0)).vocabulary == 40_001


def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    """A tokenizer.json is used, and its end token ends each document."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "?": 2, "</s>": 3}, unk_token="?"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("a b x " * 30)
    with pytest.raises(ConfigError, match="--eos-token"):
        make_tokenizer(str(tmp_path / "tokenizer.json"), None)
    reader = make_tokenizer(str(tmp_path / "tokenizer.json"), "</s>")
    build_dataset(BuildPlan((parse_source(f"x={tmp_path}/t.txt"),), tmp_path / "set", 1, 0, reader))
    assert DataSet(tmp_path / "set").tokens(0).tolist() == [0, 1, 2] * 30 + [3]


def test_a_vocabulary_is_no_tokenizer(tmp_path: Path) -> None:
    """As GPT-2's vocab.json, which lies beside it: the library's bare Exception named no file."""
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(ConfigError, match=r"vocab\.json: not a tokenizer\.json of Hugging Face"):
        make_tokenizer(str(tmp_path / "vocab.json"), "a")


def test_a_tokenizer_whose_numbers_have_gaps(tmp_path: Path) -> None:
    """Its vocabulary ends with its largest number, not with as many as it has tokens."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"a": 0, "?": 2, "</s>": 70_000}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("a")
    reader = make_tokenizer(str(tmp_path / "tokenizer.json"), "</s>")
    built = build_dataset(BuildPlan((parse_source(f"x={tmp_path}/t.txt"),), tmp_path / "set", 1, 0, reader))
    assert DataSet(tmp_path / "set").tokens(0).tolist() == [0, 70_000] and built.vocabulary == 70_001


def test_a_tokenizer_that_was_saved_with_truncation_cuts_and_pads_nothing(tmp_path: Path) -> None:
    """tokenizer.json keeps what it was last called with: each document lost its end, and short ones were filled up."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"a": 0, "[PAD]": 1, "</s>": 2}, unk_token="[PAD]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(pad_id=1, length=5)
    made.save(str(tmp_path / "tokenizer.json"))
    found = make_tokenizer(str(tmp_path / "tokenizer.json"), "</s>").encode(["a a a", "a"])
    assert [list(ids) for ids in found] == [[0, 0, 0], [0]]


@pytest.mark.parametrize("starts", [np.zeros((2, 2), np.int64), np.zeros(2), np.zeros(0, np.int64)])
def test_starts_that_are_no_row_of_numbers_are_refused(tmp_path: Path, starts: np.ndarray) -> None:
    """A table, fractions, and nothing at all, each of which would fail later by a stranger's words."""
    with pytest.raises(ConfigError, match="expected one row of whole numbers, got"):
        _check_starts(tmp_path, starts, 50)


@pytest.mark.parametrize("starts", [[50], [1, 3], [0, 5, 5], [0, 9, 4], [0, 60]])
def test_starts_that_do_not_rise_from_0_are_refused(tmp_path: Path, starts: list[int]) -> None:
    """Of a file of 50 tokens: none but its end, none at 0, twice the same, back, beyond the end."""
    with pytest.raises(ConfigError, match="expected numbers that rise from 0 and stay below 50"):
        _check_starts(tmp_path, np.array(starts), 50)
    assert _check_starts(tmp_path, np.array([0, 5, 50]), 50).tolist() == [0, 5]
