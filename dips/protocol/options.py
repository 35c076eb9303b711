"""Options of the Coordinator, each with its unit and the reason for its default.

Plain dataclasses, so that this package needs nothing but the standard library. Bounds are checked in `__post_init__`,
once for every caller; config/run.py checks types and refuses unknown keys.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any, ClassVar

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.protocol import plugins
from dips.protocol.enums import (
    DurabilityMode,
    GateName,
    MergeRule,
    PersistFailurePolicy,
    RequeuePolicy,
    StepRule,
    WeightRule,
    WindowRule,
)

FORBID: dict[str, Any] = {"extra": "forbid"}
AUTO = "auto"  # value of `outer.lr` for a rate that follows the number of clusters
MOST_ROLLBACK = 2  # outer steps: a crash costs one, or two if a disk failed in the same moment; more needs an operator
RANGES_HELD = 64  # unsettled data ranges of one cluster: a range has many inner steps, a window takes a few ranges
LINEAGE_KEPT = 1_000  # newest versions; a base older than these counts as no ancestor: its staleness is unknown


def _require_holds(holds: bool, key: str, expected: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


# Limits of numbers, besides 0 where 0 is allowed: what the arithmetic of the run takes, in any combination, in doubles,
# in the kernels' fp32, in the deadlines of gRPC and in SQLite's rows.
RATES = (1e-9, 1e3)  # of an outer step: θ stays within fp32 after any product with them
SHARES = (1e-6, 1.0 - 1e-6)  # of an average or a momentum: x, 1/x and 1/(1 − x) stay small
LENGTHS = (1e-30, 1e30)  # of a pseudo-gradient: larger norms count as not finite (penalty.py)
MULTIPLES = (1e-6, 1e6)  # of a measured quantity
SECONDS = (1e-3, 1e7)  # from a clock's resolution to four months
COUNTS = (1, 1_000_000)
ROUNDS_KEPT = (1, 10_000)  # number of rounds whose scores each version's row holds
BITS_PER_S = (1e-3, 1e15)


def _require_within(
    options: object, section: str, bounds: dict[str, tuple[float, float]], zero: frozenset[str]
) -> None:
    """Raise ConfigError for numbers out of these bounds, NaN and ±inf among them; None and strings are not checked."""
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is None or isinstance(value, str):
            continue
        expected = f"0, or {least:g} to {most:g}" if name in zero else f"a number from {least:g} to {most:g}"
        _require_holds((name in zero and value == 0) or least <= value <= most, f"{section}.{name}", expected, value)


def _coerce_word(options: object, field_name: str, words: type[StrEnum], key: str) -> None:
    """Replace the string from a file by its enum member; raise ConfigError if there is none."""
    got = getattr(options, field_name)
    _require_holds(got in list(words), key, " or ".join(words), got)
    object.__setattr__(options, field_name, words(got))  # frozen


def _coerce_known(options: object, field_name: str, words: type[StrEnum]) -> None:
    """Replace the string by its enum member; the name of an entry point stays as it is."""
    if (got := getattr(options, field_name)) in list(words):
        object.__setattr__(options, field_name, words(got))  # frozen


@dataclass(frozen=True)
class Clip:
    """Clipping of the merged pseudo-gradient; at most one of the two numbers, neither means no clipping."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    norm: float | None = None  # φ of the paper, absolute
    relative: float | None = None  # of the running median of accepted ‖δ‖
    per_layer: bool = False  # clip each layer by its own norm to `norm` (EDiT: 10)

    def __post_init__(self) -> None:
        _require_holds(self.norm is None or self.relative is None, "clip", "norm or relative, not both", self)
        of_norm = not self.per_layer or self.norm is not None
        _require_holds(of_norm, "clip.per_layer", "a norm beside it", self)
        _require_within(self, "clip", {"norm": LENGTHS, "relative": MULTIPLES}, frozenset())


