"""The command `dips profile`: measures devices, links and the layers of a model, and writes profile.yaml.

Requirements on who starts it: torchrun, with a rank for each device, `--no-python` before `dips`. All ranks call the
same collectives in the same order; rank 0 writes.

Known limits: a layer is each element of a ModuleList, and each other top-level module with parameters that the
forward calls; the factory's model takes token ids, i64[samples, tokens]. Memory of a device is the whole device's.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from dips.config.reading import read_yaml
from dips.errors import ConfigError
from dips.files import write_output

if TYPE_CHECKING:
    import torch

PROBE_INTS = 5  # of a message that is all latency (SpanTrain §3.2.1)
PAYLOAD_MB = 32
ROUNDS = 5  # of which the median counts, after one to warm up
SAMPLES = (1, 2, 4)  # micro-batches through which a line is fitted
GB, GBIT_BYTES = 1e9, 1.25e8


def profile(
    factory: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="The function that makes the model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("profile.yaml"),
    model: Annotated[Path, typer.Option(help="The model file to write.")] = Path("model.yaml"),
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step, for the model file.")] = 256,
    site: Annotated[str, typer.Option(help="Where this node is; nodes of one site have one rate.")] = "site",
    name: Annotated[str | None, typer.Option(help="This node's name; default: its host's name.")] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Measure only what the profile lacks, if devices came or went.")
    ] = False,
) -> None:
    """Measure links and layers under torchrun, and write the two files that `dips plan cluster` reads.

    Each kind of pair of devices (in one node or not, by site and kind) is measured once, disjoint pairs at the same
    time: latency by messages of five integers, rate by large ones. Each layer is timed on one device of each kind
    with 1, 2 and 4 samples: forward, backward of the input, backward of the weights. The files may be edited, and
    lines of other machines be added by hand.

    With --changed the devices are compared with those of the profile. If they are the same, nothing is done. If all
    that came are of kinds and sites that it knows, the nodes alone are written, otherwise all is measured; the model
    file stays. A node that has gone stays with `devices: 0` where the file needs it. Meant for `before_start` in
    cluster.yaml; after a change of the model, delete the profile.

    Exit codes: 0 written, or nothing to measure; 78 not under torchrun, or devices or a model that cannot be
    measured.

    \b
    Example:
      torchrun --nproc-per-node 8 --no-python dips profile --factory mymodel:build --tokens 4096
      torchrun --nnodes 2 ... --no-python dips profile --factory mymodel:build --site west
      torchrun --nnodes 1:4 ... --no-python dips profile --factory mymodel:build --changed
    """
    if "RANK" not in os.environ:
        raise ConfigError(
            "dips profile: expected torchrun, got no RANK: torchrun --nproc-per-node N --no-python dips profile ..."
        )
    import torch
    import torch.distributed as dist

    from dips.client.parallel.factory import make_module

    cuda = torch.cuda.is_available()
    if not cuda and torch.accelerator.is_available():  # its host's CPU would be measured in its place
        there = torch.accelerator.current_accelerator()
        raise ConfigError(f"dips profile: expected cuda devices, or CPUs alone, got {there}: write both files by hand")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        own = {"node": name or socket.gethostname(), "site": site, **describe_device(device)}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        list_nodes(everyone)  # refused before anything is measured
        known: list[Any] = [None] * dist.get_world_size()  # the first one's is all ranks'
        if changed:
            dist.all_gather_object(known, _take_devices(output, everyone) if dist.get_rank() == 0 else None)
            if known[0] is None:
                return
        made = make_module(factory, device=str(device))
        links = measure_pairs(everyone, device)
        first = next(i for i, other in enumerate(everyone) if other["kind"] == own["kind"])
        layers = measure_layers(made, device, tokens) if dist.get_rank() == first else {}
        if dist.get_rank() == 0:
            print(count_memory(made, device, tokens))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, layers)
        if dist.get_rank() == 0:
            machines, needs = make_files(everyone, links, found, Path(factory.partition(":")[0]).name, tokens, batch)
            _write_file(output, merge_machines(known[0] or {}, machines))
            if not (known[0] and model.exists()):  # else of the same model, and may have been edited
                _write_file(model, {**needs, **count_formats(made)})
    finally:
        dist.destroy_process_group()


def _take_devices(path: Path, places: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Bring the nodes of a profile up to date, on rank 0; return None if it then has all that planning needs, else
    what it has, to which the rest is to be measured.
    """
    from dips.inside.planning.profile import parse_profile

    if not path.exists():
        print(f"{path}: not there: everything is measured")
        return {}
    known = dict(read_yaml(path))
    parse_profile(known, str(path))  # a file that was edited wrongly is refused, and not measured over
    updated = known | {"nodes": update_nodes(known, places)}
    if updated == known:
        print(f"{path}: its devices are those that are here: nothing is measured")
        return None
    came, gone = compare_nodes(known["nodes"], updated["nodes"])
    said = "; ".join([*(f"{name} came" for name in came), *(f"{name} is gone" for name in gone)])
    if lacks := find_lacking(updated, str(path)):
        print(f"{path}: {said}. Everything is measured, for it lacks: {lacks}")
        return updated
    print(f"{path}: {said}. Nothing is measured: kinds and links are known")
    _write_file(path, updated)
    return None


