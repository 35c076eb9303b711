"""What the documents say of the code is so: keys, commands, options, exit codes, files, messages and states exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from dips import cli
from dips.client import app as client_app
from dips.codecs import Codec
from dips.config import ClusterFile, RunFile
from dips.errors import TREATMENTS
from dips.inside.planning.profile import ModelProfile
from dips.master import app as master_app
from dips.protocol.enums import CLUSTER_MOVES, ROUND_MOVES, SLAVE_MOVES
from dips.protocol.options import OuterOptions
from dips.protocol.tunable import TUNABLE
from dips.slave import app as slave_app
from dips.study.fleet import FleetCluster
from dips.study.sized_run import SimulatedClusters, SimulatedRun
from dips.wire import frame
from tests.structure import config_keys

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = {path: path.read_text() for path in DOCUMENTS}
ALL = "\n".join(TEXT.values())
CLAIMS = "\n".join(text for path, text in TEXT.items() if path.stem != "track-record")  # which names mutants and seeds
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def section(document: str, heading: str) -> str:
    """The text below a heading of docs/, up to the next of its rank."""
    text = TEXT[ROOT / "docs" / f"{document}.md"]
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def spans(text: str) -> Iterator[str]:
    """What stands between backticks, outside of blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def blocks(text: str, language: str = "") -> Iterator[str]:
    """What stands between fences."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    yield from (block for spoken, block in found if spoken == language)


# ---- configuration ---------------------------------------------------------------------------------------------------


def parts(hint: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    if get_origin(hint) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        for argument in get_args(hint):
            yield from parts(argument)
    else:
        yield hint


def keys_of(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a section, with its annotation."""
    for name, hint in get_type_hints(cls, include_extras=False).items():
        if name.startswith("_") or name == "model_config":
            continue
        yield prefix + name, hint
        for part in parts(hint):
            if isinstance(part, type) and (issubclass(part, BaseModel) or dataclasses.is_dataclass(part)):
                yield from keys_of(part, f"{prefix}{name}.")


RUN_KEYS, CLUSTER_KEYS = dict(keys_of(RunFile)), dict(keys_of(ClusterFile))
BY_NAME: dict[str, list[Any]] = {}
for dotted, annotation in (*RUN_KEYS.items(), *CLUSTER_KEYS.items()):
    BY_NAME.setdefault(dotted.rpartition(".")[2], []).append(annotation)


@pytest.mark.parametrize(("heading", "keys"), [("Run file", RUN_KEYS), ("Cluster file", CLUSTER_KEYS)])
def test_keys_of_the_tables_exist(heading: str, keys: dict[str, Any]) -> None:
    """The first column of a table of keys names keys of that file."""
    rows = re.findall(r"^\| (`[^|]+) \|", section("configuration", heading), re.MULTILINE)
    named = [key for row in rows for key in spans(row)]
    assert len(named) > 5
    assert not [key for key in named if key not in keys]


# Of both files, as tests/structure.py counts them. The last to come was `before_start`: who plans for devices that come
# and go knows the command, and nobody else does.
MOST_KEYS = 76


def test_each_key_says_when_to_change_it() -> None:
    """One row for each key, with a sentence in its last column; keys of `shared` stand in the run file's table."""
    rows = [
        re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \|$", section("configuration", heading), re.MULTILINE)
        for heading in ("Run file", "Cluster file")
    ]
    run, cluster = (list(config_keys(file)) for file in (RunFile, ClusterFile))
    own = [key for key in cluster if not key.startswith("shared.")]
    assert sorted(key for key, _, _ in rows[0]) == sorted(run)
    assert sorted(key for key, _, _ in rows[1]) == sorted([*own, "shared"])
    silent = [key for key, _, when in (*rows[0], *rows[1]) if len(when.split()) < 4 or not when.endswith(".")]
    assert not silent
    assert len(run) + len(own) <= MOST_KEYS


