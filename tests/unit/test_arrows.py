"""The rooms of docs/architecture.md#packages: who may import whom. A line that does not fit here stands in the wrong
room."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

DIPS = Path(__file__).parents[2] / "dips"

LOW = {"dips.codecs", "dips.ids", "dips.errors", "dips.dataclass", "dips.outer_step", "dips.plain", "dips.printable"}
CONFIG = {
    "dips.cgroup",
    "dips.config",
    "dips.differences",
    "dips.distribution",
    "dips.files",
    "dips.http",
    "dips.store",
    "dips.daemon",
    "dips.tasks",
    "dips.telemetry",
}  # what daemons and subcommands may use besides
BELOW_ROLES = LOW | CONFIG | {"dips.protocol", "dips.outer", "dips.wire", "dips.transport", "dips.identity"}
BELOW_LIBRARY = {"dips.protocol", "dips.wire", "dips.transport"}  # what a training process loads of Di-PS
ROLES = {"dips.master", "dips.slave", "dips.client"}

# What a room may import of Di-PS, besides itself. A name stands for the module and all below it.
MAY: dict[str, set[str]] = {
    "dips.__init__": {"dips.client.load"},
    "dips.codecs": set(),
    "dips.errors": set(),
    "dips.dataclass": set(),
    "dips.plain": {"dips.errors"},
    "dips.printable": set(),
    "dips.files": LOW | {"dips.files"},
    "dips.ids": {"dips.errors", "dips.dataclass"},
    "dips.outer_step": {"dips.dataclass"},
    "dips.quantisers": {"dips.codecs", "dips.dataclass"},
    "dips.differences": set(),
    "dips.distribution": LOW,
    "dips.cgroup": LOW,
    "dips.daemon": LOW
    | {"dips.config", "dips.http", "dips.identity", "dips.tasks", "dips.telemetry", "dips.transport"},
    "dips.tasks": set(),
    "dips.store": LOW | {"dips.files", "dips.protocol.manifest", "dips.tasks"},
    "dips.config": LOW
    | {"dips.protocol.enums", "dips.protocol.grouping", "dips.protocol.options", "dips.protocol.rank_keys"}
    | {"dips.files", "dips.identity.names", "dips.identity.paths", "dips.tasks"},
    "dips.identity": LOW | {"dips.files"},
    "dips.telemetry": LOW | {"dips.distribution"},
    "dips.protocol": LOW,
    "dips.outer": LOW | {"dips.quantisers"},
    "dips.wire": LOW | {"dips.protocol", "dips.quantisers"},
    "dips.transport": LOW
    | {"dips.cgroup", "dips.files", "dips.protocol", "dips.tasks", "dips.wire", "dips.identity"}
    | {"dips.telemetry.refusals"},
    "dips.view": LOW | {"dips.protocol", "dips.telemetry"},
    "dips.master": BELOW_ROLES - {"dips.outer"} | {"dips.view"},
    "dips.http": LOW
    | {"dips.config", "dips.identity", "dips.tasks", "dips.telemetry", "dips.transport", "dips.__init__"},
    "dips.slave": BELOW_ROLES,
    # The command and the doors of a training script bring the agent and the library together; these never meet.
    "dips.client": BELOW_ROLES - {"dips.outer"} | {"dips.data"},
    "dips.client.agent": BELOW_ROLES - {"dips.outer"} | {"dips.client.ipc"},
    "dips.client.rank": LOW | BELOW_LIBRARY | {"dips.config", "dips.client.ipc", "dips.client.parallel"},
    "dips.client.ipc": LOW | {"dips.config", "dips.files", "dips.protocol"},
    "dips.client.parallel": LOW | BELOW_LIBRARY,
    "dips.client.preflight": BELOW_ROLES - {"dips.outer"} | {"dips.client.ipc", "dips.client.parallel"},
    "dips.commands": BELOW_ROLES | ROLES | {"dips.demo", "dips.inside", "dips.local", "dips.study", "dips.view"},
    "dips.cli": BELOW_ROLES | {"dips.commands", "dips.data", "dips.__init__"},
    # The real deciding, computing and holding parts, and the shells that run on its loop.
    "dips.sim": LOW
    | {"dips.protocol", "dips.outer", "dips.wire", "dips.tasks"}
    | {"dips.transport.intake", "dips.transport.lane", "dips.transport.seal"}
    | {"dips.transport.gate", "dips.transport.tls", "dips.identity"}
    | {f"dips.slave.{pure}" for pure in ("core", "flow", "mirror_plan", "ports", "runtime", "sender", "shard")}
    | {f"dips.master.{pure}" for pure in ("app", "core", "ledger", "restore", "runtime")}
    | {"dips.transport.backoff"}
    | {f"dips.client.agent.{pure}" for pure in ("agent", "core", "state", "account", "restarts")}
    | {"dips.client.ipc.messages", "dips.client.rank.feedback", "dips.data.steps"}
    | {"dips.commands.seed_lanes", "dips.client.rank.transfer"},
    # Real training in the simulation's time: of the demo its model and its text.
    "dips.study": LOW
    | {"dips.protocol", "dips.outer", "dips.sim", "dips.slave.ports", "dips.wire.chunks"}
    | {"dips.config.reading", "dips.config.section", "dips.client.parallel.factory"}
    | {"dips.demo.data", "dips.demo.model", "dips.files"},
    # Training inside one cluster: the parameter servers know nothing of it.
    "dips.inside": LOW,
    "dips.inside.mesh": LOW
    | {"dips.config", "dips.protocol", "dips.client.parallel", "dips.client.rank", "dips.inside.agreement"},
    "dips.inside.planning": LOW | {"dips.sim.heap"},
    "dips.inside.pipeline": LOW
    | {"dips.client.parallel", "dips.client.rank", "dips.files", "dips.inside.agreement", "dips.inside.planning"},
    "dips.data": LOW | {"dips.files"},
    "dips.local": BELOW_ROLES | ROLES | {"dips.commands"},
    "dips.templates": {"dips.client"},  # what `dips new` writes
    "dips.demo": {"dips"},
}

# What a room may import of others, besides the standard library; rooms that are not here may import what they like.
OTHERS: dict[str, set[str]] = {
    "dips.codecs": set(),
    "dips.dataclass": set(),
    "dips.ids": set(),
    "dips.errors": set(),
    "dips.protocol": set(),
    "dips.outer": {"numpy", "numba"},
    "dips.quantisers": {"numpy"},
    "dips.inside.planning": {"numpy"},
}
INSIDE_DOORS = {
    "dips.commands.plan_cluster",
    "dips.commands.profile",
}  # who else may import dips.inside, inside a function
NEVER: dict[str, set[str]] = {
    "dips.master": {"torch", "numba", "zmq"},
    "dips.slave": {"torch"},
    "dips.client.agent": {"torch", "numba", "numpy"},
    "dips.client.ipc": {"torch", "numba", "numpy", "zmq", "grpc"},
    "dips.wire": {"torch", "numba", "zmq"},
    "dips.transport": {"torch", "numba"},
    "dips.data": {"torch", "numba", "zmq", "grpc", "pydantic"},
    "dips.telemetry": {"torch", "numba", "zmq", "grpc"},
    "dips.view": {"torch", "numba", "numpy", "zmq", "grpc", "pydantic"},
    "dips.http": {"torch", "numpy", "numba", "zmq"},
    "dips.config": {"torch", "numpy", "numba", "zmq", "grpc", "cryptography"},
    "dips.identity": {"torch", "numpy", "numba", "zmq", "grpc"},
}

MODULES = sorted(DIPS.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(("dips", *path.relative_to(DIPS).with_suffix("").parts))


def room_of(module: str) -> str:
    """`dips.protocol.round` → `dips.protocol`, `dips.client.rank.agent_client` → `dips.client.rank`."""
    parts = module.split(".")
    return next((room for room in (".".join(parts[:3]), ".".join(parts[:2])) if room in MAY), ".".join(parts[:2]))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it; a name imported from a package counts as package.name."""
    found = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide their arrow"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def arrow_is_allowed(room: str, name: str) -> bool:
    """May a file of `room` import `name`, a module of Di-PS or a name in one?"""
    if room == "dips.client" or room_of(name) == room:
        return within(name, MAY[room] | {room})
    return within(name, MAY[room]) or (name.count(".") == 1 and within("dips.__init__", MAY[room]))


