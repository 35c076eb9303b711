"""`dips profile`: which pairs are measured, and the files that come of it; under torchrun with real ranks in make
test-slow.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands import profile
from dips.commands.profile import (
    SAMPLES,
    _first_tensor,
    _time_layer,
    compare_nodes,
    count_formats,
    count_memory,
    deal_pairs,
    find_lacking,
    find_layers,
    fit_line,
    list_nodes,
    make_files,
    measure_layers,
    measure_memory,
    measure_pairs,
    merge_machines,
    time_work,
    update_nodes,
)
from dips.errors import ConfigError
from dips.inside.planning.profile import parse_model, parse_profile
from tests.integration.cluster_harness import free_port

CPU = torch.device("cpu")
FACTORY = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 32)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(32, 100)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def build():
    return Model()
"""


def place(node: str, kind: str = "fast", site: str = "east") -> dict[str, Any]:
    return {"node": node, "kind": kind, "site": site, "memory_gb": 16.0, "tflops": 10.0}


def test_each_kind_of_pair_is_measured_once_and_disjoint_pairs_together() -> None:
    """Two nodes of two equal devices and one of another kind elsewhere: inside, between nodes, to the other; the
    first two share no round where they share a rank.
    """
    places = [place("a"), place("a"), place("b"), place("b"), place("c", "slow", "west")]
    rounds = deal_pairs(places)
    assert sorted(pair for made in rounds for pair in made) == [(0, 1), (0, 2), (0, 4)]
    for made in rounds:
        ranks = [rank for pair in made for rank in pair]
        assert len(ranks) == len(set(ranks))
    pairs = [place("a", "one"), place("a", "one"), place("b", "two"), place("b", "two")]
    assert [(0, 1), (2, 3)] in deal_pairs(pairs)
    for made in deal_pairs([*pairs, place("c", "three")]):
        ranks = [rank for pair in made for rank in pair]
        assert len(ranks) == len(set(ranks)), "with one of several pairs of a round, too"


def test_a_line_goes_through_three_micro_batches() -> None:
    """Slope a sample and what any micro-batch takes; noise gives no negative figure."""
    assert fit_line((1, 2, 4), (0.3, 0.5, 0.9)) == [0.2, 0.1]
    assert fit_line((1, 2, 4), (0.9, 0.5, 0.3))[0] == 0.0
    assert fit_line((1, 2, 4), (0.1, 0.3, 0.7)) == [0.2, 0.0]


def test_the_files_are_what_the_planner_reads() -> None:
    """Both are parsed; the slowest of several pairs between two sites counts, for both ways."""
    row = {
        "seconds": [(0.1, 0.2, 0.3)] * 3,
        "parameters": 10,
        "flops": 1.0,
        "activation_bytes": 2.0,
        "border_bytes": 3.0,
    }
    places = [place("a"), place("a"), place("b", site="west"), place("c", "slow", site="west")]
    links = {(0, 1): (1e-5, 1e10), (0, 2): (1e-3, 2e8), (0, 3): (1e-3, 1e8), (2, 3): (1e-4, 1e9)}
    layers = {"block": row, "head": {**row, "tied": "block"}}
    machines, needs = make_files(places, links, [layers, {}, {}, layers], "mymodel", 512, 8)
    machine, model = parse_profile(machines, "profile.yaml"), parse_model(needs, "model.yaml")
    assert list(machine.places) == ["a.0", "a.1", "b.0", "c.0"]
    assert machine.links["east"]["west"].gbit == machine.links["west"]["east"].gbit == 0.8
    assert machine.kinds["fast"].inside_gbit == 80
    assert machine.measured["slow"]["block"].weight == (0.0, 0.3)
    assert (model.batch, model.sequence, model.parameters) == (8, 512, 10)


def test_a_host_of_two_kinds_is_two_nodes() -> None:
    """A fast and a slow device in one host were two fast ones, also in the memory that was planned with."""
    with pytest.raises(ConfigError, match="a: expected devices of one kind in a node, got fast and slow"):
        list_nodes([place("a"), place("a", "slow")])
    assert [node["devices"] for node in list_nodes([place("a"), place("a-slow", "slow")])] == [1, 1]


