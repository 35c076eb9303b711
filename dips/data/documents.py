"""The documents of a source's files, read in blocks, and their tokenisation into a raw token file."""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from dips.data.deal import I64
from dips.data.index import TokenFile
from dips.errors import ConfigError
from dips.files import named_in_errors

# ---- documents ------------------------------------------------------------------------------------------------------
# The documents of a source's files, read in blocks, each with the number of bytes of its file read so far.
#
# | a file is | told by | a document is | |---|---|---| | records | .jsonl, .ndjson, .json (an object a line), .parquet
# | the text under a key | | plain text | anything else that is UTF-8 | the file, in blocks of TEXT_BLOCK |
#
# The compression of a file is told by its first bytes: gzip, bzip2, xz, Zstandard. Other files are refused by name
# before anything is read, since tokens of compressed or foreign bytes look like any others.


TEXT_BLOCK = 16 << 20  # longest document made from a plain file, in bytes
SNIFFED = 64 << 10  # bytes of each file that are checked before the first is read
MOST_REPLACED = 0.001  # of a block's characters: single bad bytes are accepted, another encoding is not
ROWS_AT_ONCE = 1024  # of a .parquet file
NAMED = 5  # most files that an error names
JSON_LINES = (".jsonl", ".ndjson", ".json")
PACKED = {  # first bytes, name
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
PACKED_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_PARQUET = b"PAR1"
_SURROGATES = re.compile("[\ud800-\udfff]")  # halves of pairs, which JSON may have and no tokenizer takes
_BAD_BYTES = (OSError, EOFError, lzma.LZMAError, zlib.error)

Document = tuple[str, int]  # (text, bytes of the file read so far)


def is_tokens(path: Path) -> bool:
    """Whether a file holds tokens already."""
    return path.suffix in (".npy", ".bin", ".idx")


def check_texts(source: str, files: Sequence[Path]) -> None:
    """Check the beginning of each text file of a source; raise ConfigError with the names of those that are no text.

    Files of one source must all be records or all plain text: a README beside records is not meant to be trained on.
    """
    refused = [f"{path}: {reason}" for path in files if (reason := _refusal_of(path))]
    if refused:
        more = f"\n  and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
        raise ConfigError(
            f"source {source}: {len(refused)} of {len(files)} files are no text that can be read:\n  "
            + "\n  ".join(refused[:NAMED])
            + more
        )
    kinds = {_is_records(path): path for path in files}
    if len(kinds) > 1:
        raise ConfigError(
            f"source {source}: expected files of one kind, got records ({kinds[True]}) and plain text "
            f"({kinds[False]}): name one kind by a pattern, as in {source}='{kinds[True].parent}/*{kinds[True].suffix}'"
        )


def read_documents(path: Path, key: str) -> Iterator[Document]:
    """Iterate over the documents of one file; raise ConfigError where it cannot be read."""
    if _first_bytes(path).startswith(_PARQUET):
        yield from _read_parquet(path, key)
        return
    read = _read_json_lines if _is_records(path) else _read_blocks
    with path.open("rb") as raw:
        try:
            yield from read(path, _unpack(path, raw), raw, key)
        except _bad_bytes() as error:
            raise ConfigError(f"{path}: cannot be read to its end: {error}") from error


# ---- kinds of files -------------------------------------------------------------------------------------------------


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(10)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _packing_of(path: Path) -> str | None:
    first = _first_bytes(path)
    return next((name for magic, name in PACKED.items() if first.startswith(magic)), None)


def _is_records(path: Path) -> bool:
    return path.suffix == ".parquet" or _inner_suffix(path) in JSON_LINES


def _inner_suffix(path: Path) -> str:
    """Return the last suffix, without one of a compression."""
    return Path(path.stem).suffix if path.suffix in PACKED_SUFFIXES else path.suffix


def _refusal_of(path: Path) -> str:
    """Return why a file cannot be read as text, from its beginning; empty if it can."""
    first, said = _first_bytes(path), PACKED_SUFFIXES.get(path.suffix)
    if (path.suffix == ".parquet") != first.startswith(_PARQUET):
        return "its name and its first bytes do not agree whether it is Parquet"
    if first.startswith(_PARQUET):
        return ""
    if said is not None and said != _packing_of(path):
        return f"its name says {said}, its first bytes do not"
    try:
        with path.open("rb") as raw:
            block = _unpack(path, raw).read(SNIFFED)
    except _bad_bytes() as error:
        return f"cannot be unpacked: {error}"
    if _inner_suffix(path) in JSON_LINES and block.lstrip()[:1] == b"[":
        return f"a JSON array, expected an object a line: jq -c '.[]' {path.name} > {path.stem}.jsonl"
    return _not_text(block)


def _not_text(block: bytes) -> str:
    """Return why bytes are not UTF-8 text; empty if they are. A character cut off at the block's end does not count."""
    text = block.decode(errors="replace")
    if b"\0" in block:
        return "expected text, got zero bytes: another encoding (iconv -t utf-8), or no text"
    if text.count("\ufffd") > max(1, MOST_REPLACED * len(text)):
        return "expected UTF-8, got other bytes: another encoding (iconv -t utf-8), or no text"
    return ""


def _unpack(path: Path, raw: IO[bytes]) -> IO[bytes]:
    packing = _packing_of(path)
    return cast(IO[bytes], _OPENERS[packing](raw)) if packing else raw


def _zstd() -> Any:
    for name in ("compression.zstd", "backports.zstd"):  # of Python 3.14 and newer; its copy for older ones
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError("Zstandard needs the package backports.zstd: pip install 'di-ps[data]'")


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": lambda raw: _zstd().ZstdFile(raw),
}


