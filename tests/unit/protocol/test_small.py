"""The small pure parts of the deciding room: placement, order of asking, data ranges, manifest, moves."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.errors import ConfigError, CorruptManifest, LocalProtocolError
from dips.ids import VersionId
from dips.protocol.data import BegunRange, Intervals, RangeBook
from dips.protocol.enums import ROUND_MOVES, RoundState, check_move
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import DataOptions
from dips.protocol.order import places_for_slave, slaves_for_worker
from dips.protocol.placement import place_layers

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=7)


def manifest_of(numels: list[int]) -> Manifest:
    return Manifest(tuple(Layer(f"layers.{i}", (Parameter(f"layers.{i}.w", (n,)),)) for i, n in enumerate(numels)))


def best_balance(numels: list[int], slaves: int) -> int:
    """The dumb reference: try every assignment, return the smallest possible largest load."""
    best = sum(numels)
    for code in range(slaves ** len(numels)):
        load = [0] * slaves
        for n in numels:
            code, slave = divmod(code, slaves)
            load[slave] += n
        best = min(best, max(load))
    return best


@given(sizes, st.integers(1, 3))
def test_placement_is_a_partition_near_the_best(numels: list[int], slaves: int) -> None:
    """Every layer lies on exactly one slave, and the fullest holds at most 4/3 of the best balance."""
    if slaves > len(numels):
        with pytest.raises(ConfigError, match="at most"):
            place_layers(manifest_of(numels), [f"s{i}" for i in range(slaves)])
        return
    placement = place_layers(manifest_of(numels), [f"s{i}" for i in range(slaves)])
    assert sorted(layer for _, layers in placement for layer in layers) == list(range(len(numels)))
    fullest = max(sum(numels[i] for i in layers) for _, layers in placement)
    assert 3 * fullest <= 4 * best_balance(numels, slaves)


@given(st.integers(1, 6), st.integers(1, 6))
def test_no_two_workers_meet_at_a_slave(workers: int, slaves: int) -> None:
    """In one turn a slave is visited by at most ⌈workers/slaves⌉; by one, if there are no more workers than slaves."""
    orders = [slaves_for_worker(w, slaves) for w in range(workers)]
    for turn in range(slaves):
        visited = [order[turn] for order in orders]
        assert max(visited.count(s) for s in set(visited)) <= -(-workers // slaves)
    assert all(sorted(order) == list(range(slaves)) for order in orders)


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_slave_asks_in_the_order_in_which_workers_turn_to_it(workers: int, slaves: int) -> None:
    """Both sides of the order of asking are one table, read by rows and by columns."""
    for slave in range(slaves):
        turns = tuple(slaves_for_worker(w, slaves).index(slave) for w in range(workers))
        assert places_for_slave(slave, slaves, 0, workers) == turns


@given(
    st.lists(st.tuples(st.sampled_from("lseu"), st.sampled_from("ab"), st.integers(1, 4)), max_size=30), st.booleans()
)
def test_every_range_has_exactly_one_fate(script: list[tuple[str, str, int]], requeue: bool) -> None:
    """Invariant 10: free, leased, settled and undone partition the data set, and nothing settled is leased again."""
    book, seqs = RangeBook(DataOptions(ranges=6, epochs=2), requeue=requeue), {"a": 0, "b": 0}
    settled, undone = set[int](), set[int]()
    for verb, cluster, count in script:
        if verb == "l":
            seqs[cluster] += 1
            taken, new = book.lease_ranges(cluster, 1, seqs[cluster], count)
            assert new
            assert not (settled | undone) & set(taken)
            assert book.lease_ranges(cluster, 1, seqs[cluster], count) == (taken, False)
        elif verb == "s":
            done = book.held_by(cluster, 1)[:count]
            book.settle_ranges(cluster, 1, done)
            settled |= set(done)
        elif verb == "u":
            over = sorted(settled)[-count:]
            book.undo_ranges(over)
            settled -= set(over)
            undone |= set() if requeue else set(over)
        else:
            book.release_lease(cluster, 1)
            seqs[cluster] = 0
        held = [*book.held_by("a", 1), *book.held_by("b", 1)]
        assert len(held) == len(set(held)) == book.leased
        assert (set(book.settled), book.undone) == (settled, undone)
        assert book.free + book.leased + len(settled) + len(undone) == 12


def test_a_question_that_was_answered_waits_for_nobody() -> None:
    """Its answer was lost: it is given again, although what is left is leased by another."""
    book = RangeBook(DataOptions(ranges=2))
    assert book.lease_ranges("b", 1, 1, 1) == ((0,), True) and book.lease_ranges("a", 1, 1, 1) == ((1,), True)
    book.settle_ranges("b", 1, (0,))
    assert book.why_wait("b", 1, 1) == "" and book.lease_ranges("b", 1, 1, 1) == ((0,), False)
    assert "leased by a" in book.why_wait("b", 1, 2)


@pytest.mark.parametrize(("begin", "intervals"), [(4, 2), (7, 3)])
def test_an_epoch_begins_where_the_one_before_ends(begin: int, intervals: int) -> None:
    """Whether its last range is free or not."""
    numbers = Intervals.of([0, 3])
    numbers.append_numbers(begin, begin + 2)
    assert list(numbers) == [0, 3, begin, begin + 1] and len(numbers.begins) == intervals and numbers.count == 4


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_number_that_is_removed_leaves_no_trace(number: int) -> None:
    """The set is the same as one that never had it."""
    numbers = Intervals.of([1, 2, 3])
    assert numbers.remove_number(number)
    assert numbers == Intervals.of({1, 2, 3} - {number})


def test_a_restored_book_repeats_its_last_answer() -> None:
    """After a restart of the master a repeated question gets the same ranges, and no range is leased twice."""
    book = RangeBook(
        DataOptions(ranges=10), settled=Intervals.of((0, 1)), leased=(("a", 3, 1, (2,)), ("a", 3, 2, (3, 4)))
    )
    assert book.lease_ranges("a", 3, 2, 2) == ((3, 4), False)
    assert book.held_by("a", 3) == (2, 3, 4)
    assert book.lease_ranges("b", 1, 1, 2) == ((5, 6), True)


@pytest.mark.parametrize(("requeue", "leased"), [(False, (5, 6)), (True, (3, 5))])
def test_a_restored_book_knows_what_was_undone(requeue: bool, leased: tuple[int, ...]) -> None:
    """What only undone versions have trained is leased after a restart as before: with `requeue: undone` alone."""
    book = RangeBook(
        DataOptions(ranges=10), Intervals.of((0, 1, 2)), (("a", 1, 1, (4,)),), undone=(3,), requeue=requeue
    )
    assert book.lease_ranges("b", 1, 1, 2) == (leased, True)
    assert book.undone == (set() if requeue else {3})


def test_a_range_that_is_settled_in_part_is_known_to_the_next() -> None:
    """Until all of it is settled; a push that was settled later has the last word."""
    book = RangeBook(DataOptions(ranges=3), begun=(BegunRange(2, 1, 4),))
    book.lease_ranges("a", 1, 1, 2)
    book.settle_ranges("a", 1, (0,), BegunRange(1, 5, 9))
    book.release_lease("a", 1)
    taken, _ = book.lease_ranges("b", 1, 1, 3)
    assert taken == (1, 2) and book.begun_of(taken) == (BegunRange(1, 5, 9), BegunRange(2, 1, 4))
    book.settle_ranges("b", 1, taken)
    assert book.begun == {} and book.is_settled(1)


def test_manifest_groups_by_block_and_survives_json() -> None:
    """Layers are blocks, in the order of names; the digest hangs on names and shapes, in whatever order they come."""
    shapes = [("embed.weight", (8, 4)), ("layers.0.a.weight", (4, 4)), ("layers.0.b.bias", (4,)), ("norm.weight", (4,))]
    manifest = Manifest.from_shapes(shapes)
    assert [layer.name for layer in manifest.layers] == ["embed", "layers.0", "norm"]
    assert manifest.layers[1].param_offsets() == (0, 16)
    assert Manifest.from_json(manifest.to_json()) == manifest
    for other in (shapes[:-1], [*shapes[:-1], ("norm.weight", (5,))]):
        assert Manifest.from_shapes(other).digest != manifest.digest
    assert all(Manifest.from_shapes(order) == manifest for order in permutations(shapes))


def test_numbers_in_names_are_numbers() -> None:
    """Block 2 comes before block 10, whichever a framework or a pipeline's rank lists first."""
    shapes = [(f"layers.{i}.{name}", (1,)) for i in (10, 0, 2) for name in ("w", "b")] + [("embed", (1,))]
    layers = Manifest.from_shapes(shapes).layers
    assert [layer.name for layer in layers] == ["embed", "layers.0", "layers.2", "layers.10"]
    assert [p.name for p in layers[2].parameters] == ["layers.2.b", "layers.2.w"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format":2,"layers":[]}', '{"format":1,"layers":[{"name":"x"}]}'])
def test_a_foreign_manifest_is_refused(text: str) -> None:
    """What is not a manifest of this format is Corrupt, and the message shows what came."""
    with pytest.raises(CorruptManifest, match="manifest"):
        Manifest.from_json(text)


def test_manifest_differences_name_parameters() -> None:
    """The first differences are listed in words: missing, unexpected, another shape. What is frozen is left out."""
    mine = Manifest.from_shapes([("a.weight", (2, 2)), ("b.weight", (3,))])
    theirs = Manifest.from_shapes([("a.weight", (2, 4)), ("c.weight", (3,))])
    lines = mine.describe_differences(theirs)
    assert lines == [
        "b.weight: expected shape (3,), it is missing or frozen",
        "c.weight: shape (3,) was not expected: where the run was made it was missing or frozen",
        "a.weight: expected shape (2, 2), got (2, 4)",
    ]


def test_version_names_are_read_back() -> None:
    """v12@r17 is one spelling, everywhere."""
    assert VersionId.parse(str(VersionId(12, 17))) == VersionId(12, 17)
    with pytest.raises(ValueError, match="v12@r17"):
        VersionId.parse("12@17")


def test_an_illegal_move_is_our_own_bug() -> None:
    """The tables are walked, not trusted."""
    for old in RoundState:
        for new in RoundState:
            if new in ROUND_MOVES[old]:
                assert check_move(ROUND_MOVES, old, new, "round 1") is new
            else:
                with pytest.raises(LocalProtocolError, match="may not become"):
                    check_move(ROUND_MOVES, old, new, "round 1")


def test_claims_take_what_is_free_and_nothing_else() -> None:
    """A checkpoint's ranges by name: freed ones, ones not yet handed out; not leased, settled or unknown ones."""
    book = RangeBook(DataOptions(ranges=10), settled=Intervals.of((0,)), leased=(("b", 1, 1, (1, 3)),))
    assert book.lease_ranges("a", 2, 1, 5, claims=(0, 1, 2, 6, 99)) == ((2, 6), True)
    assert book.lease_ranges("a", 2, 1, 5, claims=(0, 1, 2, 6, 99)) == ((2, 6), False)
    assert book.held_by("a", 2) == (2, 6)
    assert [book.lease_ranges("c", 1, i, 1)[0] for i in range(1, 7)] == [(4,), (5,), (7,), (8,), (9,), ()]
