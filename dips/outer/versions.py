"""The versions of θ that a slave holds, who reads each, and everything that lives beside them: m, acc, θ′, slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from math import isfinite

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.errors import Busy, ConfigError, LocalProtocolError, StalePush, StaleVersion
from dips.ids import PullId, PushId, VersionId
from dips.outer.kernel_pool import KernelPool, Measures
from dips.outer.pool import FIXED_BANKS, Arrays, Bank, Pool
from dips.outer.updates import Fields, Update, Updates
from dips.outer_step import Factors, OuterStep, factor_at

# ---- averaged layers ------------------------------------------------------------------------------------------------
# The layers of a slave that hold buffers: averaged by tokens, not stepped.
#
# Learning rate, momentum, clipping and the rules that weigh pushes are for what gradients move. A buffer (a router's
# bias that balances experts, a running mean) becomes Σ T_j·b_j / ΣT_j of the accepted pushes: the outer step with
# learning rate 1 and no momentum, and with 1/Σw for its scale, w being T_j / T_first. No norm contains them. What a
# lossy pull_codec rounds away of them does not come back: there is no momentum to bring it.


class AveragedLayers:
    """Tells the two kinds of layers apart, and counts the weights of a round."""

    def __init__(self) -> None:
        self.layers: frozenset[int] = frozenset()
        self._weights = 0.0

    def leave_out(self, arrays: Arrays, squares: Iterable[float]) -> tuple[float, ...]:
        """The norms of all layers, 0 for a buffer's unless it is not finite: that must be seen."""
        pairs = zip(arrays, squares, strict=True)
        return tuple(0.0 if layer in self.layers and isfinite(square) else square for layer, square in pairs)

    def weigh_layers(self, arrays: Arrays, weight: float, layer_weights: Factors) -> dict[int, float]:
        """Return the weight of a push in each layer; `layer_weights`, if there are any, do not apply to buffers."""
        if not layer_weights:
            return dict.fromkeys(arrays, weight)
        return {
            layer: weight if layer in self.layers else factor_at(layer_weights, place)
            for place, layer in enumerate(arrays)
        }

    def begin_weights(self) -> None:
        """Begin a round with its first push, whose weight is 1."""
        self._weights = 1.0

    def add_weight(self, weight: float) -> None:
        """Add the weight of the round's next push."""
        self._weights += weight

    def step_layers(self, arrays: Arrays, step: OuterStep) -> dict[int, OuterStep]:
        """The step of each layer: a buffer's makes a mean of the sum that was folded."""
        mean = OuterStep((1.0 / self._weights,), lr=1.0, a=0.0, b=1.0, c=1.0, e=0.0)
        return {layer: mean if layer in self.layers else step.of_layer(place) for place, layer in enumerate(arrays)}


# ---- held thetas ----------------------------------------------------------------------------------------------------
# An older θ stays while pulls read it. Those beyond the pinned ones take the place of θ′: `move_readers` moves their
# readers to a file of the same bytes, one after another, and the last of them frees the bank.


@dataclass(slots=True)
class Theta:
    """θ of one version in memory, and who reads it."""

    version: VersionId
    bank: Bank
    pulls: set[PullId] = field(default_factory=set)
    moving: bool = False  # its readers go over to a file; it takes no new ones


