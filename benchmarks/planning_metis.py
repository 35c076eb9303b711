"""Starts Metis' planner, from a checkout that the caller names, on a profile of ours, and reads its plans.

Metis (SamsungLabs/Metis) is CC BY-NC 4.0. Nothing of it is in this repository: its program gets the files that its
README describes, and its plans are read from what it prints.

Known limits, of its program: nodes have equally many devices, at most 9; four names of kinds; one rate inside nodes,
which it takes between nodes, too; memory counts five times. It is given no tensor parallelism to choose from.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dips.inside.planning.profile import GBIT_BYTES
from dips.inside.planning.search import Planner

NAMES = ("A100", "V100", "P100", "T4")  # that it knows
SAMPLES = (1, 2, 4, 8, 16)  # of a micro-batch, that are in its profile
LIMIT_S = 300.0
PLAN = re.compile(r"^\d+, [\d.e+-]+, (\(.*\)), (\[[\d, ]*\]), (\[.*\]), \d+, (\[[\d, ]*\])$")


@dataclass(frozen=True, slots=True)
class MetisPlan:
    """Devices of each stage, and where each stage begins, with the number of layers at the end."""

    groups: tuple[tuple[str, ...], ...]
    cuts: tuple[int, ...]


def run_metis(checkout: Path, planner: Planner) -> tuple[list[MetisPlan], float]:
    """Return its plans, best first, and the seconds of processor time that it took.

    Errors  SystemExit if it is no checkout of Metis, ends with an error, or takes longer than `LIMIT_S`
    """
    program = checkout / "cost_het_cluster.py"
    if not program.is_file():
        raise SystemExit(f"--metis: expected a checkout of SamsungLabs/Metis, got {checkout} without {program.name}")
    kinds = dict(zip(dict.fromkeys(node.kind for node in planner.profile.nodes), NAMES, strict=False))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as directory:
        words = _write_inputs(planner, kinds, Path(directory))
        done = subprocess.run(
            [sys.executable, str(program), *words], cwd=checkout, capture_output=True, text=True, timeout=LIMIT_S
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"Metis ended with {done.returncode}: {done.stderr[-500:]}")
    plans = [_read_plan(planner, kinds, found) for line in done.stdout.splitlines() if (found := PLAN.match(line))]
    return plans, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _write_inputs(planner: Planner, kinds: Mapping[str, str], folder: Path) -> list[str]:
    """Write hosts, rates and seconds of layers as its README has them; return the words of its command line."""
    profile, model = planner.profile, planner.model
    assert model.transformer is not None, "it plans decoders"
    (folder / "hosts").write_text("".join(f"{node.name} slots={node.devices}\n" for node in profile.nodes))
    rates = {
        node.name: {
            "instance_type": kinds[node.kind],
            "inter_bandwidth": profile.cards[node.name],
            "intra_bandwidth": profile.kinds[node.kind].inside_gbit * GBIT_BYTES,
            "memory": profile.kinds[node.kind].memory_gb,
        }
        for node in profile.nodes
    }
    (folder / "rates.json").write_text(json.dumps(rates))
    seconds = folder / "seconds"
    seconds.mkdir()
    for kind, name in kinds.items():
        for samples in SAMPLES:
            row = _describe_layers(planner, kind, samples)
            (seconds / f"DeviceType.{name}_tp1_bs{samples}.json").write_text(json.dumps(row))
    figures = {
        "model_name": "GPT", "num_layers": len(planner.layers), "gbs": model.batch,
        "hidden_size": model.transformer.hidden, "sequence_length": model.sequence,
        "vocab_size": model.transformer.vocab, "hostfile_path": folder / "hosts",
        "clusterfile_path": folder / "rates.json", "profile_data_path": seconds, "max_profiled_tp_degree": 1,
        "max_profiled_batch_size": SAMPLES[-1], "min_group_scale_variance": 1, "max_permute_len": 4,
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in figures.items()]


def _describe_layers(planner: Planner, kind: str, samples: int) -> dict[str, Any]:
    """Milliseconds, bytes and megabytes of each layer, for a micro-batch of so many samples on a kind of device."""
    took = [1e3 * t.total_s for t in planner.layer_times(kind, samples)]
    model, layers = planner.model, planner.layers
    parameters = [layer.parameters * model.parameter_bytes for layer in layers]
    each = model.parameter_bytes + model.gradient_bytes + model.state_bytes
    held = [layer.parameters * each + samples * layer.border_bytes for layer in layers]
    return {
        "model": {"parameters": {"parameters_per_layer_bytes": parameters}},
        "execution_time": {
            "forward_backward_time_ms": sum(took) + 1e-6,  # 0 more than its layers would be a missing key to it
            "batch_generator_time_ms": 0.0,
            "optimizer_time_ms": 0.0,
            "layer_compute_total_ms": took,
        },
        "execution_memory": {"layer_memory_total_mb": [nbytes / 1e6 for nbytes in held]},
    }


def _read_plan(planner: Planner, kinds: Mapping[str, str], found: re.Match[str]) -> MetisPlan:
    """Its devices are numbered kind by kind, in the order of the plan."""
    ours = {name: kind for kind, name in kinds.items()}
    order = [ours[name] for name in re.findall(r"DeviceType\.(\w+)", found[1])]
    devices = [d for kind in order for d in planner.devices if planner.profile.places[d].kind == kind]
    edges = [0]
    for size in json.loads(found[2]):
        edges.append(edges[-1] + size)
    groups = tuple(tuple(devices[a:b]) for a, b in pairwise(edges))
    return MetisPlan(groups, tuple(json.loads(found[4])))
