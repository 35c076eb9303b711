"""The memory of a slave: the written sum, who holds what, and that a version never moves under a reader."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dips.errors import Busy, ConfigError, LocalProtocolError, StalePush, StaleVersion
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.pool import MemorySum, Pool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from tests.loading import load_version

LAYERS = {0: 3, 4: 2}


def made(slots: int = 2, pinned: int = 1) -> Versions:
    versions = Versions(KernelPool(reference), slots, pinned)
    versions.allocate_banks(LAYERS)
    load_version(versions, GENESIS, lambda theta, m: fill(theta, 1.0) or fill(m, 0.0))
    return versions


def fill(arrays: dict[int, np.ndarray], value: float) -> None:
    for array in arrays.values():
        array.fill(value)


def push(seq: int) -> PushId:
    return PushId("a", 1, seq)


def pull(seq: int) -> PullId:
    return PullId("a", 1, seq)


def outer_step(versions: Versions, seq: int, value: float) -> VersionId:
    """Stage one push of `value`, fold it, prepare and flip."""
    assert versions.served_version is not None
    version = VersionId(versions.served_version.version + 1, seq)
    fill(versions.open_slot(push(seq)), value)
    versions.fold_push(push(seq), 1.0)
    versions.prepare_version(version, nesterov_step(1.0, 1.0, 0.0))
    versions.flip_version(version)
    return version


def test_the_first_push_of_a_round_has_weight_1_or_is_left_out_of_a_layer() -> None:
    """It becomes the sum as it is, so no other number can be taken into account."""
    versions = made()
    fill(versions.open_slot(push(1)), 3.0)
    for weight, of_layers in ((2.0, ()), (1.0, (1.0, 0.5)), (0.5, (1.0,))):
        with pytest.raises(LocalProtocolError, match=r"expected weight 1\.0 or 0\.0"):
            versions.fold_push(push(1), weight, of_layers)
    assert versions.fold_push(push(1), 1.0, (0.0, 1.0)) == (0.0, 8.0)


@pytest.mark.parametrize(("slots", "pinned", "per_parameter"), [(2, 1, 28), (1, 0, 20), (4, 2, 40)])
def test_the_sum_is_16_and_4_a_slot_and_4_a_pin(slots: int, pinned: int, per_parameter: int) -> None:
    """The pool holds 16 + 4·slots + 4·pinned bytes a parameter, as printed; 28 by default, 20 at least."""
    memory = MemorySum(numel=5, slots=slots, pinned=pinned, transit_bytes=1 << 20)
    assert memory.per_parameter == per_parameter
    assert made(slots, pinned).limit_bytes == memory.pool_bytes == 5 * per_parameter
    assert f"{per_parameter} B" in memory.describe_sum()
    assert memory.total_bytes == memory.pool_bytes + (1 << 20) + (8 << 20) + 210_000_000


def test_a_machine_that_is_too_small_is_refused_with_the_sum() -> None:
    """Start is refused, naming the options and both numbers, when the machine has less than the sum."""
    memory = MemorySum(numel=10**9, slots=2, pinned=1, transit_bytes=1 << 28)
    memory.require_memory(memory.total_bytes)
    with pytest.raises(ConfigError, match=r"slots, pinned.*28 B.*it may have 1\.0 GiB"):
        memory.require_memory(1 << 30)


def test_layers_begin_on_cache_lines() -> None:
    """Each layer of a bank begins at a multiple of 64 bytes of its allocation, so slices of two never share a line."""
    bank = Pool({0: 3, 1: 17, 2: 5}, 1).banks[0]
    base = bank.arrays[0].ctypes.data
    assert [(a.ctypes.data - base) % 64 for a in bank.arrays.values()] == [0, 0, 0]


def test_a_round_moves_roles_not_bytes() -> None:
    """The first push's own buffer becomes acc, acc becomes m′, and θ′ becomes θ."""
    versions = made()
    buffers = versions.open_slot(push(1))
    fill(buffers, 0.5)
    versions.fold_push(push(1), 1.0)
    versions.prepare_version(VersionId(1, 1), nesterov_step(1.0, 1.0, 0.5))
    assert versions.momentum(VersionId(1, 1))[0] is buffers[0]
    np.testing.assert_array_equal(buffers[0], [0.5] * 3)
    np.testing.assert_array_equal(versions.theta(VersionId(1, 1))[4], [1 - (0.5 + 0.25)] * 2)
    versions.flip_version(VersionId(1, 1))
    assert versions.served_version == VersionId(1, 1)
    assert versions.used_bytes == 2 * 4 * 5


