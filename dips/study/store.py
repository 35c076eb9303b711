"""Results on disk: one file for each finished run, written completely or not at all, and named by everything that
decides it.

The name is a digest of the run's description and of the code that computes runs, so nothing is computed twice, and
results of another version of the code are not used. The digest is of syntax trees, so comments do not count; nor do the
modules that only report.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dips.errors import ConfigError
from dips.study.execute import Numbers
from dips.study.study_file import RunPlan

PACKAGE = Path(__file__).parents[1]
COMPUTING = (
    "outer_step.py", "protocol", "outer", "sim", "client/agent", "client/rank/feedback.py", "slave", "codecs.py",
    "quantisers.py", "wire/bodies.py", "data/steps.py", "demo/data.py", "demo/model.py", "study",
)  # fmt: skip
REPORTING = frozenset({"store", "runner", "report", "statistics", "drawing", "study_file", "settings"})


class ResultStore:
    """A directory of results."""

    def __init__(self, directory: Path, factory: str) -> None:
        self.directory, self._code = directory, digest_code(factory)

    def find(self, plan: RunPlan) -> Numbers | None:
        """Return the numbers of a finished run; None if its file is missing or cannot be read."""
        try:
            found = json.loads(self._path_of(plan).read_text(encoding="utf-8"))
            numbers: Numbers = found["numbers"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return numbers

    def keep(self, plan: RunPlan, numbers: Numbers) -> None:
        """Write a result, completely or not at all."""
        path = self._path_of(plan)
        content = {"row": plan.row, **plan.description, "numbers": numbers}
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise ConfigError(f"--output {self.directory}: cannot be written: {error.strerror or error}") from error

    def name_of(self, plan: RunPlan) -> str:
        """Return a name that is equal for runs that must have equal results."""
        return plan.digest(self._code)

    def _path_of(self, plan: RunPlan) -> Path:
        return self.directory / f"{self.name_of(plan)}.json"


@cache
def digest_code(factory: str) -> str:
    """Return the digest of the code that computes runs, including the factory's module, and of torch's version."""
    from torch import __version__ as torch_version

    digest = hashlib.blake2b(f"torch {torch_version}".encode(), digest_size=16)
    for name in COMPUTING:
        path = PACKAGE / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if file.parent.name != "study" or file.stem not in REPORTING:
                digest.update(_digest_of(file))
    spec = find_spec(factory.partition(":")[0])
    if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
        digest.update(_digest_of(Path(spec.origin)))
    return digest.hexdigest()


def _digest_of(file: Path) -> bytes:
    tree = ast.dump(ast.parse(file.read_text(encoding="utf-8")))
    return hashlib.blake2b(tree.encode(), digest_size=16).digest()
