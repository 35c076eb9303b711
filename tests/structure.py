"""Figures of how the code is cut: lines per file and per function, and how many function names are a single word.

    python tests/structure.py [FOLDER ...] [--files]      # default: dips

A comparison, not a limit: the last lines give the same figures of h11 and torchft, which we learned from. Generated
code does not count, nor do names with two leading underscores. Then the keys of the run file and of the cluster file,
each where it may stand; those of `shared` count once.

Last, files per task: how many files a reader opens who follows a task through the definitions that it passes (TASKS).
Each is looked up where it stands today, so a move shows in the figure, and a name that is gone is an error. `--files`
lists them.
"""

from __future__ import annotations

import ast
import statistics
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from pydantic import BaseModel

from dips.config import ClusterFile, RunFile

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Figures:
    """What is compared of one code base."""

    files: tuple[int, int, int]  # lines per file: median, 90th percentile, largest
    functions: tuple[int, int, int]  # lines per function, likewise
    one_word: float  # share of function names that are one word, 0 to 1


@dataclass(frozen=True)
class Walk:
    """A walk through a task: what it passes or changes, in order, and how many files that should be at most."""

    goal: int
    stations: str  # names of classes and functions, `module.name` where one is not unique; or paths


# One push and one pull from `OuterLoop.step` to the next parameter, by the 93 files of the review of November 2026: of
# each file of then its largest public definition, where that is still there.
ONE_PUSH_AND_PULL = """
    OuterLoop StepReports StepChecks OuterSteps OuterState AgentClient JobCollectives AgentConnection Stepped
    decode_message Connection RankServer AgentCore answer_question push_pull.on_outcome RangeQueue Pace
    state.ask_master AskMaster Agent MasterLink
    RealBounds ClusterServicer Runtime MasterCore SlaveRegistered Coordinator drop_push refuse_slot SlotQueue RunState
    Order Outbox MasterOutside SlaveLink SentOrder
    SlaveRuntime OrderDesk Meters Shard OpenTransfers ZmqFlow Receiver IncomingPush
    ShardTransfer Feedback HostMemory write_merged PartExchange ShardBuffer BackgroundTransfer PullTransfer TransferLoop
    LanePart TransferRate deal_pieces Stream StreamName unpack_header encode_body LayerLayout Lane Intake Turns
    Stage
    on_push_measured window_deadline Penalty judge_norm hard_cap weigh_push scale_layer step_share ShardRound Versions
    AveragedLayers KernelPool kernels.apply commit_version LedgerState Ledger write_run on_slaves_flipped
    on_pull_moved on_pull_finished Sender OutgoingPull HeldThetas ShardBlocks
"""
TASKS = {
    "one push and pull": Walk(45, ONE_PUSH_AND_PULL),
    "a stateless gate": Walk(3, "GateName GATES judge_replay"),
    "a gate that remembers": Walk(6, "GateName GATES judge_loss PenaltyRow move_loss dips/master/schema.py"),
    "a codec": Walk(3, "dips/codecs.py dips/quantisers.py tests/codec_bounds.py"),
    "where a pull's bytes reach a parameter": Walk(4, "OuterSteps ShardTransfer HostMemory PullTransfer"),
    "why gated": Walk(2, "judge_norm Penalty"),
    "a metric of a slave's own": Walk(2, "dips/slave/metrics.py dips/slave/app.py"),
    "a metric that the master shows": Walk(5, "protos/dips/v1/slave.proto SlaveHeartbeat Meters prometheus.TABLES"),
    "a parallel layout": Walk(5, "Adapter choose_adapter Rect TransferPlan TorchAdapter"),
}

# Measured by `measure` on 2026-11-22, tests left out.
PEERS = {
    "h11": Figures((153, 369, 659), (7, 38, 64), 0.12),  # 62c5068, 2025-04
    "torchft": Figures((108, 415, 2023), (9, 34, 189), 0.41),  # 73dafea, 2025-10; 0.33 with its tests
}