def test_every_room_is_known() -> None:
    """A new room under dips/ has its arrows here before it has a file."""
    assert {room_of(name_of(path)) for path in MODULES} <= set(MAY)


def test_arrows() -> None:
    """A file imports only what its room may: arrows point down, roles never import each other."""
    wrong = []
    for path in MODULES:
        room = room_of(name_of(path))
        found = [n for n in imports(path) if n.split(".")[0] == "dips" and not arrow_is_allowed(room, n)]
        if found:
            may = ", ".join(sorted(MAY[room]))
            wrong.append(f"{name_of(path)} imports {', '.join(found)}; {room} may import {may}")
    assert wrong == []


def test_foreign_packages() -> None:
    """The deciding room knows the standard library only, the computing one numpy and numba besides."""
    for path in MODULES:
        room = room_of(name_of(path))
        foreign = {n.split(".")[0] for n in imports(path)} - {"dips", "__future__"} - set(sys.stdlib_module_names)
        assert room not in OTHERS or foreign <= OTHERS[room], path
        assert not foreign & NEVER.get(room, set()), path


def test_only_two_commands_know_what_is_inside_a_cluster() -> None:
    """No other module imports dips/inside, and these two not at the head of the file: without it all else works."""
    for path in MODULES:
        name, found = name_of(path), {n for n in imports(path) if within(n, {"dips.inside"})}
        if found and not within(name, {"dips.inside"}):
            assert name in INSIDE_DOORS, f"{name} imports {', '.join(sorted(found))}"
            at_head = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
            assert not [node for node in at_head if within(node.module or "", {"dips.inside"})], name