def test_a_host_of_two_kinds_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is not even made; it was refused after all layers had been timed."""

    def gather(everyone: list[Any], own: dict[str, Any]) -> None:
        everyone[:] = [own, {**own, "kind": "other"}]

    monkeypatch.setattr(profile, "ROUNDS", 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    refused = profile_alone("--factory", "no_such_module:build").exception
    assert isinstance(refused, ConfigError) and "expected devices of one kind in a node" in str(refused)


def test_a_layer_may_return_its_tensor_with_other_things() -> None:
    """In a tuple or a dict, where the first one counts; a layer without one cannot be timed."""
    tensor = torch.zeros(2)
    for output in (tensor, (None, tensor, torch.ones(1)), {"mask": None, "hidden": tensor}):
        assert _first_tensor(output) is tensor
    with pytest.raises(ConfigError, match="expected layers that return tensors, got tuple"):
        _first_tensor((None, 3))


def test_another_accelerator_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU's host: its CPU was measured, and its memory, and the plan was made for that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    refused = profile_alone().exception
    assert isinstance(refused, ConfigError) and "expected cuda devices, or CPUs alone, got xpu" in str(refused)


def test_without_torchrun_it_says_how() -> None:
    """A sentence with the command to give, exit 78."""
    refused = CliRunner().invoke(cli, ["profile", "--factory", "mymodel:build"], env={"RANK": None}).exception
    assert isinstance(refused, ConfigError)
    assert "torchrun --nproc-per-node" in str(refused)


def test_work_is_timed_after_a_first_run_by_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run, which compiles and allocates, does not count, and neither does one that something disturbed."""
    now, costs = 0.0, [1000.0, 3.0, 1.0, 50.0, 2.0, 2.0]

    def work() -> None:
        nonlocal now
        now += costs.pop(0)

    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now))
    assert time_work(work, CPU) == 2.0 and not costs


def test_work_that_a_gpu_has_queued_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run's, and none that was queued before it."""
    now, queued = 0.0, 1000.0

    def work() -> None:
        nonlocal queued
        queued += 2.0

    def synchronize(device: object) -> None:
        nonlocal now, queued
        now, queued = now + queued, 0.0

    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert time_work(work, torch.device("cuda")) == 2.0


def give_seconds(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """What `time_work` returns, one after the other."""
    left = list(seconds)
    monkeypatch.setattr(profile, "time_work", lambda work, device: left.pop(0))


def test_a_cpu_is_measured_by_a_small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a GPU's size takes minutes on a slow host, and CPUs have no fast products of 16 bits."""
    made = list[Any]()
    monkeypatch.setattr(profile, "time_work", lambda work, device: made.append(work()) or 1e-3)
    assert profile.describe_device(CPU)["tflops"] == round(2 * 512**3 / 1e-3 / 1e12, 4)
    assert (made[0].shape, made[0].dtype) == ((512, 512), torch.float32)


def test_a_rate_is_that_of_what_a_message_takes_beyond_its_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small message that was as slow as the large one makes the link at most twice as fast as it was seen."""
    monkeypatch.setattr(profile, "PAYLOAD_MB", 1)
    for small, large, seconds in ((2e-3, 10e-3, 4e-3), (10e-3, 12e-3, 3e-3)):
        give_seconds(monkeypatch, small, large)
        latency, rate = profile._measure_pair((0, 1), 0, CPU)
        assert (latency, rate) == (small / 2, pytest.approx((1 << 20) / seconds))


def test_weights_take_what_a_backward_takes_beyond_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never less than nothing: noise gave a schedule negative seconds."""
    for both, weights in ((5.0, 3.0), (1.0, 0.0)):
        give_seconds(monkeypatch, 1.0, 2.0, both)
        assert _time_layer(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), {}, CPU) == (1.0, 2.0, weights)


