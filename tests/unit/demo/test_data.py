"""The demo's data: the same on every rank, nobody's share is another's, validation is never trained on."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dips.demo import data
from dips.demo.data import BLOCK_BYTES, RANGE_BLOCKS, Corpus, bigram_entropy, from_files, source_files


@pytest.fixture(name="files")
def made_files(tmp_path: Path) -> list[Path]:
    """Forty files of 7 kB; every byte of a file is its number."""
    for number in range(40):
        (tmp_path / f"f{number:02}.py").write_bytes(bytes([number]) * 7000)
    return source_files(tmp_path)


def test_a_file_is_in_one_part(files: list[Path]) -> None:
    """Every twentieth file validates, and no byte of it is trained on."""
    corpus = from_files(files, seed=1)
    newline = {ord("\n")}
    assert set(corpus.validation.tolist()) == {0, 20} | newline
    assert not set(corpus.training.reshape(-1).tolist()) & ({0, 20} - newline)


def test_same_seed_same_ranges(files: list[Path]) -> None:
    """Two ranks that read the same files hold the same ranges; another seed orders them differently."""
    assert np.array_equal(from_files(files, 1).training, from_files(files, 1).training)
    assert not np.array_equal(from_files(files, 1).training, from_files(files, 2).training)


def test_what_is_left_out(tmp_path: Path) -> None:
    """Installed packages and files that are meant to be odd are no part of the text."""
    for name in ("a.py", "site-packages/b.py", "test/bad_coding.py", "lib2to3/tests/data/c.py", "d.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert source_files(tmp_path) == [tmp_path / "a.py"]


def numbered() -> Corpus:
    """Two ranges in which no two windows look alike."""
    blocks = np.random.default_rng(0).integers(0, 256, (2 * RANGE_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    return Corpus(blocks, blocks.reshape(-1)[:5000])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_range(world: int) -> None:
    """All ranks get as many batches, no sequence twice, every one a piece of the range's text, in any epoch."""
    corpus = numbered()
    shares = [list(corpus.batches(1, 4, 256, rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    rows = [row.tobytes() for share in shares for batch in share for row in batch]
    assert {batch.shape for share in shares for batch in share} == {(4, 257)}
    text = [block.tobytes() for block in corpus.training[RANGE_BLOCKS:]]
    assert all(any(row in block for block in text) for row in rows)
    assert max(Counter(rows).values()) == 1
    assert len(rows) > 0.8 * RANGE_BLOCKS * BLOCK_BYTES / 257 - 4 * world
    again = list(corpus.batches(1 + corpus.ranges, 4, 256, 0, world))
    assert all(np.array_equal(a, b) for a, b in zip(again, shares[0], strict=True))


def test_no_target_is_predicted_twice() -> None:
    """Sequences of one block overlap by the one byte that is only context of the next."""
    corpus = numbered()
    pairs = [pair for batch in corpus.batches(0, 1, 256) for row in batch for pair in pairwise(row)]
    assert len(pairs) == RANGE_BLOCKS * ((BLOCK_BYTES - 1) // 256) * 256


def test_sample_is_evenly_spaced() -> None:
    """The validation sample has first and last bytes of the text, and its rows are as asked."""
    corpus = numbered()
    sample = corpus.validation_sample(10, 99)
    assert sample.shape == (10, 100)
    assert np.array_equal(sample[0], corpus.validation[:100])
    assert np.array_equal(sample[-1], corpus.validation[-100:])


@pytest.mark.parametrize("seed", range(5))
def test_bigram_entropy_beside_its_reference(seed: int) -> None:
    """H(b|a) = −Σ p(a,b) ln p(b|a), counted with a dictionary."""
    sequences = np.random.default_rng(seed).choice([7, 8, 9, 200], (5, 40), p=[0.6, 0.2, 0.1, 0.1]).astype(np.uint8)
    pairs = Counter(pair for row in sequences.tolist() for pair in pairwise(row))
    heads: Counter[int] = Counter()
    for (a, _), n in pairs.items():
        heads[a] += n
    expected = -sum(n * math.log(n / heads[a]) for (a, _), n in pairs.items()) / pairs.total()
    assert bigram_entropy(sequences) == pytest.approx(expected)


def test_a_text_without_surprise_has_no_entropy() -> None:
    """What is determined by the byte before it costs nothing."""
    assert bigram_entropy(np.frombuffer(b"abcabcabcabc", np.uint8)[None]) == pytest.approx(0, abs=1e-12)


def test_this_machine_has_text_enough() -> None:
    """The standard library gives many more ranges than clusters, and its bigrams about 2.4 nats."""
    corpus = data.load_corpus(1)
    assert corpus.ranges > 50
    assert 2.0 < bigram_entropy(corpus.validation_sample(256, 256)) < 2.8
