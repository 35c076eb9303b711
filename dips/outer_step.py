"""One outer step in numbers, in one form for all rules: the Coordinator decides, kernels compute, the ledger keeps it.

    g = s·acc      m′ = a·m + b·g      θ′ = θ − lr·(c·g + e·m′)

Nesterov's step is a = e = μ, b = c = 1. Which rule chose the numbers is not in them: who replays a ledger knows no
rule. A layer whose s is 0 got no contribution that counts in it, and stays as it is, momentum included.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.dataclass import dataclass, replace

Factors = tuple[float, ...]  # of each layer, in manifest order; one number: of all of them
Numbers = tuple[float, float, float, float]  # a, b, c and e

STAYS: Numbers = (1.0, 0.0, 0.0, 0.0)  # m′ = m, θ′ = θ
MAX_FACTOR = 2.0**100  # of a layer: with parameters below 1e8 nothing of it overflows in fp32


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The numbers of one step."""

    scales: Factors  # s: what makes a mean of acc, and clips it
    lr: float
    a: float
    b: float
    c: float
    e: float
    returned: float = 0.0  # of what a lossy pull codec rounds away of θ′: how much goes into m′, to come back

    @property
    def numbers(self) -> Numbers:
        return (self.a, self.b, self.c, self.e)

    def of_layer(self, place: int) -> OuterStep:
        """The step of one layer, with its one scale."""
        scale = factor_at(self.scales, place)
        if scale == 0.0:
            return OuterStep((0.0,), self.lr, *STAYS)
        return self if len(self.scales) == 1 else replace(self, scales=(scale,))

    def of_layers(self, places: Iterable[int]) -> OuterStep:
        """The step of these layers."""
        return self if len(self.scales) == 1 else replace(self, scales=pick_factors(self.scales, places))


NO_STEP = OuterStep((0.0,), 0.0, 0.0, 0.0, 0.0, 0.0)  # of a version that no pushes made


def nesterov_numbers(momentum: float) -> Numbers:
    """As torch.optim.SGD(nesterov=True)."""
    return (momentum, 1.0, 1.0, momentum)


def nesterov_step(scale: float, lr: float, momentum: float) -> OuterStep:
    """Nesterov's step, one scale for all layers."""
    numbers = nesterov_numbers(momentum)
    return OuterStep((scale,), lr, *numbers, returned_share(lr, numbers))


def returned_share(lr: float, numbers: Numbers) -> float:
    """How much of what rounding left over is put into m′, so that all of it comes back in later steps of these numbers.

    A change δ of m′ moves θ by −lr·e·a·δ in the next step, by a times that in the one after it, and so on. Without
    momentum nothing comes back: 0.
    """
    a, _, _, e = numbers
    return (1 - a) / (lr * e * a) if lr * e * a > 0 else 0.0


def factor_at(factors: Factors, place: int) -> float:
    """The factor of one layer."""
    return factors[place] if len(factors) > 1 else factors[0]


def pick_factors(factors: Factors, places: Iterable[int]) -> Factors:
    """The factors of these layers."""
    return tuple(factors[place] for place in places) if len(factors) > 1 else factors


def join_factors(factors: Factors) -> Factors:
    """One number where all are equal."""
    return factors[:1] if factors and factors.count(factors[0]) == len(factors) else factors
