"""What a command line asks of Python, and which modules it will import: pure reading, nothing is started here.

A command is served by a fork only if it is plain: this interpreter, no flag but -u, and a script, a module, or the one
line of a console script, in this network namespace or by `ip netns exec` in another. Everything else, `python -c` with
code of its own above all, is started as the real command.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

CONSOLE_SCRIPT = re.compile(r"from ([\w.]+) import main; main\(\)")
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMBA_", "GRPC_", "LD_", "MALLOC_")
FREE = {"PYTHON", "PYTHONPATH", "PYTHONUNBUFFERED"}  # nothing to Python; a forked program obeys these, too
IN_NAMESPACE = ["ip", "netns", "exec"]


@dataclass(frozen=True)
class Program:
    """One of script, module and code is set."""

    arguments: tuple[str, ...]
    script: str = ""
    module: str = ""
    code: str = ""
    unbuffered: bool = False
    namespace: str = ""  # a network's, by its name

    @property
    def entry(self) -> str:
        """The module that it runs, if that has a name."""
        match = CONSOLE_SCRIPT.fullmatch(self.code)
        return match[1] if match else self.module


def parse(command: Sequence[str], python: str = sys.executable) -> Program | None:
    """Return what a command line of an interpreter runs, None if only the real command can run it."""
    if list(command[:3]) == IN_NAMESPACE and len(command) > 4:
        program = parse(command[4:], python)
        return program and replace(program, namespace=command[3])
    if not command or command[0] != python:
        return None
    words = list(command[1:])
    unbuffered = words[:1] == ["-u"]
    if unbuffered:
        del words[0]
    match words:
        case ["-m", module, *rest]:
            return Program(tuple(rest), module=module, unbuffered=unbuffered)
        case ["-c", code, *rest] if CONSOLE_SCRIPT.fullmatch(code):
            return Program(tuple(rest), code=code, unbuffered=unbuffered)
        case [script, *rest] if script.endswith(".py") and Path(script).is_file():
            return Program(tuple(rest), script=script, unbuffered=unbuffered)
    return None


def agrees(environment: Mapping[str, str], ours: Mapping[str, str]) -> bool:
    """Whether nothing that is read once, while Python and its libraries start, differs from the server's."""
    return all(
        value == ours.get(name)
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in FREE
    )


def programs(command: Sequence[str]) -> Iterator[Program]:
    """The programs of a command line: an agent's names torchrun's, and that one names the script of the ranks."""
    for at, word in enumerate(command):
        if word == sys.executable and (program := parse(command[at:])) is not None:
            yield program
        elif word.endswith(".py") and os.path.isfile(word):
            yield Program((), script=word)


def imported_by(script: Path, seen: set[Path] | None = None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each import of a script and of the files beside it, wherever it stands: a module, and the names from it."""
    seen = seen if seen is not None else set()
    if script in seen:
        return
    seen.add(script)
    for node in ast.walk(ast.parse(script.read_bytes())):
        if isinstance(node, ast.Import):
            found = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [(node.module, tuple(alias.name for alias in node.names))]
        else:
            continue
        for module, names in found:
            beside = script.parent / f"{module.split('.')[0]}.py"
            if beside.is_file():
                yield from imported_by(beside, seen)
            else:
                yield module, names