def python_files(folders: Iterable[Path]) -> list[Path]:
    """Every file that a person wrote: generated code lies in folders of that name."""
    return sorted(p for folder in folders for p in folder.rglob("*.py") if "generated" not in p.parts)


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def measure(files: list[Path]) -> Figures:
    """Read all files once."""
    lengths = [len(path.read_text().splitlines()) for path in files]
    functions = [function for path in files for function in functions_of(path)]
    spans = [(f.end_lineno or f.lineno) - f.lineno + 1 for f in functions]
    names = [f.name.strip("_") for f in functions if not f.name.startswith("__")]
    one_word = sum("_" not in name for name in names) / len(names)
    return Figures(_spread(lengths), _spread(spans), one_word)


def _spread(values: list[int]) -> tuple[int, int, int]:
    ordered = sorted(values)
    return int(statistics.median(ordered)), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]


def config_keys(section: object, above: str = "") -> Iterator[str]:
    """Every key that has a value of its own, as `master.timing.window_s`."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        below = {name: field.annotation for name, field in section.model_fields.items()}
    elif isinstance(section, type) and is_dataclass(section):
        hints = typing.get_type_hints(section)
        below = {field.name: hints[field.name] for field in fields(section)}
    elif typing.get_origin(section) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        found = {key for part in typing.get_args(section) for key in config_keys(part, above)} - {above}
        yield from sorted(found) or [above]
        return
    else:
        yield above
        return
    for name, annotation in below.items():
        yield from config_keys(annotation, f"{above}.{name}" if above else name)


def find_files(task: Walk, defined: dict[str, list[Path]]) -> list[str]:
    """Return the files of a task in their order, each once; raise LookupError at a name that is gone or not unique."""
    found = dict[str, None]()
    for station in task.stations.split():
        if "/" in station:
            places = [path for path in [ROOT / station] if path.is_file()]
        else:
            module, _, name = station.rpartition(".")
            places = [path for path in defined.get(name, ()) if not module or path.stem == module]
        if len(places) != 1:
            raise LookupError(
                f"{station}: expected one place, found {[str(path.relative_to(ROOT)) for path in places]}"
            )
        found[str(places[0].relative_to(ROOT))] = None
    return list(found)


def find_definitions() -> dict[str, list[Path]]:
    """Return where each class, function and constant of dips is defined, by its name."""
    defined = dict[str, list[Path]]()
    for path in python_files([ROOT / "dips"]):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            for target in targets:
                defined.setdefault(str(getattr(target, "name", getattr(target, "id", ""))), []).append(path)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.setdefault(node.target.id, []).append(path)
    return defined


def row(name: str, figures: Figures) -> str:
    files, functions = (" / ".join(map(str, spread)) for spread in (figures.files, figures.functions))
    return f"{name:<12}{files:>20}{functions:>20}{figures.one_word:>14.0%}"


def main() -> None:
    list_files = "--files" in sys.argv
    folders = [Path(word) for word in sys.argv[1:] if word != "--files"] or [ROOT / "dips"]
    print(f"{'':<12}{'lines per file':>20}{'per function':>20}{'one-word names':>16}")
    print(f"{'':<12}{'median / p90 / max':>20}{'median / p90 / max':>20}")
    print(row(", ".join(f.name for f in folders), measure(python_files(folders))))
    for name, figures in PEERS.items():
        print(row(name, figures))
    run, cluster = list(config_keys(RunFile)), list(config_keys(ClusterFile))
    own = [key for key in cluster if not key.startswith("shared.")]
    print(f"keys: {len(run) + len(own)}, {len(run)} of the run file and {len(own)} of the cluster file")
    files = python_files([ROOT / "dips"])
    print(f"dips: {len(files)} files, {sum(len(path.read_text().splitlines()) for path in files)} lines")
    print("files per task (goal)")
    defined = find_definitions()
    for name, task in TASKS.items():
        opened = find_files(task, defined)
        print(f"{len(opened):6} ({task.goal})  {name}", *(opened if list_files else ()), sep="\n              ")


if __name__ == "__main__":
    main()
