"""`dips plan cluster`: its table, files and sentences, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.plan_cluster import COLORS, draw_stages, draw_timeline
from dips.errors import ConfigError
from dips.inside.pipeline.orders import read_pipeline
from dips.inside.planning.plan import (
    Framework,
    _list_stages,
    compare_plans,
    explain_plan,
    hand_over,
    make_plan,
    plan_data,
    show_others,
)
from dips.inside.planning.profile import parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import PipelineChoice, Planner, RankedPlan
from tests.traces import check_chrome

ROOT = Path(__file__).parents[3]
MACHINES: dict[str, Any] = {
    "nodes": [{"name": "fast", "kind": "big", "site": "east"}, {"name": "slow", "kind": "small", "site": "west"}],
    "kinds": {"big": {"memory_gb": 40, "tflops": 100}, "small": {"memory_gb": 16, "tflops": 50}},
    "links": {"east": {"west": 1}, "west": {"east": 1}},
}
DECODER: dict[str, Any] = {
    "name": "tiny",
    "batch": 8,
    "sequence": 512,
    "transformer": {"blocks": 6, "hidden": 512, "ffn": 2048, "vocab": 8192},
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The two files that the command reads."""
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(MACHINES))
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(DECODER))
    return [str(tmp_path / "profile.yaml"), str(tmp_path / "model.yaml")]


def test_the_plan_is_shown_and_written(files: list[str], tmp_path: Path) -> None:
    """A row for each stage, three other plans with what they lose, reasons; the file is what --json prints, and can
    be read back.
    """
    out, trace, picture = tmp_path / "plan.yaml", tmp_path / "step.json", tmp_path / "step.png"
    words = ["plan", "cluster", *files]
    shown = CliRunner().invoke(cli, [*words, "--explain", "-o", str(out), "--timeline", str(trace)])
    assert shown.exit_code == 0, shown.output
    words_shown = " ".join(shown.output.split())
    for said in ("tiny: ", "estimated: big, small", "instead", "half the rate", "Memory is tightest on"):
        assert said in words_shown, said
    data = yaml.safe_load(out.read_text())
    assert data.pop("made_from") == {"profile": "profile.yaml", "model": "model.yaml", "replans": 0}
    assert " micro-batches ┃ forward + backward ┃ idle ┃ peak memory ┃" in words_shown
    for stage in data["pipeline"]["stages"]:
        ((first, end),), (count,) = stage["layers"], stage["microbatches"]
        assert f"│ {stage['devices'][0].partition('.')[0]} ×1 │ {first}–{end - 1} │ {count} │ " in words_shown
    against = [float(row.split()[-3].removesuffix("%")) for row in shown.output.splitlines() if "% slower │" in row]
    assert len(against) == 4, "three other plans, and this one with slower links"
    assert json.loads(CliRunner().invoke(cli, [*words, "--json", "--timeline", str(picture)]).output) == data
    assert picture.read_bytes()[1:4] == b"PNG"
    events = check_chrome(trace.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"planned fast.0", "planned slow.0"}
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(data["step_s"] * 1e6, rel=1e-3)
    plan = read_pipeline(data, "plan.yaml")
    assert [list(stage) for stage in plan.stages] == [stage["devices"] for stage in data["pipeline"]["stages"]]
    assert [layer for part in plan.layers for layer in range(*part)] == list(range(8))
    assert plan.samples * plan.microbatches == data["samples"]
    assert max(span.end_s for span in plan.timeline) == pytest.approx(data["step_s"], rel=1e-3)


def test_a_plan_behind_a_link_names_its_files(files: list[str], tmp_path: Path) -> None:
    """Plans may be on another disk: a pipeline that adapts looked for the profile there, and ended."""
    (tmp_path / "disk" / "plans").mkdir(parents=True)
    (tmp_path / "plans").symlink_to(tmp_path / "disk" / "plans")
    out = tmp_path / "plans" / "plan.yaml"
    assert CliRunner().invoke(cli, ["plan", "cluster", *files, "-o", str(out)]).exit_code == 0
    made = yaml.safe_load(out.read_text())["made_from"]
    assert [(out.parent / made[key]).is_file() for key in ("profile", "model")] == [True, True]


