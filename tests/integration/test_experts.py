"""Mixtures of experts: Megatron-core's expert parallelism, exact on both ranks, with the routers' biases shared."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.integration.test_adapters import under_torchrun

pytestmark = pytest.mark.torchrun
WAYS = ["dp2", "ep2", "pp2", "ep2, bf16, distributed optimizer", "tp2 ep2", "tp2 etp2"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks that went through the layouts of one mixture of four experts a layer."""
    if importlib.util.find_spec("megatron") is None:  # not imported: the ranks are other processes
        pytest.skip("megatron-core is not installed: its experts are NOT tested here")
    out = tmp_path_factory.mktemp("experts") / "found"
    return under_torchrun(2, out, "check_megatron.py", "experts", within_s=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", WAYS)
def test_megatrons_experts_hold_and_push_what_was_pulled(two: list[dict[str, Any]], way: str) -> None:
    """Each expert under its number in the whole model, cut by its own tensor parallelism; biases beside it; once."""
    for rank, of in enumerate(two):
        assert len(of[way]["wrong"]) == 8
        assert not any(of[way]["wrong"].values()), (rank, of[way]["wrong"])
    assert sum(of[way]["moved"] for of in two) == two[0][way]["parameters"]


def test_megatrons_experts_are_one_model_in_every_layout(two: list[dict[str, Any]]) -> None:
    """One digest over expert, pipeline, tensor and data parallelism; one loss."""
    assert len({of[way]["digest"] for of in two for way in WAYS}) == 1
    losses = {way: [of[way]["loss"] for of in two if of[way]["loss"] == of[way]["loss"]] for way in WAYS}
    assert [len(losses[way]) for way in WAYS[:4]] == [2, 2, 1, 2]
    assert all(loss == pytest.approx(losses["dp2"][0], abs=1e-5) for way in WAYS[:3] for loss in losses[way])