def test_keys_of_the_text_exist() -> None:
    """`heartbeat_s`, `min_push_bps`: what looks like a key with a unit is one, of a file or of `dips set`."""
    named = {s for s in spans(ALL) if re.fullmatch(r"(?!dips_|process_)[a-z]+(_[a-z]+)*_(s|bytes|bps)", s)}
    assert len(named) > 6
    assert (
        not named
        - set(BY_NAME)
        - {key.rpartition(".")[2] for key in TUNABLE}
        - {field.name for file in (FleetCluster, ModelProfile) for field in dataclasses.fields(file)}
        - set(SimulatedClusters.model_fields)
        - set(SimulatedRun.model_fields)
    )


def test_values_of_keys_are_legal() -> None:
    """`install: lazy`: the key exists, and may be that where its values are listed."""
    pairs = {tuple(s.split(": ", 1)) for s in spans(CLAIMS) if re.fullmatch(r"[a-z_]+: [a-z]+", s)}
    assert len(pairs) > 5
    for key, value in pairs:
        assert key in BY_NAME, f"{key}: {value}"
        listed = [
            v for hint in BY_NAME[key] for part in parts(hint) if get_origin(part) is Literal for v in get_args(part)
        ]
        assert not listed or value in listed or yaml.safe_load(value) in listed, f"{key}: {value}, legal: {listed}"


# ---- commands --------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Any] = {  # of the click that typer brings
    "dips": typer.main.get_command(cli.cli),
    "dips-master": typer.main.get_command(master_app.cli),
    "dips-slave": typer.main.get_command(slave_app.cli),
    "dips-client": typer.main.get_command(client_app.command_line),
}


def shown_commands() -> Iterator[str]:
    """Command lines of blocks and of spans."""
    lines = [line for text in TEXT.values() for block in blocks(text) for line in block.splitlines()]
    for line in (*lines, *spans(ALL)):
        if re.match(r"dips(-master|-slave|-client)? +[a-z-]", line):
            yield line.partition("#")[0].strip()