def test_the_simulation_has_no_import_cycle() -> None:
    """No file of dips/sim imports itself by way of others, for types either."""
    within_it = {name_of(p): {n for n in imports(p) if n.startswith("dips.sim.")} for p in MODULES}
    arrows = {file: {n.rsplit(".", 1)[0] for n in found} for file, found in within_it.items() if "dips.sim." in file}
    while leaves := {file for file, below in arrows.items() if not below}:
        arrows = {file: below - leaves for file, below in arrows.items() if file not in leaves}
    assert not arrows, f"in a cycle, or above one: {', '.join(sorted(arrows))}"


def test_what_only_tests_need_stays_out_of_the_wheel() -> None:
    """The wheel holds dips/ alone, nothing of it imports tests, and no checking part of the simulation is in it."""
    wheel = tomllib.loads((DIPS.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["dips"]}
    assert not [name_of(p) for p in MODULES if any(n.split(".")[0] == "tests" for n in imports(p))]
    checking = {p.stem for p in (DIPS.parent / "tests" / "simulation").glob("*.py") if not p.stem.startswith("__")}
    assert {"sabotage", "strikes", "faults", "coverage", "checks"} <= checking
    assert not checking & {p.stem for p in (DIPS / "sim").glob("*.py")}


def test_the_arrows_bite() -> None:
    """The rule refuses what it must: a role in another role, and arrows that point up."""
    assert not arrow_is_allowed("dips.master", "dips.slave.shard.Shard")
    assert not arrow_is_allowed("dips.protocol", "dips.wire.messages")
    assert not arrow_is_allowed("dips.slave", "dips.client")
    assert not arrow_is_allowed("dips.outer", "dips.protocol.effects")
    assert not arrow_is_allowed("dips.client.agent", "dips.client.rank.agent_client.AgentConnection")
    assert not arrow_is_allowed("dips.client.rank", "dips.client.agent.account.Pace")
    assert not arrow_is_allowed("dips.client.ipc", "dips.client.agent.account.Pace")
    assert arrow_is_allowed("dips.client.rank", "dips.client.ipc.messages.Wait")
    assert arrow_is_allowed("dips.master", "dips.protocol.effects.Grant")


@cache
def loaded_by(*modules: str) -> list[set[str]]:
    """The top-level modules that a fresh interpreter has after the first of `modules`, after the next, and so on."""
    script = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        "    print(*{m.split('.')[0] for m in sys.modules})"
    )
    words = [sys.executable, "-c", script, *modules]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=DIPS.parent)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_deciding_room_is_light() -> None:
    """Importing all of dips.protocol loads neither torch nor numpy nor numba nor grpc nor zmq."""
    names = [name_of(p).removesuffix(".__init__") for p in MODULES if room_of(name_of(p)) == "dips.protocol"]
    assert not loaded_by(*names)[-1] & {"torch", "numpy", "numba", "grpc", "zmq", "google", "pydantic"}


COMMANDS = ("dips.cli", "dips.client.app", "dips.master.app", "dips.slave.app")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_not_load_torch(command: str) -> None:
    """A daemon installs and runs without torch; the agent too: it shares a package with the library of the ranks."""
    assert "torch" not in loaded_by(*COMMANDS)[COMMANDS.index(command)]


def test_the_command_line_loads_nothing_large() -> None:
    """`dips status` answers at once."""
    assert not loaded_by(*COMMANDS)[0] & {"torch", "numba", "matplotlib"}