def test_a_version_is_measured_as_a_push_that_is_it() -> None:
    """What a trainer pulled and pushes as it is can be told from what it trained; and how far θ went is known."""
    versions = made(slots=2)
    fill(versions.open_slot(push(1)), 0.5)
    versions.fold_push(push(1), 1.0)
    before = {layer: theta.copy() for layer, theta in versions.theta(GENESIS).items()}
    prepared = versions.prepare_version(VersionId(1, 1), nesterov_step(1.0, 1.0, 0.5))
    versions.flip_version(VersionId(1, 1))
    moved = [float(np.sum((before[layer] - theta) ** 2)) for layer, theta in versions.theta(VersionId(1, 1)).items()]
    assert prepared.layer_sq == pytest.approx(moved) and all(moved)
    for seq, change in ((2, 0.0), (3, 0.25)):
        slot = versions.open_slot(push(seq))
        for layer, theta in versions.theta(VersionId(1, 1)).items():
            slot[layer][:] = theta
        slot[0][1] += change
        assert (versions.measure_push(push(seq)).digest == prepared.digest) is (change == 0.0)
        versions.free_slot(push(seq))


def test_abort_leaves_theta_and_momentum_bit_for_bit() -> None:
    """An abort after Apply is free: θ and m are what they were (guards invariants 1 and 2)."""
    versions = made()
    before = versions.theta(GENESIS)[0].tobytes(), versions.momentum(GENESIS)[0].tobytes()
    fill(versions.open_slot(push(1)), 7.0)
    versions.fold_push(push(1), 1.0)
    versions.prepare_version(VersionId(1, 1), nesterov_step(0.3, 0.7, 0.8))
    versions.abort_round()
    assert (versions.theta(GENESIS)[0].tobytes(), versions.momentum(GENESIS)[0].tobytes()) == before
    assert versions.prepared is None
    assert versions.used_bytes == 2 * 4 * 5


def test_moving_and_staged_pushes_survive_flip_and_abort() -> None:
    """What is not folded stays in its buffer through an abort and through a flip."""
    versions = made(slots=2)
    moving = versions.open_slot(push(9))
    fill(moving, 3.0)
    outer_step(versions, 1, 0.5)
    fill(versions.open_slot(push(2)), 0.1)
    versions.fold_push(push(2), 1.0)
    versions.abort_round()
    assert versions.open_pushes == (push(9),)
    assert versions.measure_push(push(9)).layer_sq == pytest.approx((3 * 2.5**2, 2 * 2.5**2))


def test_all_slots_in_use_is_busy() -> None:
    """A push beyond the slots raises Busy with the names of those that hold them; folding frees a slot."""
    versions = made(slots=1)
    fill(versions.open_slot(push(1)), 0.5)
    with pytest.raises(Busy, match="all 1 slots are in use by a/1#1"):
        versions.open_slot(push(2))
    versions.fold_push(push(1), 1.0)
    versions.open_slot(push(2))


def test_a_pinned_version_outlives_the_flip() -> None:
    """A pull that began before a flip goes on reading the same bytes (guards invariant 11)."""
    versions = made()
    source = versions.held.pin_version(pull(1), GENESIS)
    copy = source[0].copy()
    outer_step(versions, 1, 0.5)
    outer_step(versions, 2, 0.25)
    np.testing.assert_array_equal(source[0], copy)
    assert versions.held.pins == {pull(1): GENESIS}
    versions.unpin_version(pull(1))
    with pytest.raises(StaleVersion, match="v0@r0 is not held; held: v2@r2"):
        versions.held.pin_version(pull(2), GENESIS)


def test_apply_waits_while_readers_hold_the_bank_of_theta_next() -> None:
    """With more old readers than pins, prepare is Busy and changes nothing; it works when one is done."""
    versions = made(slots=1, pinned=0)
    versions.held.pin_version(pull(1), GENESIS)
    outer_step(versions, 1, 0.5)
    fill(versions.open_slot(push(2)), 0.25)
    versions.fold_push(push(2), 1.0)
    versions.open_slot(push(3))
    with pytest.raises(Busy, match="older θ v0@r0"):
        versions.prepare_version(VersionId(2, 2), nesterov_step(1.0, 1.0, 0.0))
    assert versions.folded
    versions.unpin_version(pull(1))
    versions.prepare_version(VersionId(2, 2), nesterov_step(1.0, 1.0, 0.0))


def test_an_older_version_never_takes_the_bank_of_a_slot() -> None:
    """Though a slot is free: a push that is granted it while θ′ is made must find its bank."""
    versions = made(slots=2, pinned=0)
    versions.held.pin_version(pull(1), GENESIS)
    outer_step(versions, 1, 0.5)
    fill(versions.open_slot(push(2)), 0.25)
    versions.fold_push(push(2), 1.0)
    with pytest.raises(Busy, match="θ′ v2@r2: its bank is held by older θ v0@r0"):
        versions.prepare_version(VersionId(2, 2), nesterov_step(1.0, 1.0, 0.0))
    versions.open_slot(push(3))
    versions.open_slot(push(4))