def test_commands_and_their_options_exist() -> None:
    """Each subcommand and each long option that is shown is one of the command line's."""
    for line in sorted(set(shown_commands())):
        words = line.partition(" -- ")[0].split()
        command = COMMANDS[words.pop(0)]
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{line}: no subcommand {words[0]}"
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_make_targets_exist() -> None:
    """`make demo` and the others stand in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"^make ([a-z-]+)", "\n".join((*spans(ALL), *blocks(ALL))), re.MULTILINE))
    assert {"demo", "test"} <= shown <= targets


def test_every_exit_code_is_explained() -> None:
    """The table has a row for each code of errors.py, and those of every command line."""
    rows = set(map(int, re.findall(r"^\| (\d+) \|", section("configuration", "Exit codes"), re.MULTILINE)))
    assert rows == {t.exit_code for _, t in TREATMENTS} | {0, 1, 2}


def test_environment_variables_are_read() -> None:
    """A variable that is named is one that the client, the logs, commands or a script of deploy/ know."""
    read = [
        *(ROOT / "dips" / "client").rglob("*.py"),
        ROOT / "dips" / "telemetry" / "logs.py",
        ROOT / "dips" / "commands" / "follow.py",
        ROOT / "dips" / "commands" / "options.py",
        *(ROOT / "deploy").rglob("*.sh"),
        *(ROOT / "deploy").rglob("*.sbatch"),
    ]
    code = "\n".join(path.read_text() for path in read)
    named = set(re.findall(r"\bDIPS_[A-Z_]+|\bTORCH_[A-Z_]+", ALL))
    assert {"DIPS_AGENT", "DIPS_AGENT_TOKEN"} <= named
    assert not [name for name in named if not re.search(rf"\b{name}\b", code)]


# ---- files, names, Python --------------------------------------------------------------------------------------------


def test_paths_exist() -> None:
    """A path of the repository that is named is there."""
    pattern = r"(?<![\w/.-])((?:dips|docs|tests|configs|deploy|protos|benchmarks)/[\w./-]*)"
    named = {path.rstrip(".") for s in (*spans(ALL), *blocks(ALL)) for path in re.findall(pattern, s)}
    assert len(named) > 15
    assert not [path for path in named if not (ROOT / path).exists()]


def test_requirements_are_those_of_the_project() -> None:
    """Versions, extras and the distribution's name in the README are pyproject's."""
    text = TEXT[README]
    assert PROJECT["requires-python"] == ">=" + re.findall(r"Python (\d+\.\d+) or newer", text)[0]
    torch = next(d for d in PROJECT["optional-dependencies"]["client"] if d.startswith("torch"))
    assert re.findall(r"\((\d+\.\d+) or newer\)", text)[0] in torch
    assert set(re.findall(r"pip install '([\w-]+)\[", text)) == {PROJECT["name"]}
    assert set(re.findall(r"\[([a-z]+)\]['\s]", text)) <= set(PROJECT["optional-dependencies"])


def test_python_of_the_readme() -> None:
    """Blocks are Python, what they import exists, and OuterLoop has what is used of it."""
    for block in blocks(TEXT[README], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert {alias.name for alias in node.names} <= set(module.__all__)
    used = set(re.findall(r"\bouter\.(\w+)", ALL))
    assert {"step", "finished", "progress"} <= used
    assert used <= methods_of("OuterLoop") | {
        field.name for field in dataclasses.fields(OuterOptions)
    }  # shared.outer's


def methods_of(name: str) -> set[str]:
    """What a class of the client defines, without importing torch."""
    for path in (ROOT / "dips" / "client").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    raise AssertionError(f"no class {name}")


# ---- protocol --------------------------------------------------------------------------------------------------------


def test_messages_exist() -> None:
    """Every message that docs/protocol.md names is a call or a message of protos/."""
    protos = "\n".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
    known = set(re.findall(r"(?:rpc|message) (\w+)", protos))
    named = {s for s in spans(section("protocol", "Messages")) if re.fullmatch(r"([A-Z][a-z]+)+", s)}
    assert len(named) > 30
    assert not named - known


def test_the_rows_of_messages_are_numbered() -> None:
    """Code cites rows by number."""
    rows = re.findall(r"^\| (\d+) \|", section("protocol", "Messages"), re.MULTILINE)
    assert rows == [str(n) for n in range(1, 21)]


def test_the_header_is_as_shown() -> None:
    """Where each field of a frame's header lies."""
    listing = section("protocol", "Frames").split("Header bytes: ")[1].split(".")[0]
    shown = re.findall(r"(\d+)(?:–(\d+))? (\S+)", listing)
    ends = [(int(begin), int(end or begin)) for begin, end, _ in shown]
    assert [begin for begin, _ in ends] == [0] + [end + 1 for _, end in ends[:-1]]
    assert ends[-1][1] == frame.HEADER_BYTES - 1
    header = frame.pack_header(frame.Header(frame.Kind.CHUNK, 1, 2, 3, 4, 5, 6, 7, Codec.BF16.dtype, 9))
    places = {"DIPS": 0x53504944, "kind": 4, "dtype": 1, "codec": 1, "run": 1, "layer": 5, "stream": 2, "parameter": 6}
    places |= {"body": 3, "offset": 7, "counter": 9, "format": frame.FORMAT}
    for (begin, end), (_, _, word) in zip(ends[:-2], shown, strict=False):
        assert int.from_bytes(header[begin : end + 1], "little") == places[word.strip("`,")], word


TABLES: dict[str, Mapping[Any, frozenset[Any]]] = {"round": ROUND_MOVES, "cluster": CLUSTER_MOVES, "slave": SLAVE_MOVES}


@pytest.mark.parametrize("machine", TABLES)
def test_moves_are_legal(machine: str) -> None:
    """An arrow between two states is an edge of the table."""
    table = {str(old): {str(new) for new in after} for old, after in TABLES[machine].items()}
    line = section("architecture", "States").split(f"**{machine}**: ")[1].split("\n* ")[0]
    chains = [s for s in spans(line) if "→" in s or "⇄" in s]
    assert chains
    for chain in chains:
        states = re.split(r" [→⇄] ", chain.lower())
        both = re.findall(r"(\w+) ⇄ (\w+)", chain.lower())
        edges = [*pairwise(states), *((new, old) for old, new in both)]
        assert not [edge for edge in edges if edge[1] not in table[edge[0]]]
