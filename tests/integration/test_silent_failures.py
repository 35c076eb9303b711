"""Failures that would train on with a wrong model and say nothing: each is mended, or ends the job with what to do."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest

from dips.commands.status import ask_status
from dips.master.genesis import LEDGER
from dips.master.ledger import Ledger
from dips.transport.endpoints import master_peer
from tests.integration import cluster_harness as harness
from tests.integration import train_coarse as coarse
from tests.integration import train_diverging as diverging

HERE = Path(__file__).parent
H = 5


def marks(timeline: Path, kind: str) -> Iterator[dict[str, Any]]:
    text = timeline.read_text() if timeline.exists() else ""
    return (m for m in map(json.loads, text.splitlines()) if m["kind"] == kind)


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("overlap", "steps", "spoilt", "fragments"),
    [("none", H, H + 2, 1), *(pytest.param("full", *of, marks=pytest.mark.slow) for of in ((H, H + 2, 1), (8, 9, 2)))],
)
def test_a_nan_heals(tmp_path: Path, overlap: str, steps: int, spoilt: int, fragments: int) -> None:
    """One NaN in one of two ranks' gradients, in the second round or after the first fragment of the first push has
    left: nothing of it travels, the head replaces the model and AdamW begins anew, so by the third round all is finite,
    and the loss falls on."""
    tensors = {name: p.detach().numpy() for name, p in diverging.build().named_parameters()}
    shared = {
        "stop": {"versions": 8},
        "outer": {"lr": 1.0, "momentum": 0.0, "step": "nesterov", "clip": {}},
        "penalty": {"gates": []},
    }
    out = tmp_path / "found"
    command = [*harness.TORCHRUN, "2", str(HERE / "train_diverging.py"), str(out), str(spoilt)]
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 0.05}, slaves=1) as run:
        run.start_servers()
        run.wait(run.start_cluster("a", command, steps=steps, overlap=overlap, fragments=fragments), 90)
        rounds = run.history()
    assert len([r for r in rounds if r.version]) == 8
    assert all(isfinite(fold.norm) for r in rounds for fold in r.folds)
    assert not any(o.kind == "gated" for r in rounds for o in r.outcomes), "what is not finite reached a slave"
    (told,) = marks(run.timeline("a"), "diverged")
    assert "is not finite on rank" in told["reason"]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        losses, at = found["losses"], found["at"]
        assert found["finite"]
        assert any(isnan(loss) for loss in losses)
        healed = [at[i] for i, loss in enumerate(losses) if i > spoilt and isfinite(loss)]
        assert min(healed) <= 3 and not any(isnan(loss) for loss, v in zip(losses, at, strict=True) if v >= 3)
        assert losses[-1] < 0.8 * losses[spoilt], (losses[spoilt], losses[-1])


@pytest.mark.timeout(90)
def test_a_job_is_started_again_if_that_is_asked_for(tmp_path: Path) -> None:
    """on_divergence: restart: the ranks raise, the agent starts the command anew, and that one trains to the end."""
    with diverging_run(tmp_path, str(H + 2), versions=4) as (run, cluster):
        run.wait(cluster, 60)
        assert len(list(marks(run.timeline("a"), "trainer_start"))) == 2
    assert "Diverged: its model diverged: 0.bias is not finite on rank 0" in cluster.log.read_text()
    assert all(map(isfinite, json.loads((tmp_path / "found.0").read_text())["losses"]))


@pytest.mark.timeout(90)
def test_a_model_that_diverges_in_a_row_is_quarantined(tmp_path: Path) -> None:
    """Every gradient holds a NaN: after three pushes that were kept back `dips status` says so."""
    with diverging_run(tmp_path, "ever", versions=4, on_divergence="reset") as (run, _):
        master = master_peer(run.address, None)
        quarantined = lambda: asyncio.run(ask_status(master))["clusters"].get("a", {}).get("quarantined")  # noqa: E731
        run.until(lambda: list(marks(run.timeline("a"), "diverged"))[2:], 40, "the model has diverged three times")
        run.until(quarantined, 10, "it is quarantined")
        assert not [r for r in run.history() if r.outcomes], "nothing of it was ever pushed"


@contextmanager
def diverging_run(
    tmp_path: Path, spoilt: str, versions: int, on_divergence: str = "restart"
) -> Iterator[tuple[harness.Run, harness.Process]]:
    """One cluster of one plain rank that diverges."""
    tensors = {name: p.detach().numpy() for name, p in diverging.build().named_parameters()}
    command = [sys.executable, str(HERE / "train_diverging.py"), str(tmp_path / "found"), spoilt]
    shared = {"stop": {"versions": versions}}
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 0.02}, slaves=1) as run:
        run.start_servers()
        yield run, run.start_cluster("a", command, steps=H, max_restarts=1, on_divergence=on_divergence)


def coarse_run(directory: Path, versions: int) -> harness.Run:
    """A run of the model of train_coarse.py."""
    tensors = {name: p.detach().numpy() for name, p in coarse.build().named_parameters()}
    shared = {"stop": {"versions": versions}, "outer": {"lr": 0.5, "clip": {}}, "penalty": {"gates": []}}
    return harness.Run(directory, tensors, shared=shared, timing={"window_s": 0.02}, slaves=1)


def run_alone(
    tmp_path: Path, mode: str, versions: int, steps: int, code: int = 0, ranks: int = 0, **options: Any
) -> str:
    """One cluster, of one process or of so many ranks, runs a script of train_coarse.py to its end; what it printed."""
    start = [*harness.TORCHRUN, str(ranks)] if ranks else [sys.executable]
    command = [*start, str(HERE / "train_coarse.py"), mode, str(tmp_path / "out")]
    with coarse_run(tmp_path, versions) as run:
        run.start_servers()
        cluster = run.start_cluster("a", command, steps=steps, **options)
        run.wait(cluster, 60, code)
        assert not code or len(run.versions()) < versions
        return cluster.log.read_text()


@pytest.mark.timeout(90)
def test_a_cluster_of_16_bits_that_trains_nothing_changes_nothing(tmp_path: Path) -> None:
    """θ is no number of bf16, yet each of 6 pushes of a model that is has norm 0: it is θ, bit for bit.

    So no version follows, and what nobody trains is told, as are the 16 bits.
    """
    said = run_alone(tmp_path, "idle", versions=20, steps=1)
    with closing(Ledger.open(tmp_path / "master" / LEDGER, readonly=True)) as ledger:
        rounds = ledger.read_history(1000)
    outcomes = [o for r in rounds for o in r.outcomes]
    assert not any(r.version for r in rounds)
    assert len(outcomes) == coarse.IDLE_STEPS and all("norm 0 after 1 inner step" in o.reason for o in outcomes)
    assert "weight: a parameter of 16 bits without fp32 masters" in said and "4 B of host memory per parameter" in said


UNDOING = [("hidden", "whole"), ("copies", "whole"), ("buried", "whole"), ("buried", "lazy")]


@pytest.fixture(scope="module")
def undone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int | None, str]]:
    """Exit codes of clusters that undo a pull, None for one that trains on, and what they print: side by side in one
    run without an end.
    """
    directory, started = tmp_path_factory.mktemp("undone"), {}
    with coarse_run(directory, 1_000_000) as run:
        run.start_servers()
        for mode, install in UNDOING:
            command = [sys.executable, str(HERE / "train_coarse.py"), mode, str(directory / "out")]
            started[mode, install] = run.start_cluster(f"{mode}-{install}", command, steps=5, install=install)
        with suppress(AssertionError):  # told by the test of the one that has not
            run.until(lambda: all(cluster.code is not None for cluster in started.values()), 60, "all end")
        return {way: (cluster.code, cluster.log.read_text()) for way, cluster in started.items()}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("mode", "install", "code"), [*((*of, 78) for of in UNDOING), ("given", "whole", 0)])
def test_masters_that_undo_a_pull_end_the_job(
    request: pytest.FixtureRequest, tmp_path: Path, mode: str, install: str, code: int
) -> None:
    """Not known to the outer loop: found in the optimizer before the first push, with what to write. Given: it trains.

    Where even the optimizer does not show them, the first step after a pull does.
    """
    if code:
        ended, said = request.getfixturevalue("undone")[mode, install]
        assert ended == code, said
    else:
        said = run_alone(tmp_path, mode, versions=4, steps=5, install=install)
    assert ("keeps an fp32 master of it (" in said) is (mode in ("hidden", "copies"))
    assert ("wrote back the values from before it" in said) is (mode == "buried")
    assert ("OuterLoop(model, optimizer=optimizer)" in said) is (mode != "given")


@pytest.mark.torchrun
@pytest.mark.timeout(90)
def test_ranks_that_train_apart_push_nothing(tmp_path: Path) -> None:
    """DDP is forgotten: half of each rank's model would be pushed, and the pull would make both look alike again."""
    said = run_alone(tmp_path, "apart", versions=3, steps=3, code=78, ranks=2)
    assert "ranks hold different values as replicas of" in said
    assert "Is DistributedDataParallel or fully_shard forgotten?" in said
    with closing(Ledger.open(tmp_path / "master" / LEDGER, readonly=True)) as ledger:
        assert not [r for r in ledger.read_history(1000) if r.outcomes], "nothing of it was ever pushed"


@pytest.mark.timeout(90)
def test_a_checkpoint_that_was_loaded_too_early_is_not_believed(tmp_path: Path) -> None:
    """The pull has overwritten it, so its tokens do not count; what to do instead is returned."""
    run_alone(tmp_path, "early", versions=3, steps=3, max_restarts=1)
    assert "load model and optimizer after OuterLoop is made" in json.loads((tmp_path / "out").read_text())["said"]


@pytest.mark.timeout(90)
def test_a_compiled_model_of_ddp_trains(tmp_path: Path) -> None:
    """torch.compile(DDP(m)) has the names of m, and what is pulled is what the compiled graph computes with."""
    run_alone(tmp_path, "compiled", versions=4, steps=3)
    losses = json.loads((tmp_path / "out").read_text())["losses"]
    assert losses[-1] < 0.8 * losses[0]