class HeldThetas:
    """Which θ are here. Who changes `head` gives its readers what they read: see `leave_head`."""

    def __init__(self, give_back: Callable[[Bank], None], pinned: int) -> None:
        self._give_back, self._pinned = give_back, pinned
        self.head: Theta | None = None  # that is served
        self.older: list[Theta] = []  # oldest first
        self._from_file: dict[PullId, VersionId] = {}

    # ---- what is held --------------------------------------------------------------------------------

    @property
    def pins(self) -> dict[PullId, VersionId]:
        """Every pull that may still read, with the version that it reads."""
        in_memory = {pull: theta.version for theta in self._all() for pull in sorted(theta.pulls)}
        return {**self._from_file, **in_memory}

    def version_read_by(self, pull: PullId) -> VersionId | None:
        """Return the version that this pull may still read; None if it reads none."""
        in_memory = (theta.version for theta in self._all() if pull in theta.pulls)
        return next(in_memory, self._from_file.get(pull))

    @property
    def older_versions(self) -> tuple[VersionId, ...]:
        """Older versions whose readers hold a bank and are not being moved, oldest first."""
        return tuple(theta.version for theta in self.older if not theta.moving)

    @property
    def excess_versions(self) -> int:
        """How many of those are more than the pool has pinned banks for."""
        return max(0, len(self.older_versions) - self._pinned)

    def find(self, version: VersionId) -> Theta:
        """Return θ of this version; raise StaleVersion if it is not held, or its readers are being moved."""
        for theta in self._all():
            if theta.version == version and not theta.moving:
                return theta
        raise StaleVersion(f"{version} is not held; held: {self.describe()}")

    def find_read(self, version: VersionId) -> Theta | None:
        """The older θ of this version that pulls read, where they are."""
        return next((t for t in self.older if t.version == version and not t.moving), None)

    def describe(self) -> str:
        return ", ".join(str(theta.version) for theta in self._all()) or "nothing"

    # ---- readers -------------------------------------------------------------------------------------

    def pin_version(self, pull: PullId, version: VersionId) -> Arrays:
        """Keep θ of `version` for a pull and return it; raise StaleVersion if it is not held."""
        self._refuse_second(pull)
        theta = self.find(version)
        theta.pulls.add(pull)
        return theta.bank.arrays

    def pin_file(self, pull: PullId, version: VersionId) -> None:
        """Take note of a pull that reads an older version from a file: it holds no bank."""
        self._refuse_second(pull)
        self._from_file[pull] = version

    def move_readers(self, version: VersionId) -> tuple[PullId, ...]:
        """Begin to move an older version's readers to a file and return them; `on_reader_moved` ends it for each."""
        for theta in self.older:
            if theta.version == version and not theta.moving:
                theta.moving = True
                return tuple(sorted(theta.pulls))
        raise LocalProtocolError(f"{version} is no older version in memory: {', '.join(map(str, self.older_versions))}")

    def on_reader_moved(self, pull: PullId) -> None:
        """End the pull's reads from banks in memory; the last reader frees a bank. No effect if the pull is over."""
        for theta in self.older:
            if theta.moving and pull in theta.pulls:
                self._from_file[pull] = theta.version
                theta.pulls.discard(pull)
        self._free_unread()

    def unpin(self, pull: PullId) -> None:
        """End a pin; the last one of an older version frees it. An unknown pull has nothing to end."""
        self._from_file.pop(pull, None)
        for theta in self._all():
            theta.pulls.discard(pull)
        self._free_unread()

    # ---- what comes and goes -------------------------------------------------------------------------

    def leave_head(self) -> None:
        """Serve no θ any more: its bank is free at once, or, if pulls read it, when the last of them has ended."""
        if self.head is None:
            return
        if self.head.pulls:
            self.head.bank.holder = f"older θ {self.head.version}"
            self.older.append(self.head)
        else:
            self._give_back(self.head.bank)
        self.head = None

    def _free_unread(self) -> None:
        for theta in [t for t in self.older if not t.pulls]:
            self.older.remove(theta)
            self._give_back(theta.bank)

    def _refuse_second(self, pull: PullId) -> None:
        if (read := self.version_read_by(pull)) is not None:
            raise LocalProtocolError(f"pull {pull} already reads {read}")

    def _all(self) -> list[Theta]:
        return [*self.older, self.head] if self.head else list(self.older)


# ---- versions -------------------------------------------------------------------------------------------------------
# Versions are immutable: θ′ and m′ are made beside θ and m, so an abort frees two banks and a reader of θ never sees it
# move. What must stay true (docs/architecture.md#invariant-11): every bank has one holder; θ, an older pinned θ and a
# prepared θ′ are never written; a bank becomes free only when nobody writes or reads it. It knows no master, no socket
# and no clock; whoever moves bytes into a slot or out of a pinned θ must have stopped before the slot is freed or the
# pin ended.
#
# Banks in use are at most θ, m, acc, θ′, the slots, and the pinned older versions. An older version beyond the pinned
# ones takes the place of θ′ until its readers have moved; until then `prepare_version` is Busy
# (docs/rationale.md#19).


@dataclass(frozen=True, slots=True)
class Next:
    """θ′ and m′, prepared and not committed; or θ and m that are being loaded."""

    version: VersionId
    theta: Bank
    momentum: Bank


@dataclass(frozen=True, slots=True)
class PushMeasures:
    """The result of one pass over a push or over θ′; 0 for finite buffers, which no norm contains."""

    layer_sq: tuple[float, ...]  # Σd² for d = θ − θ_j, in the order of the layers
    layer_dot: tuple[float, ...]  # Σd·acc
    digest: int  # of θ_j, of all layers that are here