def test_a_bank_is_free_when_its_last_reader_has_moved() -> None:
    """Readers leave a bank one by one; a version that is being left takes no new one, and the pins stay known."""
    versions = made(slots=1, pinned=0)
    versions.held.pin_version(pull(1), GENESIS)
    versions.held.pin_version(pull(2), GENESIS)
    outer_step(versions, 1, 0.5)
    assert (versions.held.excess_versions, versions.held.older_versions) == (1, (GENESIS,))
    assert versions.held.move_readers(GENESIS) == (pull(1), pull(2))
    assert (versions.held.excess_versions, versions.held.older_versions) == (0, ())
    with pytest.raises(StaleVersion):
        versions.held.pin_version(pull(3), GENESIS)
    versions.held.on_reader_moved(pull(1))
    assert "older θ v0@r0" in versions.bank_holders()
    versions.held.on_reader_moved(pull(2))
    versions.held.on_reader_moved(pull(2))
    assert "older θ v0@r0" not in versions.bank_holders()
    assert versions.held.pins == {pull(1): GENESIS, pull(2): GENESIS}
    versions.unpin_version(pull(1))
    assert versions.held.pins == {pull(2): GENESIS}


def test_a_reader_that_ends_while_it_moves_is_over() -> None:
    """`released` before `moved` frees the bank too, and leaves nothing behind."""
    versions = made(slots=1, pinned=0)
    versions.held.pin_version(pull(1), GENESIS)
    outer_step(versions, 1, 0.5)
    versions.held.move_readers(GENESIS)
    versions.unpin_version(pull(1))
    versions.held.on_reader_moved(pull(1))
    assert versions.held.pins == {}
    assert versions.used_bytes == 2 * 4 * 5


def test_a_reader_reads_one_version_until_it_moves() -> None:
    """A second pin under its name is refused; word of a move that has not begun, or of another's, means nothing."""
    versions = made(slots=1, pinned=0)
    versions.held.pin_version(pull(1), GENESIS)
    for pin in (versions.held.pin_version, versions.held.pin_file):
        with pytest.raises(LocalProtocolError, match="already reads v0@r0"):
            pin(pull(1), GENESIS)
    outer_step(versions, 1, 0.5)
    versions.held.on_reader_moved(pull(1))
    assert "older θ v0@r0" in versions.bank_holders()
    versions.held.move_readers(GENESIS)
    versions.held.on_reader_moved(pull(9))
    assert versions.held.pins == {pull(1): GENESIS} and "older θ v0@r0" in versions.bank_holders()


def test_the_parameters_of_all_layers_are_counted() -> None:
    """None before the slave knows its layers."""
    assert (Versions(KernelPool(reference), 1, 0).numel, made().numel) == (0, 5)


def test_a_load_ends_the_round_and_waits_for_readers_beyond_the_pinned() -> None:
    """What is folded belongs to the version that is left; a reader of the head stays where it is."""
    versions = made(slots=1, pinned=1)
    versions.held.pin_version(pull(1), GENESIS)
    outer_step(versions, 1, 0.5)
    versions.held.pin_version(pull(2), VersionId(1, 1))
    fill(versions.open_slot(push(2)), 0.5)
    versions.fold_push(push(2), 1.0)
    load_version(versions, VersionId(3, 3), lambda theta, m: fill(theta, 1.0) or fill(m, 0.0))
    assert versions.served_version == VersionId(3, 3) and not versions.folded
    versions.held.pin_version(pull(3), VersionId(3, 3))
    with pytest.raises(Busy, match="older versions are still read"):
        versions.begin_load(VersionId(4, 4))


def test_a_failed_load_keeps_what_was_served() -> None:
    """A snapshot that turns out corrupt half-way leaves θ and m of the present version as they are."""
    versions = made()
    versions.held.pin_version(pull(1), GENESIS)

    def broken(theta: dict[int, np.ndarray], momentum: dict[int, np.ndarray]) -> None:
        fill(theta, 9.0)
        raise OSError("bad sector")

    with pytest.raises(OSError, match="bad sector"):
        load_version(versions, VersionId(3, 3), broken)
    assert versions.served_version == GENESIS
    np.testing.assert_array_equal(versions.theta(GENESIS)[0], [1.0] * 3)
    assert versions.used_bytes == 2 * 4 * 5


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda v: v.flip_version(VersionId(1, 1)), LocalProtocolError),
        (lambda v: v.prepare_version(VersionId(1, 1), nesterov_step(1.0, 1.0, 0.0)), LocalProtocolError),
        (lambda v: v.fold_push(push(5), 1.0), StalePush),
        (lambda v: v.free_slot(push(5)), StalePush),
        (lambda v: v.measure_push(push(5)), StalePush),
        (lambda v: v.open_slot(push(1)), LocalProtocolError),
        (lambda v: v.fold_push(push(1), 0.5), LocalProtocolError),
        (lambda v: v.allocate_banks({0: 99}), ConfigError),
        (lambda v: v.begin_load(VersionId(1, 1)), LocalProtocolError),
        (lambda v: v.momentum(VersionId(1, 1)), StaleVersion),
        (lambda v: v.held.move_readers(GENESIS), LocalProtocolError),
    ],
)
def test_what_is_illegal_is_refused(what: object, error: type[Exception]) -> None:
    """Moves out of order raise and change nothing that is held."""
    versions = made()
    versions.open_slot(push(1))
    before = versions.bank_holders()
    with pytest.raises(error):
        what(versions)  # type: ignore[operator]
    assert versions.bank_holders() == before