def find_lacking(machines: dict[str, Any], where: str) -> str:
    """Return what a profile lacks of its nodes, "" if it has all that is measured of them."""
    from dips.inside.planning.profile import parse_profile

    try:
        profile = parse_profile(machines, where)
    except ConfigError as error:
        return str(error)
    unlinked = (n.kind for n in profile.nodes if n.devices > 1 and "inside_gbit" not in machines["kinds"][n.kind])
    return next((f"{where}: kinds.{kind}.inside_gbit" for kind in unlinked), "")


def _write_file(path: Path, content: dict[str, Any]) -> None:
    write_output(path, yaml.safe_dump(content, sort_keys=False))
    print(f"wrote {path}")


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return kind, memory in GB and TFLOPS of 16-bit products that this device reaches in a large matrix product."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind, memory = properties.name.replace(" ", "-"), properties.total_memory / GB
    else:
        kind, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    n = 4096 if device.type == "cuda" else 512
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    seconds = time_work(lambda: a @ a, device)
    return {"kind": kind, "memory_gb": round(memory, 2), "tflops": round(2 * n**3 / seconds / 1e12, 4)}


def time_work(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a work, the device's queue emptied before and after."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    took = []
    for run in range(ROUNDS + 1):
        wait()
        begun = time.perf_counter()
        work()
        wait()
        if run:
            took.append(time.perf_counter() - begun)
    return statistics.median(took)


# ---- links -----------------------------------------------------------------------------------------------------------

Pair = tuple[int, int]


def deal_pairs(places: Sequence[dict[str, Any]]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of ranks that together have each kind of pair once, both ways counted as one."""
    wanted: dict[tuple[Any, ...], Pair] = {}
    for a in range(len(places)):
        for b in range(a + 1, len(places)):
            wanted.setdefault(_kind_of_pair(places[a], places[b]), (a, b))
    rounds: list[list[Pair]] = []
    for pair in wanted.values():
        for made in rounds:
            if not any(set(pair) & set(other) for other in made):
                made.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def _kind_of_pair(a: dict[str, Any], b: dict[str, Any]) -> tuple[Any, ...]:
    if a["node"] == b["node"]:
        return ("inside", a["kind"])
    return ("between", *sorted([(a["site"], a["kind"]), (b["site"], b["kind"])]))


def measure_pairs(places: Sequence[dict[str, Any]], device: torch.device) -> dict[Pair, tuple[float, float]]:
    """Return latency in seconds and bytes a second of each pair that `deal_pairs` names; called by all ranks."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), dict[Pair, tuple[float, float]]()
    for made in deal_pairs(places):
        own = {pair: _measure_pair(pair, rank, device) for pair in made if rank in pair}
        everyone: list[Any] = [None] * len(places)
        dist.all_gather_object(everyone, own)  # pairs of the next round share links with those of this one
        found |= {pair: figures for i, of in enumerate(everyone) for pair, figures in of.items() if i == pair[0]}
    return found


def _measure_pair(pair: Pair, rank: int, device: torch.device) -> tuple[float, float]:
    """Time there and back; half of it is one way."""
    import torch
    import torch.distributed as dist

    other = pair[0] if rank == pair[1] else pair[1]

    def there_and_back(message: torch.Tensor) -> None:
        if rank == pair[0]:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    small = torch.zeros(PROBE_INTS, dtype=torch.int32, device=device)
    large = torch.zeros(PAYLOAD_MB << 18, dtype=torch.float32, device=device)
    latency = time_work(lambda: there_and_back(small), device) / 2
    seconds = time_work(lambda: there_and_back(large), device) / 2
    # A pause of either host may have made the small message as slow as the large one.
    return latency, large.numel() * 4 / max(seconds - latency, seconds / 2)


# ---- layers ----------------------------------------------------------------------------------------------------------


def find_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers: each element of a ModuleList, and each other top-level module with parameters."""
    import torch

    for name, child in model.named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from ((f"{name}.{key}", element) for key, element in child.named_children())
        elif any(True for _ in child.parameters()):
            yield name, child


def measure_layers(model: torch.nn.Module, device: torch.device, tokens: int) -> dict[str, dict[str, Any]]:
    """Return each layer's lines and bytes, in the order of the forward. Raises ConfigError if it takes no token ids."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    names = {id(module): name for name, module in find_layers(model)}
    rows: dict[str, dict[str, Any]] = {}
    for number, samples in enumerate(SAMPLES, 1):
        calls: list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        hooks = [
            module.register_forward_pre_hook(
                lambda m, args, kwargs, calls=calls: calls.append((m, args, kwargs)), with_kwargs=True
            )
            for _, module in find_layers(model)
        ]
        try:
            with torch.no_grad():
                model(torch.zeros(samples, tokens, dtype=torch.long, device=device))
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise ConfigError(
                f"--factory: expected a model of token ids, i64[samples, {tokens}], got {type(error).__name__}: {error}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        for module, args, kwargs in calls:
            row = rows.setdefault(
                names[id(module)], {"seconds": [], "parameters": sum(p.numel() for p in module.parameters())}
            )
            if len(row["seconds"]) < number:  # a layer that is called twice counts once
                row["seconds"].append(_time_layer(module, args, kwargs, device))
            if samples == SAMPLES[0]:
                with FlopCounterMode(display=False) as counter, torch.no_grad():
                    module(*args, **kwargs)
                row["flops"] = float(counter.get_total_flops())
                row["activation_bytes"], row["border_bytes"] = _count_bytes(module, args, kwargs)
    if not rows:
        raise ConfigError(
            "--factory: expected a model with layers (a ModuleList, or modules with parameters), got none"
        )
    _mark_ties(model, rows)
    return rows


def _mark_ties(model: torch.nn.Module, rows: dict[str, dict[str, Any]]) -> None:
    """Name in the row of each layer the first one all of whose parameters it has, too."""
    held = {name: {id(p) for p in module.parameters()} for name, module in find_layers(model)}
    names = list(rows)
    for number, name in enumerate(names):
        if (first := next((one for one in names[:number] if held[one] and held[one] <= held[name]), None)) is not None:
            rows[name]["tied"] = first


def _ready_inputs(args: tuple[Any, ...]) -> list[Any]:
    import torch

    return [a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def _first_tensor(output: Any) -> torch.Tensor:
    import torch

    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        output = tuple(output.values())
    found = next((o for o in output if isinstance(o, torch.Tensor)), None)
    if found is None:
        raise ConfigError(f"--factory: expected layers that return tensors, got {type(output).__name__}")
    return found


def _time_layer(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[float, float, float]:
    """Seconds of F, I and W. W is what a backward to inputs and weights takes beyond one to the inputs."""
    import torch

    inputs = _ready_inputs(args)
    forward = time_work(lambda: module(*inputs, **kwargs), device)
    output = _first_tensor(module(*inputs, **kwargs))
    gradient = torch.ones_like(output)
    wanted = [a for a in inputs if isinstance(a, torch.Tensor) and a.requires_grad]
    weights = [p for p in module.parameters() if p.requires_grad]

    def back(to: Sequence[torch.Tensor]) -> float:
        if not to or not output.requires_grad:
            return 0.0
        return time_work(
            lambda: torch.autograd.grad(output, to, gradient, retain_graph=True, allow_unused=True), device
        )

    to_inputs = back(wanted)
    return forward, to_inputs, max(0.0, back([*wanted, *weights]) - to_inputs)


def _count_bytes(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
    """Bytes that autograd saves in a forward, parameters left out, and those of the output."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = _first_tensor(module(*_ready_inputs(args), **kwargs))
    return float(sum(saved.values())), float(output.numel() * output.element_size())


def count_formats(model: torch.nn.Module) -> dict[str, float]:
    """Return the bytes of a parameter as they were measured, of its gradient, and of AdamW's state: two of its format,
    or those and a master in fp32.
    """
    held = list(model.parameters())
    each = sum(p.nbytes for p in held) / max(1, sum(p.numel() for p in held))
    return {"parameter_bytes": each, "gradient_bytes": each, "state_bytes": 2 * each if each >= 4 else 12.0}


def measure_memory(model: torch.nn.Module, device: torch.device, tokens: int) -> dict[str, int]:
    """Return bytes by category of a forward and a backward of one sample, without an optimizer, and their peak.

    torch's MemTracker counts them, on any device. It is a private module: with a torch without it the result is empty.
    """
    import torch

    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError:
        return {}
    tracker = MemTracker()
    tracker.track_external(model)

    def count(moment: str) -> dict[str, int]:
        found = tracker.get_tracker_snapshot(moment)[device]
        return {str(kind).rpartition(".")[2]: nbytes for kind, nbytes in found.items()}

    with tracker:
        output = _first_tensor(model(torch.zeros(1, tokens, dtype=torch.long, device=device)))
        forward = count("current")
        torch.autograd.backward(output.sum())
        backward = count("current")
    model.zero_grad()
    return {
        "parameters": forward["PARAM"],
        "buffers": forward["BUFFER"],
        "activations": forward["ACT"],  # after the forward, when there are most
        "gradients": backward["GRAD"],
        "peak": count("peak")["Total"],
    }


def count_memory(model: torch.nn.Module, device: torch.device, tokens: int) -> str:
    """Return a sentence with the bytes of each category, or why there are none: no plan needs them."""
    try:
        counted = measure_memory(model, device, tokens)
    except Exception as error:  # noqa: BLE001 (a private tool, on anybody's model; what was measured before is kept)
        model.zero_grad()
        return f"memory of one sample: not counted, torch's MemTracker failed: {type(error).__name__}: {error}"
    if not counted:
        return "memory of one sample: not counted, this torch has no MemTracker"
    said = ", ".join(f"{name} {nbytes / 1e6:.3g} MB" for name, nbytes in counted.items())
    return f"memory of one sample, without an optimizer: {said}"


# ---- files -----------------------------------------------------------------------------------------------------------


def fit_line(samples: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return slope and intercept of the least squares' line, neither below 0."""
    slope = max(0.0, statistics.linear_regression(samples, seconds).slope)
    intercept = max(0.0, statistics.fmean(seconds) - slope * statistics.fmean(samples))
    return [float(f"{slope:.4g}"), float(f"{intercept:.4g}")]


def list_nodes(places: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes of these devices, as a profile has them. Raises ConfigError for one of two kinds."""
    nodes: dict[str, dict[str, Any]] = {}
    for place in places:
        node = {"name": place["node"], "kind": place["kind"], "devices": 0, "site": place["site"]}
        known = nodes.setdefault(place["node"], node)
        if known["kind"] != place["kind"]:
            raise ConfigError(
                f"dips profile: {place['node']}: expected devices of one kind in a node, got {known['kind']} and "
                f"{place['kind']}: start a torchrun for each kind (CUDA_VISIBLE_DEVICES), with a --name of its own, "
                "all in one rendezvous (--nnodes)"
            )
        known["devices"] += 1
    return list(nodes.values())


def update_nodes(machines: dict[str, Any], places: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a profile's nodes with the devices that are here, in its order, those that came at the end.

    What was written by hand of a node stays. One that is gone stays, with 0 devices, while the file needs it: it has
    keys or links of its own, or is the last of its kind and site. So a list of nodes whose names change stays short.
    """
    here = {node["name"]: node for node in list_nodes(places)}
    nodes = [_update_node(node, here.pop(node["name"], {"devices": 0})) for node in machines["nodes"]]
    nodes += here.values()
    there = {_kind_and_site(node) for node in nodes if node.get("devices", 1)}
    links = machines.get("links") or {}
    named = {*links, *(far for row in links.values() for far in row)}

    def needed(node: dict[str, Any]) -> bool:
        own = node["name"] in named or not set(node) <= {"name", "kind", "devices", "site"}
        return bool(node.get("devices", 1)) or own or _kind_and_site(node) not in there

    return [node for node in nodes if needed(node)]


def _update_node(node: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return a node with what is otherwise now; a key that the file leaves out is not added with its default."""
    written = {"devices": 1, "site": "site", **node}
    return {**node, **{key: value for key, value in here.items() if written[key] != value}}


def _kind_and_site(node: dict[str, Any]) -> tuple[str, str]:
    return node["kind"], node.get("site", "site")


def compare_nodes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the devices that came and those that are gone, with their kinds."""
    old, new = (
        [f"{node['name']}.{i} ({node['kind']})" for node in nodes for i in range(node.get("devices", 1))]
        for nodes in (before, after)
    )
    return [device for device in new if device not in old], [device for device in old if device not in new]


def merge_machines(known: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a profile of what was measured and of what another one has besides: nodes that are not here, and keys of
    kinds and links that nothing has measured now, as those that were written by hand.
    """
    links = {near: {**row} for near, row in (known.get("links") or {}).items()}
    for near, row in measured["links"].items():
        lines = links.setdefault(near, {})
        lines |= {far: _merge_keys(lines.get(far), line) for far, line in row.items()}
    kinds = {**(known.get("kinds") or {})}
    kinds |= {kind: _merge_keys(kinds.get(kind), figures) for kind, figures in measured["kinds"].items()}
    return {
        "nodes": known.get("nodes", measured["nodes"]),
        "links": links,
        "kinds": kinds,
        "measured": {**(known.get("measured") or {}), **measured["measured"]},
    }


def _merge_keys(known: Any, measured: dict[str, Any]) -> dict[str, Any]:
    return {**(known if isinstance(known, dict) else {}), **measured}  # a number is a rate alone


def make_files(
    places: Sequence[dict[str, Any]], links: dict[Pair, tuple[float, float]], rows: Sequence[dict[str, dict[str, Any]]],
    name: str, tokens: int, batch: int,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return the contents of profile.yaml and model.yaml from what all ranks measured."""
    kinds: dict[str, dict[str, Any]] = {}
    between: dict[str, dict[str, Any]] = {}
    for place in places:
        # The matrix product's rate was measured: nothing of it is lost again.
        kinds.setdefault(place["kind"], {"memory_gb": place["memory_gb"], "tflops": place["tflops"], "efficiency": 1.0})
    for (a, b), (latency, rate) in links.items():
        one, other = places[a], places[b]
        gbit, micros = float(f"{rate / GBIT_BYTES:.4g}"), float(f"{latency * 1e6:.4g}")
        if one["node"] == other["node"]:
            kinds[one["kind"]] |= {"inside_gbit": gbit, "inside_us": micros}
        else:
            for near, far in ((one["site"], other["site"]), (other["site"], one["site"])):
                known = between.setdefault(near, {}).get(far)
                if known is None or known["gbit"] > gbit:  # of the kinds at two sites the slowest pair counts
                    between[near][far] = {"gbit": gbit, "latency_us": micros}
    measured = {
        place["kind"]: {
            layer: {
                op: fit_line(SAMPLES, [s[k] for s in row["seconds"]])
                for k, op in enumerate(("forward", "input", "weight"))
            }
            for layer, row in found.items()
        }
        for place, found in zip(places, rows, strict=True)
        if found
    }
    layers = [
        {"name": layer, **{key: value for key, value in row.items() if key != "seconds"}}
        for layer, row in next(found for found in rows if found).items()
    ]
    machines = {"nodes": list_nodes(places), "kinds": kinds, "links": between, "measured": measured}
    return machines, {"name": name, "batch": batch, "sequence": tokens, "recompute": False, "layers": layers}