def _bad_bytes() -> tuple[type[Exception], ...]:
    """Return the exceptions of decompression; Zstandard's is included if its package is installed."""
    try:
        return (*_BAD_BYTES, _zstd().ZstdError)
    except ConfigError:
        return _BAD_BYTES


# ---- one reader for each kind ---------------------------------------------------------------------------------------


def _read_json_lines(path: Path, lines: IO[bytes], raw: IO[bytes], key: str) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text: Any = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: expected an object with the key {key!r}: {error!r}") from error
        if not isinstance(text, str):
            raise ConfigError(f"{path}, line {number}: expected text under {key!r}, got {type(text).__name__}")
        if text:
            yield _SURROGATES.sub("\ufffd", text), raw.tell()


def _read_blocks(path: Path, lines: IO[bytes], raw: IO[bytes], key: str) -> Iterator[Document]:
    while block := lines.read(TEXT_BLOCK):
        block += lines.readline(TEXT_BLOCK)  # ends at a line, not within a line or a character
        if reason := _not_text(block):
            raise ConfigError(f"{path}: {reason}")
        yield block.decode(errors="replace"), raw.tell()


def _read_parquet(path: Path, key: str) -> Iterator[Document]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs the package pyarrow: pip install 'di-ps[data]'") from error
    size, row = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            if key not in (names := file.schema_arrow.names):
                raise ConfigError(f"{path}: expected the column {key!r}, got {', '.join(names)} (--key)")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        found = "nothing" if text is None else type(text).__name__
                        raise ConfigError(f"{path}, row {row}: expected text under {key!r}, got {found}")
                    if text:
                        yield text, size * row // file.metadata.num_rows
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # a column may hold any bytes as strings
        raise ConfigError(f"{path}: cannot be read to its end: {error}") from error


# ---- text -----------------------------------------------------------------------------------------------------------
# Tokenisation of text: writes documents to a raw token file, and returns where each begins.
#
# Each document is followed by the tokenizer's `eos`.


AT_ONCE = 256  # documents that are tokenised in one call, or fewer that have TEXT_BLOCK characters together

Encode = Callable[[Sequence[str]], Sequence[npt.ArrayLike]]


@dataclass(frozen=True)
class Tokenizer:
    """Converts documents to token numbers below `vocabulary`; `eos` ends each."""

    name: str
    encode: Encode
    vocabulary: int
    eos: int

    @property
    def dtype(self) -> str:
        return "<u2" if self.vocabulary <= 1 << 16 else "<u4"


def make_tokenizer(spec: str, eos: str | None) -> Tokenizer:
    """Make a tokenizer from its name on the command line.

    spec  `bytes` (numbers 0 to 255 are the bytes of UTF-8, 256 is eos); a path of a Hugging Face tokenizer.json, whose
          end token `eos` names; or MODULE:FUNCTION, a function that returns a dips.data.documents.Tokenizer
    """
    if spec == "bytes":
        return Tokenizer(spec, lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts], 257, 256)
    if spec.endswith(".json"):
        return _hugging_face(Path(spec), eos)
    module, colon, function = spec.partition(":")
    if not colon:
        raise ConfigError(f"--tokenizer: expected bytes, a tokenizer.json or MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--tokenizer {spec}: {error}") from error
    if not isinstance(made, Tokenizer):
        raise ConfigError(f"--tokenizer {spec}: expected a dips.data.documents.Tokenizer, got {type(made).__name__}")
    return made


def _hugging_face(path: Path, eos: str | None) -> Tokenizer:
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(f"--tokenizer {path} needs the package tokenizers: pip install tokenizers") from error
    if not path.is_file():
        raise ConfigError(f"--tokenizer {path}: no such file")
    try:
        made = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other
        raise ConfigError(f"--tokenizer {path}: not a tokenizer.json of Hugging Face: {error}") from error
    made.no_truncation()  # the file keeps what it was last called with
    made.no_padding()
    end = made.token_to_id(eos) if eos else None
    if end is None:
        raise ConfigError(f"--tokenizer {path}: expected --eos-token to name one of its tokens, got {eos!r}")

    def encode_batch(texts: Sequence[str]) -> Sequence[npt.ArrayLike]:
        return [one.ids for one in made.encode_batch(list(texts), add_special_tokens=False)]

    return Tokenizer(path.name, encode_batch, max(made.get_vocab().values()) + 1, end)  # numbers may have gaps


def _split_batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Cut documents into batches for one call of a tokenizer, which takes many times their memory."""
    batch, length = list[Document](), 0
    for document in documents:
        batch.append(document)
        length += len(document[0])
        if len(batch) == AT_ONCE or length >= TEXT_BLOCK:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def write_tokens(
    files: Sequence[Path], key: str, made: Tokenizer, output: Path, progress: Callable[[int], None]
) -> TokenFile:
    """Tokenise `files` one after another into `output`; `progress` is called with the bytes of text that are done."""
    lengths = array("q")  # 8 bytes for each document, where a list takes 40
    with named_in_errors(output), output.open("wb") as out:
        for file in files:
            done = 0
            for block in _split_batches(read_documents(file, key)):
                for ids in made.encode([text for text, _ in block]):
                    row = np.append(np.asarray(ids, np.int64), made.eos)
                    if len(odd := row[(row < 0) | (row >= made.vocabulary)]):
                        raise ConfigError(
                            f"{file}: {made.name} made token {odd[0]}, expected 0 to below {made.vocabulary}"
                        )
                    out.write(row.astype(made.dtype).tobytes())
                    lengths.append(len(row))
                progress(block[-1][1] - done)
                done = block[-1][1]
            progress(file.stat().st_size - done)  # empty lines at its end, or the buffer of a compressed file
    tokens: I64 = np.array(lengths, np.int64)
    return TokenFile(output, made.dtype, 0, np.cumsum(tokens) - tokens, tokens)
