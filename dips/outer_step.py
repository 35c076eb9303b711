"""One outer step as numbers, in one form for all rules: the Coordinator decides it, and the ledger records it:

    g = s·acc      m′ = a·m + b·g      θ′ = θ − lr·(c·g + e·m′)

Nesterov's step is a = e = μ, b = c = 1. The numbers do not tell which rule chose them, so replaying a ledger needs no
rule. A layer whose s is 0 has no contribution that counts, and is unchanged, momentum included.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.dataclass import dataclass, replace

Factors = tuple[float, ...]  # per layer in manifest order; a single number is for all layers
Numbers = tuple[float, float, float, float]  # a, b, c and e

STAYS: Numbers = (1.0, 0.0, 0.0, 0.0)  # m′ = m, θ′ = θ
MAX_FACTOR = 2.0**100  # largest factor of a layer: with parameters below 1e8 nothing overflows in fp32


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The numbers of one step."""

    scales: Factors  # s: turns acc into a mean, and clips it
    lr: float
    a: float
    b: float
    c: float
    e: float
    returned: float = 0.0  # share of a lossy pull codec's rounding error of θ′ that is added to m′

    @property
    def numbers(self) -> Numbers:
        return (self.a, self.b, self.c, self.e)

    def of_layer(self, place: int) -> OuterStep:
        """Return the step of one layer, with its single scale."""
        scale = factor_at(self.scales, place)
        if scale == 0.0:
            return OuterStep((0.0,), self.lr, *STAYS)
        return replace(self, scales=(scale,))

    def of_layers(self, places: Iterable[int]) -> OuterStep:
        """Return the step of these layers."""
        return replace(self, scales=pick_factors(self.scales, places))


NO_STEP = OuterStep((0.0,), 0.0, 0.0, 0.0, 0.0, 0.0)  # of a version that was not made by pushes


def nesterov_numbers(momentum: float) -> Numbers:
    """Return the numbers of torch.optim.SGD(nesterov=True)."""
    return (momentum, 1.0, 1.0, momentum)


def nesterov_step(scale: float, lr: float, momentum: float) -> OuterStep:
    """Return Nesterov's step with one scale for all layers."""
    numbers = nesterov_numbers(momentum)
    return OuterStep((scale,), lr, *numbers, returned_share(lr, numbers))


def returned_share(lr: float, numbers: Numbers) -> float:
    """Return the share of the rounding error to add to m′, so that later steps with these numbers return all of it to
    θ.

    A change δ of m′ moves θ by −lr·e·a·δ in the next step, by a times that in the one after it, and so on. Without
    momentum nothing can be returned: 0.
    """
    a, _, _, e = numbers
    return (1 - a) / (lr * e * a) if lr * e * a > 0 else 0.0


def factor_at(factors: Factors, place: int) -> float:
    """Return the factor of one layer."""
    return factors[place] if len(factors) > 1 else factors[0]


def pick_factors(factors: Factors, places: Iterable[int]) -> Factors:
    """Return the factors of these layers."""
    return tuple(factors[place] for place in places) if len(factors) > 1 else factors


def join_factors(factors: Factors) -> Factors:
    """Return a single number if all factors are equal."""
    return factors if len(set(factors)) > 1 else factors[:1]