class Repeated(torch.nn.Module):
    """A layer that is called twice, one that runs between ids and floats, one without parameters, one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.silu = torch.nn.Embedding(50, 8), torch.nn.SiLU()
        self.blocks = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
        self.blocks = torch.nn.ModuleDict({"same": torch.nn.Identity(), **self.blocks})
        self.unused = torch.nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.blocks["same"](self.embedding(tokens))
        for block in (self.blocks["b"], self.blocks["a"], self.blocks["a"]):
            x = self.silu(block(x))
        return x


def test_layers_are_measured_as_the_forward_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once for each micro-batch, in the forward's order; the hooks are gone after it. Ids have no gradient."""
    monkeypatch.setattr(profile, "ROUNDS", 1)
    model = Repeated()
    assert [name for name, _ in find_layers(model)] == ["embedding", "blocks.same", "blocks.a", "blocks.b", "unused"]
    rows = measure_layers(model, CPU, 16)
    assert list(rows) == ["embedding", "blocks.same", "blocks.b", "blocks.a"]
    assert all(len(row["seconds"]) == len(SAMPLES) for row in rows.values())
    assert all(seconds > 0 for row in rows.values() for seconds, _, _ in row["seconds"])
    assert all(to_inputs == 0 for _, to_inputs, _ in rows["embedding"]["seconds"])
    assert all(to_inputs > 0 for _, to_inputs, _ in rows["blocks.a"]["seconds"])
    assert all(weights >= 0 for row in rows.values() for *_, weights in row["seconds"])
    assert not any(layer._forward_pre_hooks for _, layer in find_layers(model))
    assert rows["blocks.a"]["flops"] == 2 * 16 * 8 * 8 and rows["blocks.a"]["border_bytes"] == 16 * 8 * 4
    assert rows["blocks.a"]["activation_bytes"] == 16 * 8 * 4, "its input, and not its weight"
    assert rows["embedding"]["activation_bytes"] == 16 * 8, "the ids"
    assert not any("tied" in row for row in rows.values())
    model.blocks["a"].weight = model.blocks["b"].weight
    model.blocks["b"].bias = None
    assert measure_layers(model, CPU, 16)["blocks.a"]["tied"] == "blocks.b", "the first that the forward calls"
    model.blocks["a"].bias = None
    alike: dict[str, dict[str, Any]] = {"blocks.b": {}, "blocks.a": {}}
    profile._mark_ties(model, alike)
    assert alike == {"blocks.b": {}, "blocks.a": {"tied": "blocks.b"}}, "all of their parameters are the same"
    with pytest.raises(ConfigError, match=r"expected a model of token ids, i64\[samples, 16\], got RuntimeError"):
        measure_layers(torch.nn.Sequential(torch.nn.Linear(3, 3)), CPU, 16)
    with pytest.raises(ConfigError, match="expected a model with layers"):
        measure_layers(torch.nn.Sequential(torch.nn.Identity()), CPU, 16)


def test_a_frozen_layer_has_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to compute a gradient of: 0 s, and not an error."""
    monkeypatch.setattr(profile, "ROUNDS", 1)
    frozen = torch.nn.Embedding(50, 8).requires_grad_(False)
    ((forward, inputs, weights),) = [_time_layer(frozen, (torch.zeros(4, dtype=torch.long),), {}, CPU)]
    assert forward > 0 and (inputs, weights) == (0.0, 0.0)


def test_a_model_of_32_bits_is_planned_as_one() -> None:
    """Its gathered parameters and its gradients were planned with 2 bytes each: plans ran out of memory. In 16 bits the
    optimizer has masters.
    """
    model = Repeated()
    assert count_formats(model) == {"parameter_bytes": 4, "gradient_bytes": 4, "state_bytes": 8}
    assert count_formats(model.bfloat16()) == {"parameter_bytes": 2, "gradient_bytes": 2, "state_bytes": 12}


def test_memory_is_counted_by_category() -> None:
    """Of one sample; the gradients that it made are taken away."""
    model = Repeated()
    counted = measure_memory(model, CPU, 16)
    parameters = 4 * sum(p.numel() for p in model.parameters())
    used = parameters - 4 * (8 * 8 + 8)
    assert counted["parameters"] == parameters and counted["gradients"] == used
    assert counted["activations"] > 0 and counted["peak"] >= parameters + used
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_cannot_be_counted_does_not_end_the_profile() -> None:
    """Torch's MemTracker is private, and fails on some models: the reason is said, and no gradient is left."""

    class NoStorage(Repeated):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no storage")

    model = NoStorage()
    model.unused.weight.grad = torch.ones(8, 8)  # of a backward that came so far
    said = count_memory(model, CPU, 16)
    assert said == "memory of one sample: not counted, torch's MemTracker failed: RuntimeError: no storage"
    assert model.unused.weight.grad is None
    assert "parameters" in count_memory(Repeated(), CPU, 16)


def probe(rank: int, port: int, out: str) -> None:
    """One of two ranks that measure the link between them."""
    torch.set_num_threads(1)  # those of the parent are not in a forked process
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        profile.PAYLOAD_MB = 1
        found = measure_pairs([place("a"), place("b")], CPU)
        Path(f"{out}.{rank}").write_text(repr(found))
    finally:
        torch.distributed.destroy_process_group()