def test_borders_of_16_bits_have_half_the_bytes(files: list[str], tmp_path: Path) -> None:
    """Of layers of 32 bits that cross in bf16: in the bytes that are moved, the step of a pipeline that waits for them,
    and its gears' costs. The memory of what is kept to compute with stays.
    """
    layer = {"name": "l", "parameters": 1e8, "flops": 1e10, "activation_bytes": 4e6, "border_bytes": 4e6, "repeat": 4}
    found = []
    for narrow in ({}, {"bf16_borders": True}):
        Path(files[1]).write_text(yaml.safe_dump({"name": "m", "batch": 8, "layers": [layer], **narrow}))
        told = CliRunner().invoke(
            cli, ["plan", "cluster", *files, "--for", "pipeline", "-o", str(tmp_path / "plan.yaml")]
        )
        assert told.exit_code == 0, told.output
        found.append(yaml.safe_load((tmp_path / "plan.yaml").read_text()))
    wide, narrow_plan = (plan["pipeline"] for plan in found)
    assert [plan["bf16_borders"] for plan in (wide, narrow_plan)] == [False, True]
    assert read_pipeline(found[1], "plan.yaml").bf16_borders and not read_pipeline(found[0], "plan.yaml").bf16_borders
    crossings = [plan["bytes"]["pipeline"] / plan["samples"] for plan in (wide, narrow_plan)]
    assert [n * plan["samples"] for n, plan in zip(crossings, (wide, narrow_plan), strict=True)] == [
        2 * 8 * 4e6, 2 * 8 * 2e6
    ]  # fmt: skip
    assert [plan["costs"]["border_bytes"][0] / plan["samples"] for plan in (wide, narrow_plan)] == [4e6, 2e6]
    assert found[1]["step_s"] < 0.8 * found[0]["step_s"]


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    """A picture has each device's actions in their colors, what is no computation in grey, and says what they mean; of
    devices with unequal shares the table has the least and the most.
    """
    plan = make_plan(parse_profile(MACHINES, "p"), parse_model(DECODER, "m"))
    assert plan.prediction is not None
    draw_timeline(plan.prediction, tmp_path / "step.svg")
    drawn = (tmp_path / "step.svg").read_text()
    for said in ("slow.0", "fast.0", "seconds", *COLORS):
        assert f"<!-- {said} -->" in drawn, "devices, the axis and what colors mean"
    others = {span.engine for span in plan.prediction.spans} - {"compute"}
    used = {span.action.lstrip("0123456789")[:1] for span in plan.prediction.spans} & COLORS.keys()
    assert used and all(f"fill: {COLORS[op]}" in drawn for op in used) and ("fill: #999999" in drawn) == bool(others)
    first, second = plan.stages
    shares = draw_stages(replace(plan, stages=(replace(first, microbatches=(5, 3, 4)), second))).columns[2]
    assert list(shares.cells) == ["3 to 5", str(second.microbatches[0])]


@pytest.mark.parametrize("devices", [1, 3])
def test_who_runs_a_pipeline_gets_one(files: list[str], tmp_path: Path, devices: int) -> None:
    """On a line between equal devices that is no limit sharding is faster, and has no orders. A script of `Pipeline`
    asks for a plan that it can run, and is told which rank is which device. One device alone is a pipeline, too.
    """
    nodes = [{"name": name, "kind": "big"} for name in "abc"[:devices]]
    machines = {**MACHINES, "nodes": nodes, "links": {"site": {"site": 10_000}}}
    Path(files[0]).write_text(yaml.safe_dump(machines))
    words = ["plan", "cluster", *files, "-o", str(out := tmp_path / "plan.yaml")]
    assert CliRunner().invoke(cli, words).exit_code == 0
    if devices > 1:
        with pytest.raises(ConfigError, match=r"expected a pipeline, got .* which has no stages"):
            read_pipeline(yaml.safe_load(out.read_text()), "plan.yaml")
    told = CliRunner().invoke(cli, [*words, "--for", "pipeline"])
    assert told.exit_code == 0, told.output
    plan = read_pipeline(yaml.safe_load(out.read_text()), "plan.yaml")
    assert sorted(plan.devices) == [f"{name}.0" for name in "abc"[:devices]]
    assert told.stdout.splitlines()[-devices:] == [f"rank {i}: {d}" for i, d in enumerate(plan.devices)]


