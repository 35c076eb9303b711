"""Documents are dealt once each, fairly, and in an order that a seed alone decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.data.deal import Documents, cut_of, deal_documents, deal_rows, shuffle_numbers, weigh_sources
from dips.errors import ConfigError


def documents(*tokens: int, file: int = 0) -> Documents:
    lengths = np.array(tokens, np.int64)
    return Documents(np.full(len(lengths), file), np.cumsum(lengths) - lengths, lengths)


def test_an_order_is_a_permutation_and_never_changes() -> None:
    """These numbers are what data sets of released versions were dealt by: they stay."""
    assert shuffle_numbers(8, 1).tolist() == GOLDEN
    assert sorted(shuffle_numbers(1000, 7, 3)) == list(range(1000))
    assert (
        shuffle_numbers(1000, 7, 3).tolist()
        != shuffle_numbers(1000, 7, 4).tolist()
        != shuffle_numbers(1000, 3, 7).tolist()
    )


GOLDEN = [6, 0, 7, 3, 5, 2, 4, 1]


@given(
    sizes=st.lists(st.lists(st.integers(1, 400), min_size=30, max_size=60), min_size=1, max_size=4),
    ranges=st.integers(1, 16),
    seed=st.integers(0, 2**40),
)
def test_every_token_is_in_one_range(sizes: list[list[int]], ranges: int, seed: int) -> None:
    """However it is cut and dealt, each token of each source is in exactly one range."""
    sources = [documents(*lengths, file=i) for i, lengths in enumerate(sizes)]
    dealt = deal_documents(sources, ranges, seed, cut=64)
    assert int(dealt.bounds[-1]) == len(dealt.documents) and (np.diff(dealt.bounds) >= 0).all()
    for i, lengths in enumerate(sizes):
        seen = np.zeros(sum(lengths), np.int64)
        for _, tokens, start in dealt.documents[dealt.documents["file"] == i].tolist():
            assert tokens <= 64
            seen[start : start + tokens] += 1
        assert (seen == 1).all()
    assert dealt.shares.sum() == sum(map(sum, sizes))


def test_ranges_are_fair_samples() -> None:
    """A big, a middling and a small source with documents of all lengths: every range has its share of each."""
    rng = np.random.default_rng(0)
    lengths = [rng.integers(10, 2000, n) for n in (10_000, 2_500, 400)]
    sources = [documents(*map(int, l), file=i) for i, l in enumerate(lengths)]
    total, ranges = sum(int(l.sum()) for l in lengths), 32
    fair = weigh_sources(deal_documents(sources, ranges, 1, cut_of(total, ranges, 0.01)).shares)
    assert fair.deviation < 0.01
    assert fair.longest - fair.shortest < 0.03 * fair.mean
    one_after_another = np.array_split(
        np.concatenate([np.full(int(l.sum()), i) for i, l in enumerate(lengths)]), ranges
    )
    unfair = weigh_sources(np.array([np.bincount(part, minlength=3) for part in one_after_another]))
    assert unfair.deviation > 0.5  # the check bites


def test_a_balance_names_the_largest_difference() -> None:
    """Of a source's share of a range and of all, whichever side; an empty range has no share, and nothing is divided by
    no token.
    """
    found = weigh_sources(np.array([[9, 1], [1, 1], [0, 0]]))
    assert [(source.share, source.least, source.most) for source in found.sources] == [
        (pytest.approx(10 / 12), 0.0, 0.9), (pytest.approx(2 / 12), 0.0, 0.5)
    ]  # fmt: skip
    assert [source.deviation for source in found.sources] == pytest.approx([10 / 12, 4 / 12])
    assert found.deviation == pytest.approx(10 / 12) and (found.shortest, found.mean, found.longest) == (0, 4.0, 10)
    assert weigh_sources(np.zeros((2, 1), np.int64)).deviation == 0.0


def test_documents_are_cut_no_shorter_than_is_worth_it() -> None:
    """A source's share may be off by the tolerance; pieces of a few tokens teach little."""
    assert (cut_of(1_000_000, 10, 0.01), cut_of(1_000, 10, 0.01)) == (1_000, 256)


def test_one_long_document_is_cut() -> None:
    """A source of one document is in all ranges, if it may be cut; else it is in one, and the balance says so."""
    sources = [documents(*[100] * 400), documents(10_000, file=1)]
    assert weigh_sources(deal_documents(sources, 8, 0, cut_of(50_000, 8, 0.05)).shares).deviation < 0.05
    assert weigh_sources(deal_documents(sources, 8, 0).shares).deviation > 0.4


def test_a_document_that_a_row_of_the_index_cannot_hold_is_refused() -> None:
    """Its length has 32 bits there: the rest of its tokens would be in no range."""
    whole = documents((1 << 32) - 1)
    assert deal_documents([whole], 1, 0, cut=0).documents["tokens"].tolist() == [(1 << 32) - 1]
    with pytest.raises(ConfigError, match=r"a document of 4294967296 tokens: .*--cut"):
        deal_documents([documents(5), documents(1 << 32)], 1, 0, cut=0)


def test_rows_of_a_table_are_dealt_by_source() -> None:
    """Every row is in one range, and each range has its share of both sources."""
    sources = ["a"] * 300 + ["b"] * 100
    dealt = deal_rows(400, 10, 5, sources)
    assert sorted(np.concatenate(dealt)) == list(range(400))
    assert all((rows >= 300).sum() == 10 and len(rows) == 40 for rows in dealt)


@pytest.mark.parametrize("ranges", [0, 500])
def test_too_few_tokens_or_ranges(ranges: int) -> None:
    """An empty range would be a lie."""
    with pytest.raises(ConfigError, match="ranges: expected 1 to 400"):
        deal_documents([documents(*[10] * 40)], ranges, 0)


def test_what_is_empty_is_named() -> None:
    """A source without a token, and a table without a row."""
    with pytest.raises(ConfigError, match="source number 2 has no token"):
        deal_documents([documents(5, 5), documents()], 2, 0)
    with pytest.raises(ConfigError, match="source number 1 has no token"):
        deal_documents([documents()], 2, 0)
    with pytest.raises(ConfigError, match="ranges"):
        deal_rows(0, 4, 0)
    with pytest.raises(ConfigError, match="sources: expected one for each of 4 rows, got 3"):
        deal_rows(4, 2, 0, ["a", "a", "b"])


def test_a_small_source_is_dealt_as_far_as_it_goes() -> None:
    """Fewer rows than ranges: some ranges have one, none has two, and the balance is what it is."""
    dealt = deal_rows(103, 10, 0, ["a"] * 100 + ["b"] * 3)
    assert sorted((rows >= 100).sum() for rows in dealt) == [0] * 7 + [1] * 3