def test_a_link_is_measured_by_both_ends(tmp_path: Path) -> None:
    """All ranks know the figures of the first one; a large message goes faster a byte than five integers."""
    torch.multiprocessing.start_processes(
        probe, (free_port(), str(tmp_path / "found")), nprocs=2, start_method="fork", join=True
    )
    first, second = (ast.literal_eval((tmp_path / f"found.{rank}").read_text()) for rank in range(2))
    assert first == second and list(first) == [(0, 1)]
    latency, rate = first[0, 1]
    assert 0 < latency < 1 and 10 * 5 * 4 / latency < rate < 1e13


def profile_alone(*words: str) -> Any:
    """Run the command as torchrun starts it, for one device."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    given = ["profile", "--factory", "model_to_profile:build", "--tokens", "16", "--site", "west", *words]
    return CliRunner().invoke(cli, given, env={**rank, "MASTER_PORT": str(free_port())})


def test_only_what_the_profile_lacks_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing if the devices are its own, so not even the model is made; its nodes alone if one of a known kind came;
    everything if there is no profile, or for a kind that it does not have, whose former lines stay. A file that was
    edited wrongly is refused. The process group is gone each time.
    """
    (tmp_path / "model_to_profile.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(profile, "ROUNDS", 1)
    file = Path("profile.yaml")
    Path("model.yaml").write_text("name: another")  # of no profile: it is written anew
    done = profile_alone("--changed", "--name", "a")
    assert done.exit_code == 0 and "not there: everything is measured" in done.stdout, repr(done.exception)
    written = file.read_text()

    monkeypatch.setattr(profile, "measure_layers", None)  # may not be called
    done = profile_alone("--changed", "--name", "a", "--factory", "no_such_module:build")
    assert done.exit_code == 0 and "nothing is measured" in done.stdout and "wrote" not in done.stdout, done.output
    done = profile_alone("--changed", "--name", "b", "--factory", "no_such_module:build")
    assert "b.0 (cpu) came; a.0 (cpu) is gone. Nothing is measured" in done.stdout, repr(done.exception)
    assert file.read_text() == written.replace("name: a", "name: b")
    monkeypatch.undo()

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(profile, "ROUNDS", 1)
    file.write_text(written.replace("cpu", "other"))
    assert yaml.safe_load(Path("model.yaml").read_text())["parameter_bytes"] == 4
    needs = Path("model.yaml").read_text().replace("recompute: false", "recompute: true")
    Path("model.yaml").write_text(needs)
    done = profile_alone("--changed", "--name", "b")
    assert Path("model.yaml").read_text() == needs != "", "it was edited"
    assert "Everything is measured, for it lacks: profile.yaml: nodes.b.kind" in done.stdout, repr(done.exception)
    found = yaml.safe_load(file.read_text())
    assert set(found["kinds"]) == set(found["measured"]) == {"cpu", "other"}
    assert [(n["name"], n["devices"]) for n in found["nodes"]] == [("a", 0), ("b", 1)]
    assert list(parse_profile(found, "profile.yaml").places) == ["b.0"]
    file.write_text("nodes: 7")
    refused = profile_alone("--changed", "--name", "b").exception
    assert isinstance(refused, ConfigError) and "kinds: missing" in str(refused)
    assert not torch.distributed.is_initialized()


def test_what_was_not_measured_of_a_node_is_lacking() -> None:
    """A second device in a node of a kind that had one: the rate between the two. Another site: the links to it."""
    kinds = {"fast": {"memory_gb": 16, "tflops": 10}}
    file: dict[str, Any] = {"kinds": kinds, "links": {}, "nodes": list_nodes([place("a")])}
    assert find_lacking(file, "p.yaml") == ""
    file["nodes"] = update_nodes(file, [place("a"), place("a")])
    assert find_lacking(file, "p.yaml") == "p.yaml: kinds.fast.inside_gbit"
    kinds["fast"]["inside_gbit"] = 100
    assert find_lacking(file, "p.yaml") == ""
    file["nodes"] = update_nodes(file, [place("a"), place("b", site="west")])
    assert "links.east.west: missing" in find_lacking(file, "p.yaml")


def test_what_was_written_by_hand_outlives_what_is_measured() -> None:
    """Keys of a kind and of a link that nothing measures, or nothing has measured this time; measured ones are new."""
    fast = {"memory_gb": 16, "tflops": 10, "inside_gbit": 100, "copy_gbit": 200}
    links = {"east": {"west": {"gbit": 1, "latency_us": 5, "shared": True}, "east": 25}, "a": {"b": 7}}
    known = {"nodes": [], "kinds": {"fast": fast}, "links": links, "measured": {}}
    line = {"gbit": 2, "latency_us": 4}
    found = {"nodes": [], "kinds": {"fast": {"memory_gb": 16, "tflops": 11, "efficiency": 1.0}}, "measured": {}}
    merged = merge_machines(known, {**found, "links": {"east": {"west": line, "east": line}}})
    assert merged["kinds"] == {"fast": {**fast, "tflops": 11, "efficiency": 1.0}}
    assert merged["links"] == {"east": {"west": {**line, "shared": True}, "east": line}, "a": {"b": 7}}
    assert known["links"] == {"east": {"west": {"gbit": 1, "latency_us": 5, "shared": True}, "east": 25}, "a": {"b": 7}}


def test_a_node_that_is_gone_is_kept_while_the_file_needs_it() -> None:
    """The last of its kind and site, or one with lines of its own, has 0 devices until it is back; of nodes that are
    called otherwise each time only those that are here are in the list. A node keeps what was written of it by hand.
    """
    file = {
        "nodes": [
            {"name": "a", "kind": "fast", "devices": 2, "site": "east", "card_gbit": 10},
            {"name": "b", "kind": "fast", "site": "east"},
            {"name": "c", "kind": "slow", "devices": 1, "site": "west"},
        ],
        "links": {"east": {"west": 1}, "west": {"east": 1}, "b": {"a": 2}},
    }
    came = [place("d"), place("a")]
    nodes = update_nodes(file, came)
    assert [(n["name"], n["devices"]) for n in nodes] == [("a", 1), ("b", 0), ("c", 0), ("d", 1)]
    assert nodes[0]["card_gbit"] == 10
    assert compare_nodes(file["nodes"], nodes) == (["d.0 (fast)"], ["a.1 (fast)", "b.0 (fast)", "c.0 (slow)"])  # type: ignore[arg-type]
    for number in range(9):
        nodes = update_nodes({**file, "nodes": nodes}, [place(f"pod-{number}")])
    assert [n["name"] for n in nodes] == ["a", "b", "c", "pod-8"]
    back = [place("a"), place("a"), place("b"), place("c", "slow", "west")]
    assert update_nodes(file, back) == file["nodes"], "the same devices change nothing, not even a default"


def test_one_rank_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command as torchrun starts it, for one device; the process group is gone after it."""
    (tmp_path / "model_to_profile.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(profile, "ROUNDS", 1)
    done = profile_alone("--name", "here")
    assert done.exit_code == 0, repr(done.exception)
    assert "wrote profile.yaml" in done.stdout and "wrote model.yaml" in done.stdout
    assert "memory of one sample, without an optimizer: parameters 0.0" in done.stdout
    machines = parse_profile(yaml.safe_load(Path("profile.yaml").read_text()), "profile.yaml")
    (node,) = machines.places
    assert node == "here.0" and machines.places[node].site == "west"
    model = parse_model(yaml.safe_load(Path("model.yaml").read_text()), "model.yaml")
    assert [layer.name for layer in model.layers] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_profile_a_model(tmp_path: Path) -> None:
    """Under torchrun with gloo: both files are written, are read, and have measured figures of each layer; bytes are
    printed by category.
    """
    (tmp_path / "mymodel.py").write_text(FACTORY)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dips.cli"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }
    done = subprocess.run(
        [*words, "profile", "--factory", "mymodel:build", "--tokens", "16"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parameters = 2 * 100 * 32 + 100 + 2 * (2 * 32 * 64 + 96)
    counted = {name: float(figure) for name, figure in re.findall(r"(\w+) ([\d.e-]+) MB", done.stdout)}
    assert counted["parameters"] == counted["gradients"] == pytest.approx(4 * parameters / 1e6, rel=0.01)
    assert 2 * counted["parameters"] < counted["peak"]
    machines = parse_profile(yaml.safe_load((tmp_path / "profile.yaml").read_text()), "profile.yaml")
    model = parse_model(yaml.safe_load((tmp_path / "model.yaml").read_text()), "model.yaml")
    assert len(machines.places) == 2
    assert [layer.name for layer in model.layers] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert model.layers[1].parameters == 2 * 32 * 64 + 96
    assert model.layers[1].flops == 2 * 16 * 2 * 32 * 64
    assert model.layers[1].border_bytes == 16 * 32 * 4
    saved = sum(layer.activation_bytes for layer in model.layers) / 1e6
    assert saved / 2 < counted["activations"] < 2 * saved  # what autograd saves of each layer by itself
    measured = machines.measured["cpu"]
    assert set(measured) == {layer.name for layer in model.layers}
    assert sum(measured["head"].forward) > 0
    assert machines.kinds["cpu"].inside_gbit > 0
