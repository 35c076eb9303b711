"""How far θ went since a push's base, as the Coordinator knows it."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from dips.ids import VersionId
from dips.protocol import codec
from dips.protocol import events as ev
from dips.protocol.effects import Apply
from dips.protocol.manifest import Layer, Manifest, Parameter
from tests.unit.protocol.scripted_run import ScriptedRun

TWO_LAYERS = Manifest(tuple(Layer(name, (Parameter(f"{name}.w", (10,)),)) for name in "kl"))


class MovingRun(ScriptedRun):
    """Each version is as far from the last one as `squares` say."""

    def __init__(self, manifest: Manifest = TWO_LAYERS) -> None:
        self.squares: tuple[float, ...] = (9.0, 16.0)
        super().__init__(manifest=manifest)

    def _answer(self, body: Any) -> Any:
        match body:
            case Apply():
                return ev.Prepared(body.version, self.squares)
        return super()._answer(body)

    def commit_version(self, cluster: str) -> VersionId:
        push = self.push(cluster)
        self.wait(11.0)
        self.outcome(push)
        return self.head

    def moved_since(self, base: VersionId) -> float:
        """As the evidence of a push of this base has it."""
        push = self.open_push("late", base)
        self.commit(push)
        moved = [p.verdict.evidence.moved for p in self.machine._run.round.folded if p.id == push]  # type: ignore[union-attr]
        self.wait(11.0)
        self.outcome(push)
        return float(moved[0])


def begun() -> tuple[MovingRun, list[VersionId]]:
    run = MovingRun()
    run.train("a", "late")
    return run, [run.head, run.commit_version("a"), run.commit_version("a")]


def test_steps_add_up_from_the_base_on() -> None:
    """Σ over layers of √Σ(θ − θ′)², as a norm of pushes has it, and over the versions since; 0 of the head's own."""
    for back, expected in ((0, 0.0), (1, 7.0), (2, 14.0)):
        run, versions = begun()
        assert run.moved_since(versions[-1 - back]) == expected


@pytest.mark.parametrize("squares", [(nan, 1.0), (inf, 1.0), (), (4.0,)])
def test_what_is_not_told_is_unknown(squares: tuple[float, ...]) -> None:
    """A θ′ that overflowed, a slave that says too little: nothing is taken off, not even what is known."""
    run, versions = begun()
    run.squares = squares
    run.commit_version("a")
    assert run.moved_since(versions[0]) == 0.0


def test_it_is_part_of_a_kept_state() -> None:
    """`dips-master replay` judges as the master did."""
    run, versions = begun()
    kept = codec.decode_value(codec.encode_value(run.machine.capture_state()))
    assert kept.moved_since(versions[1]) == 7.0 and kept.moved_since(None) == 0.0
