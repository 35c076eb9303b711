"""Tokenisation of text: writes documents to a raw token file, and returns where each begins.

Each document is followed by the tokenizer's `eos`.
"""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dips.data.documents import read_documents
from dips.data.order import I64
from dips.data.tokenfile import TokenFile
from dips.errors import ConfigError

AT_ONCE = 256  # documents that are tokenised in one call

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
          end token `eos` names; or MODULE:FUNCTION, a function that returns a dips.data.text.Tokenizer
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
        raise ConfigError(f"--tokenizer {spec}: expected a dips.data.text.Tokenizer, got {type(made).__name__}")
    return made


def _hugging_face(path: Path, eos: str | None) -> Tokenizer:
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(f"--tokenizer {path} needs the package tokenizers: pip install tokenizers") from error
    if not path.is_file():
        raise ConfigError(f"--tokenizer {path}: no such file")
    made = library.Tokenizer.from_file(str(path))
    end = made.token_to_id(eos) if eos else None
    if end is None:
        raise ConfigError(f"--tokenizer {path}: expected --eos-token to name one of its tokens, got {eos!r}")

    def encode_batch(texts: Sequence[str]) -> Sequence[npt.ArrayLike]:
        return [one.ids for one in made.encode_batch(list(texts), add_special_tokens=False)]

    return Tokenizer(path.name, encode_batch, made.get_vocab_size(), end)


def write_tokens(
    files: Sequence[Path], key: str, made: Tokenizer, output: Path, progress: Callable[[int], None]
) -> TokenFile:
    """Tokenise `files` one after another into `output`; `progress` is called with the bytes of text that are done."""
    lengths = array("q")  # 8 bytes for each document, where a list takes 40
    with output.open("wb") as out:
        for file in files:
            done = 0
            documents = read_documents(file, key)
            while block := list(islice(documents, AT_ONCE)):
                for ids in made.encode([text for text, _ in block]):
                    row = np.append(np.asarray(ids, np.int64), made.eos)
                    if row.min() < 0 or row.max() >= made.vocabulary:
                        raise ConfigError(
                            f"{file}: {made.name} made token {row.max()}, expected below {made.vocabulary}"
                        )
                    out.write(row.astype(made.dtype).tobytes())
                    lengths.append(len(row))
                progress(block[-1][1] - done)
                done = block[-1][1]
            progress(file.stat().st_size - done)  # empty lines at its end, or the buffer of a compressed file
    tokens: I64 = np.array(lengths, np.int64)
    return TokenFile(output, made.dtype, 0, np.cumsum(tokens) - tokens, tokens)