class Versions:
    """The memory of one slave; empty until `allocate_banks`, without a version until one is loaded."""

    def __init__(self, kernel_pool: KernelPool, slots: int, pinned: int, pull_codec: Codec = Codec.FP32) -> None:
        """
        pull_codec   the run's: of the updates that clusters pull, and so of what every θ′ is made of
        """
        self._kernel_pool = kernel_pool
        self._updates = Updates(pull_codec, pinned)
        self._fields: Fields = {}
        self._averaged = AveragedLayers()
        self.slots = slots
        self._pinned = pinned
        self.held = HeldThetas(self._give_back, pinned)
        self._pool = Pool({}, FIXED_BANKS + slots + pinned)
        self._layers: dict[int, int] | None = None
        self._momentum: Bank | None = None
        self._acc: Bank | None = None
        self._next: Next | None = None
        self._abandoned: Next | None = None  # aborted while it was being written
        self._loading: Next | None = None
        self._open: dict[PushId, Bank] = {}

    def allocate_banks(
        self, layers: Mapping[int, int], fields: Fields | None = None, averaged: frozenset[int] = frozenset()
    ) -> None:
        """Take and touch all memory for `layers` (index → parameters), once.

        fields    where each parameter lies
        averaged  the layers of buffers, which the outer step averages

        Raise ConfigError if a repetition names others: what is held may be served as nobody else's.
        """
        if self._layers == dict(layers):
            return
        if self._layers is not None:
            raise ConfigError(
                f"this process holds the layers {sorted(self._layers)}, and the run places {sorted(layers)} here since "
                "a rebalance: start it again"
            )
        self._layers = dict(layers)
        self._pool = Pool(layers, FIXED_BANKS + self.slots + self._pinned)
        self._fields = fields or {layer: ((0, numel),) for layer, numel in layers.items()}
        self._averaged.layers = averaged
        self._updates.allocate_buffers(layers, self._fields)

    # ---- what is held --------------------------------------------------------------------------------

    @property
    def served_version(self) -> VersionId | None:
        """The version that is served, None before the first load."""
        return self.held.head.version if self.held.head else None

    @property
    def prepared(self) -> VersionId | None:
        """The version that waits beside it for its commit."""
        return self._next.version if self._next else None

    @property
    def loading(self) -> VersionId | None:
        """The version that is being loaded; what was served before is served on."""
        return self._loading.version if self._loading else None

    @property
    def numel(self) -> int:
        """Parameters of all layers of this slave."""
        return sum((self._layers or {}).values())

    @property
    def folded(self) -> bool:
        """Whether a push of an open round is in acc."""
        return self._acc is not None

    @property
    def open_pushes(self) -> tuple[PushId, ...]:
        return tuple(self._open)

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes + self._updates.nbytes

    @property
    def limit_bytes(self) -> int:
        return self._pool.limit_bytes + self._updates.nbytes

    def bank_holders(self) -> list[str]:
        """Who holds each bank in use, for status and for those who check the sum."""
        return self._pool.bank_holders()

    def theta(self, version: VersionId) -> Arrays:
        """Return θ of a version that is served, pinned or prepared; nobody may write it."""
        if self._next and self._next.version == version:
            return self._next.theta.arrays
        return self.held.find(version).bank.arrays

    def momentum(self, version: VersionId) -> Arrays:
        """Return m of the version that is served or prepared; nobody may write it."""
        if self._next and self._next.version == version:
            return self._next.momentum.arrays
        if self._momentum and self.served_version == version:
            return self._momentum.arrays
        raise StaleVersion(f"momentum of {version} is not held; {self._held_names()}")

    # ---- slots --------------------------------------------------------------------------------

    def open_slot(self, push: PushId, base: VersionId | None = None) -> Arrays:
        """Reserve a slot for a push and return its buffers, holding θ of `base` if its differences are to be added.

        Raise Busy if all slots are in use, StaleVersion if `base` is not held. Cost with a base: reads and writes θ.
        """
        if push in self._open:
            raise LocalProtocolError(f"push {push} already has a slot")
        if len(self._open) >= self.slots:
            raise Busy(f"all {self.slots} slots are in use by {', '.join(map(str, self._open))}")
        held = self.held.find(base) if base is not None else None
        slot = self._open[push] = self._pool.take_bank(f"slot {push}")
        if held is not None:
            self._kernel_pool.copy_theta(held.bank.arrays, slot.arrays)
        return slot.arrays

    def slot_arrays(self, push: PushId) -> Arrays:
        """The buffers of a push that has a slot."""
        return self._slot_of(push).arrays

    def free_slot(self, push: PushId) -> None:
        """Free the slot; whoever wrote into it has stopped."""
        self._pool.give_back(self._slot_of(push))
        del self._open[push]

    # ---- the outer step --------------------------------------------------------------------------------

    def measure_push(self, push: PushId) -> PushMeasures:
        """Measure a push against the version that is served, and beside what is folded so far."""
        acc, theta = self._acc.arrays if self._acc else None, self._current_theta().bank.arrays
        return self._leave_out_buffers(theta, self._kernel_pool.measure(theta, self._slot_of(push).arrays, acc))

    def fold_push(self, push: PushId, weight: float, layer_weights: Factors = ()) -> tuple[float, ...]:
        """Take the push into acc and free its slot, the first by becoming acc; return Σ acc² of each layer.

        weight         the push's tokens over those of the round's first push; buffers are averaged by it
        layer_weights  weights of the layers that the outer step moves, or one for all of them; empty: `weight`
        """
        theta, bank = self._current_theta().bank.arrays, self._slot_of(push)
        weights = self._averaged.weigh_layers(theta, weight, layer_weights)
        if self._next is not None:
            raise LocalProtocolError(f"push {push} cannot be folded: {self._next.version} is prepared")
        if self._acc is None:
            if any(w not in (0.0, 1.0) for w in (weight, *weights.values())):
                got = (weight, *layer_weights)
                raise LocalProtocolError(f"push {push} is the round's first: expected weight 1.0 or 0.0, got {got}")
            self._averaged.begin_weights()
            squares = self._kernel_pool.fold_first(theta, bank.arrays, weights)
            del self._open[push]
            self._acc, bank.holder = bank, "acc"
            return self._averaged.leave_out(theta, squares)
        self._averaged.add_weight(weight)
        squares = self._kernel_pool.fold(self._acc.arrays, theta, bank.arrays, weights)
        self.free_slot(push)
        return self._averaged.leave_out(theta, squares)

    def prepare_version(self, version: VersionId, step: OuterStep) -> PushMeasures:
        """Make θ′ and m′ of `version` beside θ and m; return what a push that is θ′ would be measured as.

        Raises Busy, with nothing changed, if readers hold every bank.
        """
        head, acc, momentum = self._current_theta(), self._acc, self._momentum
        if acc is None or momentum is None:
            raise LocalProtocolError(f"nothing is folded that could make {version} of {head.version}")
        if len(self.held.older) > self._pinned:  # else a push would find no bank for the slot that it was promised
            raise Busy(
                f"θ′ {version}: its bank is held by {', '.join(theta.bank.holder or '' for theta in self.held.older)}"
            )
        theta_next = self._pool.take_bank(f"θ′ {version}")
        try:
            steps = self._averaged.step_layers(head.bank.arrays, step)
            measures = self._kernel_pool.apply(head.bank.arrays, acc.arrays, momentum.arrays, steps, theta_next.arrays)
            if self._updates.codec.updates:
                self._round_update(head.bank.arrays, theta_next.arrays, acc.arrays, steps)
                measures = self._kernel_pool.measure(head.bank.arrays, theta_next.arrays)
        except BaseException:
            self._pool.give_back(theta_next)
            raise
        acc.holder = f"m′ {version}"
        self._next, self._acc = Next(version, theta_next, acc), None
        return self._leave_out_buffers(head.bank.arrays, measures)

    def flip_version(self, version: VersionId) -> None:
        """Serve the prepared version; the one before stays for the pulls that read it."""
        made, momentum = self._next, self._momentum
        if made is None or made.version != version or momentum is None:
            raise LocalProtocolError(f"{version} is not prepared; {self._held_names()}")
        self._pool.give_back(momentum)
        assert self.held.head is not None, "what is prepared came of what is served"
        self._updates.publish_update(version, self.held.head.version)
        self.held.leave_head()
        self._serve_version(version, made.theta, made.momentum)
        self._next = None

    def abort_round(self, written: VersionId | None = None) -> None:
        """Drop acc, θ′ and m′; θ, m, slots and pins stay as they are.

        written  being written to the disk: if it is θ′ and m′, their banks are free only after `free_abandoned`
        """
        self._updates.drop_update()
        if self._next is not None and self._next.version == written:
            assert self._abandoned is None, "one snapshot is written at a time"
            self._abandoned, self._next = self._next, None
        if self._next is not None:
            self._pool.give_back(self._next.theta)
            self._pool.give_back(self._next.momentum)
            self._next = None
        if self._acc is not None:
            self._pool.give_back(self._acc)
            self._acc = None

    def free_abandoned(self) -> None:
        """Free the version that was prepared and aborted, if there is one; its last reader has ended."""
        if self._abandoned is not None:
            self._pool.give_back(self._abandoned.theta)
            self._pool.give_back(self._abandoned.momentum)
            self._abandoned = None

    def begin_load(self, version: VersionId) -> tuple[Arrays, Arrays]:
        """Return what θ and m of `version` are to be read into, on any thread; `end_load` must follow.

        Legal without slots in use; none may be opened until the load has ended. Raises Busy, with nothing changed, if
        readers of older versions hold the banks that it needs.
        """
        if self._open:
            raise LocalProtocolError(
                f"{version} cannot be loaded over the open pushes {', '.join(map(str, self._open))}"
            )
        held = self.held
        if held.head and held.head.pulls and sum(bool(theta.pulls) for theta in held.older) > self._pinned:
            raise Busy(f"{version} cannot be loaded: older versions are still read by {', '.join(map(str, held.pins))}")
        self.abort_round()
        theta, momentum = self._pool.take_all(f"load θ {version}", f"load m {version}")
        self._loading = Next(version, theta, momentum)
        return theta.arrays, momentum.arrays

    def end_load(self, filled: bool) -> None:
        """Serve what was loaded; if it could not be, what was served is served on."""
        loaded, self._loading = self._loading, None
        assert loaded is not None, "a load has begun"
        if not filled:
            self._pool.give_back(loaded.theta)
            self._pool.give_back(loaded.momentum)
            return
        if self._momentum is not None:
            self._pool.give_back(self._momentum)
        self.held.leave_head()
        read = self.held.find_read(loaded.version)
        self._serve_version(loaded.version, loaded.theta, loaded.momentum)
        if read is not None:  # the same numbers, and readers who go on where they are
            self._pool.give_back(loaded.theta)
            self.held.older.remove(read)
            self.held.head, read.bank.holder = read, f"θ {read.version}"

    # ---- readers --------------------------------------------------------------------------------

    def pin_updates(self, pull: PullId, version: VersionId) -> tuple[Update, ...]:
        """Keep the updates that led to `version` for a pull, until it is unpinned; () if there are none to be had."""
        return self._updates.pin_chain(pull, version)

    def unpin_version(self, pull: PullId) -> None:
        """End a pin, of updates too; the last one of an older version frees it. Nothing for an unknown pull."""
        self._updates.unpin_chain(pull)
        self.held.unpin(pull)

    # ---- leaves --------------------------------------------------------------------------------

    def _round_update(
        self, theta: Arrays, theta_next: Arrays, momentum: Arrays, steps: Mapping[int, OuterStep]
    ) -> None:
        """Make θ′ of what clusters will pull of it (docs/protocol.md#updates)."""
        back, update = {layer: step.returned for layer, step in steps.items()}, self._updates.begin_update()
        self._kernel_pool.round_update(self._updates.codec, theta, theta_next, momentum, back, update, self._fields)

    def _leave_out_buffers(self, theta: Arrays, found: Measures) -> PushMeasures:
        squares = self._averaged.leave_out(theta, found.squares)
        return PushMeasures(squares, self._averaged.leave_out(theta, found.products), found.combine_digests(theta))

    def _serve_version(self, version: VersionId, theta: Bank, momentum: Bank) -> None:
        theta.holder, momentum.holder = f"θ {version}", f"m {version}"
        self.held.head, self._momentum = Theta(version, theta), momentum

    def _held_names(self) -> str:
        return f"held: {self.held.describe()}; prepared: {self.prepared or 'nothing'}"

    def _give_back(self, bank: Bank) -> None:
        self._pool.give_back(bank)

    def _slot_of(self, push: PushId) -> Bank:
        if push not in self._open:
            raise StalePush(f"push {push} has no slot; open: {', '.join(map(str, self._open)) or 'none'}")
        return self._open[push]

    def _current_theta(self) -> Theta:
        if self.held.head is None:
            raise StaleVersion("no version is loaded")
        return self.held.head
