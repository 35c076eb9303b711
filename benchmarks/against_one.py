"""Two clusters against one that trains alone, at equal tokens and equal inner steps: the final loss of two examples.

Real masters, slaves, agents and training scripts on loopback; text is the running Python's standard library, as bytes.

* own_gpt.py: two ranks of FSDP2 and a plain rank, against one plain rank with three times the batch.
* hf_trainer.py: two Trainers, each a process, on data ranges that they lease, against one with twice the batch.

Who trains alone takes part in a run of its own whose outer step does nothing (rate 1, no momentum, no clip): but for a
rounding in each round that is plain training. *Together*: the window waits for both clusters, so that steps are
equal. *Apart*: each pushes when it has taken its steps and waits for nobody; steps then are what came of it.
The loss is that of the exported last version on bytes that nobody trained on; the mean of three seeds (of θ and data).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import torch
import yaml

import dips
from benchmarks.harness import Bench, main
from benchmarks.record import ROOT
from benchmarks.whole_run import Processes, free_port
from dips.config import load_run
from dips.demo.data import load_corpus
from dips.master import genesis
from dips.master.ledger import Ledger

EXAMPLES = ROOT / "configs" / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SEEDS = (0, 1, 2)
WORSE = 0.02  # nats: what two clusters may lose against one
TOGETHER_S, APART_S = 60.0, 0.3  # windows: the first closes early, when every cluster is in
WITHIN_S = 900.0
PLAIN = {"lr": 1.0, "momentum": 0.0, "clip": {}}
OUTER = {"lr": 0.7, "momentum": 0.7, "clip": {"relative": 2.0}}
VALIDATION_ROWS = 512
GPT_ROWS, HF_ROWS = 8, 8  # of a rank in an inner step
STEPS, H = 1500, 20  # inner steps of each cluster, if they are together; of them before a push
GPT_LR, HF_LR = 3e-3, 1.5e-3
WARMUP_STEPS = 150  # several rounds: with 20 outer momentum overshoots in the first versions, which is never made good
RANGE_STEPS = 10  # of both clusters


@dataclass(frozen=True, slots=True)
class Job:
    """One cluster: ranks under torchrun, 0 for a plain process; words of the example's command line."""

    ranks: int
    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """One run of an example."""

    example: str
    jobs: Mapping[str, Job]
    outer: Mapping[str, Any]
    tokens: int  # of the run
    steps: int  # H
    window_s: float
    shared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What came of a run."""

    loss: float  # nats per byte, validation
    tokens: int  # accepted
    steps: Mapping[str, int]  # accepted inner steps of each cluster
    versions: int
    joint: int  # of them, from every cluster
    stale: int  # pushes with an older base than the version before theirs
    clipped: int  # versions


def train(case: ExampleRun, seed: int, directory: Path) -> RunOutcome:
    """Train θ of `seed` until the run is over; measure its last version."""
    example, address = load_example(case.example), f"127.0.0.1:{free_port()}"
    shared = {
        "run": "bench", "stop": {"tokens": case.tokens}, "outer": dict(case.outer), "penalty": {"gates": []},
        **case.shared,
    }  # fmt: skip
    run = directory / "dips.yaml"
    run.write_text(yaml.safe_dump(_run_file(shared, address, case.window_s)))
    torch.manual_seed(seed)
    genesis.make_run(load_run(run), {name: p.detach().numpy() for name, p in example.build().named_parameters()})
    processes = Processes(directory)
    try:
        processes.start("master", _module("dips.master.app", "--config", str(run)))
        processes.start("ps0", _module("dips.slave.app", "--config", str(run), "--name", "ps0"))
        agents = {name: _start(processes, directory, name, case, shared, address) for name in case.jobs}
        for name, agent in agents.items():
            processes.wait(name, agent, WITHIN_S)
        exported = directory / "model.safetensors"
        command = _module("dips.cli", "export", "--config", str(run), "--output", str(exported))
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    finally:
        processes.end()
    return _measure(example, exported, directory)


def _start(
    processes: Processes, directory: Path, name: str, case: ExampleRun, shared: Mapping[str, Any], address: str
) -> subprocess.Popen[bytes]:
    job, file = case.jobs[name], directory / f"{name}.yaml"
    cluster = {
        "shared": dict(shared), "cluster": name, "master": address, "directory": name, "tls": False,
        "max_restarts": 0, "pace": {"steps": case.steps},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(cluster))
    start = [*TORCHRUN, str(job.ranks)] if job.ranks else [sys.executable]
    meeting = [str(ROOT / "benchmarks" / "meeting_rank.py"), str(directory), str(len(case.jobs))]
    words = [*meeting, str(EXAMPLES / f"{case.example}.py"), *job.words]
    return processes.start(name, [*_module("dips.client.app", "--config", str(file)), "--", *start, *words])


def _measure(example: ModuleType, exported: Path, directory: Path) -> RunOutcome:
    model = example.build()
    dips.load(model, exported)
    sample = torch.from_numpy(load_corpus(1).validation_sample(VALIDATION_ROWS, example.LENGTH).astype("int64"))
    with torch.no_grad():
        loss = float(torch.stack([example.loss_of(model, rows) for rows in sample.split(64)]).mean())
    with closing(Ledger.open(directory / "master" / genesis.LEDGER, readonly=True)) as ledger:
        rounds = [r for r in ledger.read_history(100_000) if r.version is not None]
    folds = [fold for r in rounds for fold in r.folds]
    names = sorted({fold.push.cluster for fold in folds})
    steps = {name: sum(fold.inner_steps for fold in folds if fold.push.cluster == name) for name in names}
    return RunOutcome(
        loss, sum(r.tokens for r in rounds), steps, len(rounds),
        joint=sum(len(r.folds) == len(names) for r in rounds),
        stale=sum(fold.base != r.parent for r in rounds for fold in r.folds),
        clipped=sum(r.clipped for r in rounds),
    )  # fmt: skip


def load_example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", name, *words]


def _run_file(shared: Mapping[str, Any], address: str, window_s: float) -> dict[str, Any]:
    model = str(Path("master") / genesis.INITIAL)
    return {
        "shared": dict(shared),
        "master": {"listen": address, "directory": "master", "timing": {"window_s": window_s}},
        "slaves": [{"name": "ps0", "directory": "ps0", "initial_model": model, "master": address}],
        "tls": False,
    }


def _own_gpt(together: bool, alone: bool, text: Path, seed: int, steps: int) -> ExampleRun:
    """Two ranks of FSDP2 and a plain rank, of ROWS sequences each; alone all of them in one plain rank."""

    def job(ranks: int, share: int, number: int) -> Job:
        words = [str(text), "--sequences", str(share * GPT_ROWS), "--seed", str(10 * seed + number)]
        return Job(ranks, [*words, "--lr", str(GPT_LR), "--warmup", str(WARMUP_STEPS)])

    jobs = {"one": job(0, 3, 1)} if alone else {"west": job(2, 1, 2), "east": job(0, 1, 3)}
    tokens = 3 * GPT_ROWS * steps * int(load_example("own_gpt").LENGTH)
    return ExampleRun("own_gpt", jobs, PLAIN if alone else OUTER, tokens, H, TOGETHER_S if together else APART_S)


def _trainer(together: bool, alone: bool, text: Path, seed: int, steps: int) -> ExampleRun:
    """Two Trainers of HF_ROWS rows a step, on leased ranges of RANGE_STEPS steps of both; alone one with all rows."""
    rows = HF_ROWS * (2 if alone else 1)

    def job(number: int) -> Job:
        words = ["--text", str(text), "--text-rows", str(2 * HF_ROWS * steps), "--rows", str(rows)]
        return Job(0, [*words, "--warmup", str(WARMUP_STEPS), "--lr", str(HF_LR), "--seed", str(10 * seed + number)])

    jobs = {"one": job(1)} if alone else {"west": job(2), "east": job(3)}
    tokens = 2 * HF_ROWS * steps * int(load_example("hf_trainer").LENGTH)
    shared = {"data": {"ranges": steps // RANGE_STEPS}}
    outer = PLAIN if alone else OUTER
    return ExampleRun("hf_trainer", jobs, outer, tokens, H, TOGETHER_S if together else APART_S, shared)


def measure(bench: Bench) -> None:
    """Each example: alone, together, apart."""
    torch.set_num_threads(1)
    seeds, steps = (SEEDS[:1], STEPS // 10) if bench.quick else (SEEDS, STEPS)
    for make in (_own_gpt, _trainer):
        found: dict[str, list[RunOutcome]] = {}
        for kind, together, alone in (("alone", True, True), ("together", True, False), ("apart", False, False)):
            for seed in seeds:
                with tempfile.TemporaryDirectory(prefix="dips-bench-") as made:
                    text = Path(made) / "text"
                    text.write_bytes(load_corpus(1).training.tobytes())
                    case = make(together, alone, text, seed, steps)
                    bench.say(f"{case.example}, {kind}, seed {seed}")
                    found.setdefault(kind, []).append(train(case, seed, Path(made)))
                    bench.say(str(found[kind][-1]))
        _show(bench, case.example, found, held=not bench.quick)


def _show(bench: Bench, example: str, found: Mapping[str, Sequence[RunOutcome]], held: bool) -> None:
    one = [run.loss for run in found["alone"]]
    bench.row(f"{example}, alone", mean(one), "nats")
    for kind in ("together", "apart"):
        losses = [run.loss for run in found[kind]]
        least = 1.0 if held and kind == "together" else None
        of = mean(one) + WORSE
        bench.row(f"{example}, {kind}", mean(losses), "nats", against=f"alone + {WORSE}", of=of, least=least, less=True)
        bench.note(f"{example}, {kind}, against one alone, seed by seed: {_differences(losses, one)} nats")
    for kind, runs in found.items():
        bench.note(f"{example}, {kind}: {'; '.join(_describe(run) for run in runs)}")


def _describe(run: RunOutcome) -> str:
    versions = f"{run.versions} versions ({run.joint} from all, {run.clipped} clipped)"
    return f"{run.tokens:,} tokens, {versions}, {run.stale} stale pushes, steps {dict(run.steps)}"


def _differences(losses: Sequence[float], of: Sequence[float]) -> str:
    return ", ".join(f"{loss - one:+.4f}" for loss, one in zip(losses, of, strict=True))


if __name__ == "__main__":
    main("against_one", __doc__, measure)
