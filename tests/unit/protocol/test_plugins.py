"""Rules and gates of a user's own, as the guides show them: a real installed package, found by its entry points."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dips.config import load_run
from dips.errors import ConfigError
from dips.protocol import plugins
from dips.protocol.options import Options, OuterOptions, PenaltyOptions
from tests.unit.protocol.ruled_run import ruled
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun, replace
from tests.unit.test_config import RUN, changed

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def install(site: Path, files: dict[str, str], entries: dict[str, dict[str, str]]) -> None:
    """What pip leaves of a package: modules, and a dist-info with its entry points."""
    info = site / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = [line for group, named in entries.items() for line in (f"[{group}]", *map(" = ".join, named.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, text in files.items():
        (site / name).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of packages on the path of this process; what was loaded from it is forgotten."""
    before = set(sys.modules)
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    plugins.load_plugin.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def install_of_guide(site: Path, guide: str) -> None:
    """The last package that a guide shows: its module and what its pyproject.toml says."""
    blocks = BLOCK.findall((ROOT / guide).read_text())
    modules = [text for kind, text in blocks if kind == "python" and text.startswith("# my_")]
    tables = [tomllib.loads(text) for kind, text in blocks if kind == "toml"]
    (module,), (table,) = modules, tables
    install(site, {module.splitlines()[0].removeprefix("# "): module}, table["project"]["entry-points"])


def test_the_gate_of_the_guide_gates(site: Path) -> None:
    """A push of a hundred times the usual inner steps is kept out, with the gate's sentence; the others are in."""
    install_of_guide(site, "docs/guides/gates.md")
    run = ScriptedRun(replace(OPTIONS, penalty=PenaltyOptions(gates=("steps",))))  # type: ignore[arg-type]
    run.train("a")
    for steps in (4, 4, 4000):
        push = run.push("a", 100, steps)
        run.wait(11.0)
        run.outcome(push)
    notes = [dict(e.fields) for e in run.effects if getattr(e, "kind", "") == "push_gated"]
    assert [(note["gate"], note["reason"]) for note in notes] == [("steps", "4000 inner steps, usually 4")]
    assert len(run.committed) == 2


def test_the_rule_of_the_guide_steps(site: Path) -> None:
    """A lone push of three clusters is a third of a cycle, all three are one."""
    install_of_guide(site, "docs/guides/rules.md")
    run = ruled(step="gently", weights="tokens")
    run.push_all({"a": 100})
    run.push_all({"a": 100, "b": 300, "c": 50})
    assert [row.step.numbers for row in run.committed] == [(0.8, 0.5, 0.5, 0.8), (0.8, 1.0, 1.0, 0.8)]


def test_a_merge_of_ones_own(site: Path) -> None:
    """A Merge by its name; what is none is refused before the first round."""
    text = "from dips.protocol.rules import MEAN\nmine = MEAN\nother = 3\n"
    install(site, {"mine.py": text}, {plugins.RULES: {"mine": "mine:mine", "other": "mine:other"}})
    ours, theirs = ruled(merge="mean"), ruled(merge="mine")
    for run in (ours, theirs):
        run.push_all({"a": 100, "b": 50})
    assert ours.committed[-1].step == theirs.committed[-1].step
    with pytest.raises(ConfigError, match=r"outer\.merge: expected other to be a .*Merge, got 3"):
        ruled(merge="other")
    with pytest.raises(ConfigError, match=r"outer\.step: expected other to be a function"):
        ruled(step="other")


def test_what_is_not_installed_is_refused_with_what_is(site: Path, tmp_path: Path) -> None:
    """By the file and the key, in every process that reads `shared`."""
    install(site, {}, {plugins.GATES: {"hush": "hush:judge", "steps": "steps:judge"}})
    file = tmp_path / "dips.yaml"
    file.write_text(yaml.safe_dump(changed(RUN, "shared.penalty.gates", ["dips", "stpes"])))
    said = r"dips\.yaml: penalty\.gates: .*group dips\.gates \(installed here: hush, steps\), got 'stpes'"
    with pytest.raises(ConfigError, match=said):
        load_run(file)
    with pytest.raises(ConfigError, match=r"outer\.merge: .*group dips\.rules \(none is installed here\), got 'rdb'"):
        OuterOptions(merge="rdb")


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No module named 'broken'"), ("1 / 0", "division by zero"), ("judge_it = 1", "has no attribute 'judge'")],
)
def test_what_cannot_be_loaded_stops_the_master(site: Path, text: str | None, said: str) -> None:
    """Before the first round, naming the entry point."""
    install(site, {} if text is None else {"broken.py": text}, {plugins.GATES: {"broken": "broken:judge"}})
    options = Options(penalty=PenaltyOptions(gates=("broken",)))
    with pytest.raises(ConfigError, match=rf"entry point broken .*broken:judge cannot be loaded: .*{said}"):
        ScriptedRun(options)