class Life(RuleBasedStateMachine):
    """Any order of pushes, folds, flips, aborts, loads and pins, beside a plain copy of what each reader must see."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.pinned = 2, 1
        self.versions = made(self.slots, self.pinned)
        self.seq = 0
        self.readers: dict[PullId, tuple[dict[int, np.ndarray], dict[int, bytes]]] = {}
        self.moving: list[PullId] = []

    @rule(value=st.floats(-4, 4, width=32))
    def open_push(self, value: float) -> None:
        self.seq += 1
        if len(self.versions.open_pushes) == self.slots:
            with pytest.raises(Busy):
                self.versions.open_slot(push(self.seq))
        else:
            fill(self.versions.open_slot(push(self.seq)), value)

    @precondition(lambda self: self.versions.open_pushes)
    @rule()
    def drop(self) -> None:
        self.versions.free_slot(self.versions.open_pushes[0])

    @precondition(lambda self: self.versions.open_pushes and self.versions.prepared is None)
    @rule()
    def fold(self) -> None:
        self.versions.fold_push(self.versions.open_pushes[-1], 0.5 if self.versions.folded else 1.0)

    @precondition(lambda self: self.versions.folded)
    @rule()
    def prepare(self) -> None:
        self.seq += 1
        older = {v for v in self.versions.held.pins.values() if v != self.versions.served_version}
        try:
            self.versions.prepare_version(
                VersionId(self.versions.served_version.version + 1, self.seq), nesterov_step(0.5, 0.7, 0.8)
            )
        except Busy:
            assert len(older) > self.pinned

    @precondition(lambda self: self.versions.prepared is not None)
    @rule()
    def flip(self) -> None:
        self.versions.flip_version(self.versions.prepared)

    @rule()
    def abort(self) -> None:
        self.versions.abort_round()

    @precondition(lambda self: not self.versions.open_pushes)
    @rule(value=st.floats(-4, 4, width=32))
    def load(self, value: float) -> None:
        self.seq += 1
        older = {v for v in self.versions.held.pins.values() if v != self.versions.served_version}
        try:
            load_version(
                self.versions, VersionId(self.seq, self.seq), lambda theta, m: fill(theta, value) or fill(m, 0.0)
            )
        except Busy:
            assert len(older) > self.pinned

    @rule()
    def pin(self) -> None:
        self.seq += 1
        source = self.versions.held.pin_version(pull(self.seq), self.versions.served_version)
        self.readers[pull(self.seq)] = (dict(source), {i: a.tobytes() for i, a in source.items()})

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.readers)))
        del self.readers[reader]
        self.versions.unpin_version(reader)

    @precondition(lambda self: self.versions.held.older_versions)
    @rule()
    def move(self) -> None:
        """The readers of the oldest version leave for copies; until each has `moved`, its bank must not change."""
        self.moving += self.versions.held.move_readers(self.versions.held.older_versions[0])

    @precondition(lambda self: self.moving)
    @rule()
    def moved(self) -> None:
        reader = self.moving.pop()
        self.versions.held.on_reader_moved(reader)
        if reader in self.readers:
            _, content = self.readers[reader]
            self.readers[reader] = ({i: np.frombuffer(raw, np.float32) for i, raw in content.items()}, content)

    @invariant()
    def no_reader_sees_a_change(self) -> None:
        for source, content in self.readers.values():
            assert {i: a.tobytes() for i, a in source.items()} == content

    @invariant()
    def every_bank_in_use_has_a_reason(self) -> None:
        v = self.versions
        in_memory = {p: version for p, version in v.held.pins.items() if p not in v.held._from_file}
        older = {version for version in in_memory.values() if version != v.served_version}
        expected = 2 + len(v.open_pushes) + v.folded + 2 * (v.prepared is not None) + len(older)
        assert len(v.bank_holders()) == expected == v.used_bytes // 20
        assert len(set(v.bank_holders())) == expected
        assert v.used_bytes <= v.limit_bytes


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