@dataclass(frozen=True)
class OuterOptions:
    """The outer step and its rules (docs/guides/rules.md); the defaults are those of configs/shared/default.yaml."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    lr: float | str = 0.7  # or "auto": from the number of live clusters
    momentum: float = 0.8
    clip: Clip = field(default_factory=Clip)  # none; the paper's is φ = 1, the whole model's norm
    merge: MergeRule | str = MergeRule.MEAN  # or an entry point of the group dips.rules
    step: StepRule | str = StepRule.SHARE  # or an entry point of the group dips.rules
    weights: WeightRule = WeightRule.TOKENS

    def __post_init__(self) -> None:
        _coerce_word(self, "weights", WeightRule, "outer.weights")
        for key, ours in {"merge": MergeRule, "step": StepRule}.items():
            plugins.require_names(f"outer.{key}", [getattr(self, key)], ours, plugins.RULES)
            _coerce_known(self, key, ours)
        _require_holds(self.lr == AUTO or not isinstance(self.lr, str), "outer.lr", "a number or auto", self.lr)
        bounds = {"lr": RATES, "momentum": SHARES}
        _require_within(self, "outer", bounds, frozenset({"momentum"}))

    @property
    def has_momentum(self) -> bool:
        """Whether the momentum m moves θ in later steps."""
        return bool(self.momentum) and self.step is not StepRule.SGD


@dataclass(frozen=True)
class PenaltyOptions:
    """The pseudo-gradient penalty (§4.1, docs/architecture.md#penalty)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    # Gates that are applied, besides the check for finite numbers; a name that is not built in is an entry point.
    gates: tuple[GateName | str, ...] = (GateName.DIPS, GateName.REPLAY)
    alpha: float = 0.02  # §4.1: weight of the newest norm
    beta: float = 3.0  # §4.1
    e_cap: float = 2.0  # limits the threshold, so that large past scores do not disarm the gate
    sigma_floor: float = 0.02  # of μ: small past scores must not gate all pushes
    hard_cap: float = 10.0  # of the reference; applies in warm-ups too
    joiner_cap: float = 5.0  # of the others' median, in a cluster's first warm-up; paces 10 × apart make norms 3 × so
    warmup_rounds: int = 10  # accepted pushes of a cluster before its scores count
    history: int = 50  # rounds whose scores determine the threshold
    gate_patience: int = 3  # pushes gated in a row before a new warm-up or quarantine

    def __post_init__(self) -> None:
        plugins.require_names("penalty.gates", self.gates, GateName, plugins.GATES)
        _require_holds(len(set(self.gates)) == len(self.gates), "penalty.gates", "each gate once", self.gates)
        ours = frozenset(GateName)
        gates = tuple(GateName(name) if name in ours else name for name in self.gates)
        object.__setattr__(self, "gates", gates)  # frozen
        for key in ("hard_cap", "joiner_cap"):
            _require_holds(getattr(self, key) > 1, f"penalty.{key}", "a number above 1", getattr(self, key))
        _require_within(self, "penalty", _PENALTY_BOUNDS, frozenset({"sigma_floor"}))


_PENALTY_BOUNDS = {
    "alpha": SHARES,
    **dict.fromkeys(("beta", "e_cap", "sigma_floor", "hard_cap", "joiner_cap"), MULTIPLES),
    **dict.fromkeys(("warmup_rounds", "gate_patience"), COUNTS),
    "history": ROUNDS_KEPT,
}


@dataclass(frozen=True)
class StopOptions:
    """The end of the run; 0 means never by this measure (Algorithm 1, line 7)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    tokens: int = 0  # accepted in the lineage
    versions: int = 0  # outer steps
    wall_s: float = 0.0  # since this master's start

    def __post_init__(self) -> None:
        for key in ("tokens", "versions", "wall_s"):
            _require_holds(getattr(self, key) >= 0, f"stop.{key}", "0 or more", getattr(self, key))


@dataclass(frozen=True)
class DataOptions:
    """The data set, pre-partitioned into ranges (§4.2)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    ranges: int = 0  # 0: clusters bring their own data
    epochs: int = 1  # range e·ranges + i is range i in epoch e: nothing is trained twice under one number
    digest: str = ""  # of the data set, as `dips data build` printed it; "": not compared

    def __post_init__(self) -> None:
        _require_holds(self.ranges >= 0, "data.ranges", "0 or more", self.ranges)
        _require_holds(self.epochs >= 1, "data.epochs", "at least 1", self.epochs)


@dataclass(frozen=True)
class Targets:
    """The end of the run. It is outside the digest of `shared`, so that an operator can change it in a running run
    (`dips set`).
    """

    tokens: int = 0  # as in StopOptions
    versions: int = 0
    wall_s: float = 0.0
    epochs: int = 1  # as in DataOptions

    def describe(self) -> str:
        """Describe the targets in words, without those that are not set."""
        words = (
            f"{self.tokens:,} tokens" if self.tokens else "",
            f"{self.versions:,} versions" if self.versions else "",
            f"{self.wall_s:g} s of a master" if self.wall_s else "",
            f"{self.epochs} epochs of its data" if self.epochs > 1 else "",
        )
        return " or ".join(w for w in words if w) or "its data ends"


@dataclass(frozen=True)
class TunedOption:
    """An option that an operator changed in the running run (`dips set`); tunable.py says which ones may be changed."""

    key: str  # "outer.lr"
    value: float
    off: bool = False  # null in the files; then `value` has no meaning


@dataclass(frozen=True)
class TimingOptions:
    """Deadlines and leases of the master; seconds on its monotonic clock."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    window_s: float | None = None  # None: 5 % of the median time between a cluster's pushes, at least 1 s
    window: WindowRule = WindowRule.FIXED  # ADAPTIVE: longer than window_s, for pushes about to arrive
    heartbeat_s: float = 2.0
    lease_heartbeats: int = 5  # missed heartbeats after which a peer counts as dead
    hang_s: float = 120.0  # time without a new inner step after which the window does not wait for the trainer
    order_s: float = 10.0  # longest silence during orders that move no model: open, drop, commit, abort, ping
    compute_s: float = 300.0  # longest silence of a slave during Measure, Fold, Apply, Persist
    transfer_s: float = 3600.0  # longest silence of a push or pull while its cluster's bandwidth is unknown
    least_transfer_s: float = 30.0  # the least deadline, however few the bytes: a broken stream needs time to reconnect
    min_push_bps: float = 0.0  # bits/s; a push on a slower link is refused with the number; 0: no limit
    busy_retry_s: float = 2.0  # until a refused push is asked for again; less if a slot is due before

    def __post_init__(self) -> None:
        _coerce_word(self, "window", WindowRule, "timing.window")
        _require_within(self, "timing", _TIMING_BOUNDS, frozenset({"window_s", "min_push_bps"}))

    @property
    def lease_s(self) -> float:
        return self.heartbeat_s * self.lease_heartbeats


_TIMING_BOUNDS = {
    **dict.fromkeys(("window_s", "heartbeat_s", "hang_s", "order_s", "compute_s", "transfer_s"), SECONDS),
    **dict.fromkeys(("least_transfer_s", "busy_retry_s"), SECONDS),
    "lease_heartbeats": COUNTS,
    "min_push_bps": BITS_PER_S,
}
_WORDS: dict[str, type[StrEnum]] = {
    "codec": Codec,
    "durability": DurabilityMode,
    "on_persist_failure": PersistFailurePolicy,
    "requeue": RequeuePolicy,
}


@dataclass(frozen=True)
class Options:
    """All options of the Coordinator."""

    outer: OuterOptions = field(default_factory=OuterOptions)
    penalty: PenaltyOptions = field(default_factory=PenaltyOptions)
    stop: StopOptions = field(default_factory=StopOptions)
    data: DataOptions = field(default_factory=DataOptions)
    timing: TimingOptions = field(default_factory=TimingOptions)
    keep_snapshots: int = 2  # versions that are complete on all slaves; never fewer than 2
    codec: Codec = Codec.FP32  # of pushes whose base is the head; all others travel as fp32
    durability: DurabilityMode = DurabilityMode.COMMIT
    on_persist_failure: PersistFailurePolicy = PersistFailurePolicy.DEGRADE
    requeue: RequeuePolicy = RequeuePolicy.NONE
    keep_every: int = 0  # every n-th version is kept as an archive; 0: none
    keep_most: int = 0  # newest archives that are kept; 0: all
    most_rollback: int = MOST_ROLLBACK  # outer steps that the master undoes by itself; more wait for `dips rollback`
    lineage_kept: int = LINEAGE_KEPT  # not set by any file: tests and the simulation take 3, to reach the limit at all
    ranges_held: int = RANGES_HELD  # not set by any file, too

    def __post_init__(self) -> None:
        for key, words in _WORDS.items():
            _coerce_word(self, key, words, key)
        for key in ("keep_every", "keep_most", "most_rollback"):
            _require_holds(getattr(self, key) >= 0, key, "0 or more", getattr(self, key))
        for key in ("lineage_kept", "ranges_held"):
            _require_holds(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))

    @property
    def targets(self) -> Targets:
        """Return the targets of the files, which hold until an operator changes them."""
        return Targets(self.stop.tokens, self.stop.versions, self.stop.wall_s, self.data.epochs)