def test_it_works_where_there_is_no_torch(files: list[str]) -> None:
    """With torch, networkx and matplotlib blocked, the command plans; none of its modules is loaded by `import
    dips.cli`.
    """
    script = (
        "import sys\n"
        "for name in ('torch', 'networkx', 'matplotlib'): sys.modules[name] = None\n"
        "import dips.cli\n"
        "assert not [m for m in sys.modules if m.startswith('dips.inside')]\n"
        f"sys.argv = ['dips', 'plan', 'cluster', *{files!r}, '--json']\n"
        "dips.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "tiny"


def test_a_stages_figures_are_those_of_the_device_that_is_worst_off() -> None:
    """Of a fast and a slow device in one stage: the slow one's seconds, the most idle, and the memory that is
    tightest.
    """
    nodes = [{"name": name, "kind": kind} for name, kind in (("fast", "big"), ("slow", "small"))]
    profile = parse_profile({**MACHINES, "nodes": nodes, "links": {"site": {"site": 10}}}, "p")
    planner = Planner(profile, parse_model(DECODER, "m"))
    choice, prediction = planner.finish(PipelineChoice(ScheduleName.BREADTH_FIRST, (("fast.0", "slow.0"),), (0, 8), 1))
    (row,) = _list_stages(planner, choice, prediction)
    slow, idle = planner.device_seconds("slow.0", 1, 0, 8).total_s, prediction.idle
    assert slow > planner.device_seconds("fast.0", 1, 0, 8).total_s and len({*idle.values()}) == 2
    assert (row.seconds, row.idle, row.memory_gb) == (slow, max(idle.values()), 16)


def test_others_are_shown_for_what_they_are() -> None:
    """Three that learn the same, and what learns otherwise where it is faster: what is slower is of no use."""
    plan = make_plan(parse_profile(MACHINES, "p"), parse_model(DECODER, "m"))
    step_s, samples = plan.best.step_s, plan.best.samples
    same = [RankedPlan(f"same {n}", step_s * n, samples) for n in (1, 2, 3, 4)]
    fast, slow = (RankedPlan(str(by), step_s * by, samples, exact=False) for by in (0.5, 2))
    shown = show_others(replace(plan, others=(*same, fast, slow)))
    assert shown == [*same[:3], fast]
    said = [compare_plans(plan, other) for other in (same[1], fast, slow)]
    assert said == ["100% slower", "50% less time, but it learns otherwise", "100% slower"]


def test_what_learns_otherwise_is_never_the_plan() -> None:
    """On slow lines A-EDiT is faster; it is shown with what it is, and a pipeline is taken."""
    plan = make_plan(parse_profile(MACHINES, "p"), parse_model(DECODER, "m"))
    assert plan.best.exact
    faster = [other for other in plan.others if other.rate > plan.best.rate]
    assert faster and not any(other.exact for other in faster)
    assert "it learns otherwise" in " ".join(explain_plan(plan))


@pytest.mark.parametrize(
    ("machines", "model", "words", "said"),
    [
        ({"links": {"east": {"west": 1}}}, {}, [], "links.west.east: one-way"),
        ({"speed": 3}, {}, [], "speed: unknown key"),
        ({}, {"parameter_bytes": 9000.0, "state_bytes": 9000.0}, [], "GB missing"),
        ({}, {}, ["--for", "deepspeed"], "--for: expected torchtitan or megatron or fsdp2 or pipeline, got deepspeed"),
        ({"nodes": MACHINES["nodes"][:1], "links": {}}, {}, ["--for", "megatron"], "it can run none of the plans"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_sentence(
    files: list[str], machines: dict[str, Any], model: dict[str, Any], words: list[str], said: str
) -> None:
    """The reason, with file and key."""
    Path(files[0]).write_text(yaml.safe_dump(MACHINES | machines))
    Path(files[1]).write_text(yaml.safe_dump(DECODER | model))
    refused = CliRunner().invoke(cli, ["plan", "cluster", *files, *words]).exception
    assert isinstance(refused, ConfigError)  # exit 78
    assert said in str(refused)


def test_a_plan_is_handed_over() -> None:
    """torchtitan gets a line of actions for each rank and module names for each stage; Megatron a layout of all
    layers.
    """
    profile, model = parse_profile(MACHINES, "p"), parse_model(DECODER, "m")
    titan = make_plan(profile, model, Framework.TORCHTITAN)
    handed = hand_over(titan, Framework.TORCHTITAN)
    lines = handed.csv.splitlines()
    assert len(lines) == len(titan.stages) == 2
    computed = Counter(action for line in lines for action in re.findall(r"\d+([A-Z]+)\d+", line))
    assert computed["F"] == computed["I"] + computed["B"] > 0 and set(computed) <= {"F", "I", "W", "B"}
    assert "--parallelism.pipeline_parallel_degree=2" in handed.flags
    named = next(flag for flag in handed.flags if "module_fqns" in flag)
    assert all(f"'layers.{i}'" in named for i in range(6))
    assert named.endswith("'norm', 'output']]")
    megatron = make_plan(profile, model, Framework.MEGATRON)
    layout = next(flag for flag in hand_over(megatron, Framework.MEGATRON).flags if "layout" in flag).partition("=")[2]
    assert layout.replace("|", "") == "Etttttt" + "L"
    assert [len(part) for part in layout.split("|")] == [s.layers[0][1] - s.layers[0][0] for s in megatron.stages]
    assert plan_data(megatron)["pipeline"]["schedule"] == "1f1b"


@pytest.mark.parametrize("framework", [Framework.TORCHTITAN, Framework.MEGATRON])
def test_stages_of_unlike_devices_are_not_handed_to_who_cannot_run_them(framework: Framework) -> None:
    """Two sites with a fast and a slow device each: the best pipeline has a stage a site, in unequal shares. It was
    refused after the search, though stages of like devices could be run.
    """
    nodes = [{"name": f"{site}-{kind}", "kind": kind, "site": site} for site in "ew" for kind in ("big", "small")]
    links = {"e": {"e": 100, "w": 2}, "w": {"e": 2, "w": 100}}
    shape = {"blocks": 1, "hidden": 1024, "ffn": 4096, "vocab": 32000}
    model = parse_model(DECODER | {"batch": 24, "sequence": 1024, "transformer": shape}, "m")
    profile = parse_profile(MACHINES | {"nodes": nodes, "links": links}, "p")
    assert hand_over(make_plan(profile, model, framework), framework).flags


def test_devices_of_a_column_have_the_same_micro_batches() -> None:
    """The faster device of the first stage is its second one, of the other stage its first: torchtitan was given orders
    of devices that do not send to each other in the plan, which was not what is predicted, and could not end.
    """
    nodes = [{"name": f"n{i}", "kind": kind, "devices": 1} for i, kind in enumerate(("slow", "fast", "fast", "slow"))]
    kinds = {"slow": {"memory_gb": 16, "tflops": 10}, "fast": {"memory_gb": 16, "tflops": 13}}
    profile = parse_profile({"nodes": nodes, "kinds": kinds, "links": {"site": {"site": 10}}}, "p")
    planner = Planner(profile, parse_model(DECODER | {"batch": 4}, "m"))
    like, crossed = (("n0.0", "n1.0"), ("n3.0", "n2.0")), (("n0.0", "n1.0"), ("n2.0", "n3.0"))
    made = [PipelineChoice(ScheduleName.COMPACT_ZB, groups, (0, 4, 8), 1) for groups in (like, crossed)]
    shares = [[[len(d.microbatches) for d in s.devices] for s in planner.make_pipeline(one).stages] for one in made]
    assert shares == [[[2, 2], [2, 2]]] * 2
    assert [planner.has_equal_shares(one) for one in made] == [True, False]


def test_what_a_framework_is_given_is_printed_and_written(files: list[str], tmp_path: Path) -> None:
    """torchtitan's schedule is a file of its own, whose path is in the flags; with --json they are not printed."""
    csv = tmp_path / "schedule.csv"
    words = ["plan", "cluster", *files, "--for", "torchtitan", "--csv", str(csv)]
    shown = CliRunner().invoke(cli, words)
    assert shown.exit_code == 0, repr(shown.exception)
    titan = make_plan(parse_profile(MACHINES, "p"), parse_model(DECODER, "m"), Framework.TORCHTITAN)
    handed = hand_over(titan, Framework.TORCHTITAN, str(csv))
    assert csv.read_text() == handed.csv and shown.stdout.endswith("\n".join(handed.flags) + "\n")
    assert json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout) == plan_data(titan)


@pytest.mark.parametrize(("gbit", "stages"), [(100, 0), (1, 1)])
def test_fsdp2_is_given_shares(gbit: float, stages: int) -> None:
    """For FSDP2 each device has its samples by speed, 2 : 1 here, whether the plan gathers layer by layer or, on a slow
    link, once a step, as one stage does. What has several stages has no shares, and is refused.
    """
    profile = parse_profile(MACHINES | {"links": {"east": {"west": gbit}, "west": {"east": gbit}}}, "p")
    shape = {"blocks": 6, "hidden": 2048, "ffn": 8192, "vocab": 8192}
    model = parse_model(DECODER | {"batch": 12, "transformer": shape}, "m")
    plan = make_plan(profile, model, Framework.FSDP2)
    assert len(plan.stages) == stages
    assert {device: samples for device, (samples, _) in plan.shares.items()} == {"fast.0": 8, "slow.0": 4}
    assert plan_data(plan)["shares"]["fast.0"] == {"samples": 8, "microbatches": plan.shares["fast.0"][1]}
    assert hand_over(plan, Framework.FSDP2).flags[0].startswith("fast.0: 8 samples of a step, micro-batches: ")
    said = " ".join(explain_plan(plan))
    assert "fast.0 takes 8 samples of a step, slow.0 4" in said
    assert ("reshards after the forward" in said) == (stages == 0)


def test_a_pipeline_has_no_shares() -> None:
    """What runs by stages is not handed to FSDP2."""
    plan = make_plan(parse_profile(MACHINES, "p"), parse_model(DECODER, "m"))
    assert len(plan.stages) == 2
    assert plan_data(plan)["shares"] is None
    with pytest.raises(ConfigError, match=r"fsdp2 cannot run .* it takes one stage without ministages"):
        hand_over(plan, Framework.FSDP2)
