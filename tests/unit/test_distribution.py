"""What pip reads: the distribution bears a name of its own, and nothing sends a reader to PyPI's project `dips`."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dips import files
from dips.distribution import refuse_other_dips
from dips.errors import ConfigError
from tests.forkserver.process import present_umask

ROOT = Path(__file__).parents[2]
OTHERS = "dips"  # on PyPI, a package for the photometry of stars
REQUIRED = re.compile(r"[A-Za-z0-9._-]+")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_distribution_is_not_the_other_project(project: dict[str, Any]) -> None:
    """The import name and the four commands stay as they are."""
    assert project["name"] == "di-ps"
    assert set(project["scripts"]) == {"dips", "dips-master", "dips-slave", "dips-client"}


def test_extras_refer_to_this_distribution(project: dict[str, Any]) -> None:
    """An extra that names another extra by the old name would install the other project."""
    required = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = [match.group() for line in required if (match := REQUIRED.match(line))]
    assert OTHERS not in names
    assert names.count(project["name"]) >= 4, "no extra builds on another any more: this test looks at nothing"


@pytest.mark.parametrize("pattern", ["*.md", "docs/*.md", "deploy/**/*.md", "dips/**/*.py", "deploy/*/*.Dockerfile"])
def test_no_text_installs_the_other_project(pattern: str) -> None:
    """README, deployment notes, help texts and error messages."""
    wrong = re.compile(r"pip install (-\S+ )*['\"]?dips\b(?!/)")
    paths = sorted(ROOT.glob(pattern))
    assert paths
    told = [f"{path.relative_to(ROOT)}: {line}" for path in paths for line in path.read_text().splitlines()
            if wrong.search(line)]  # fmt: skip
    assert not told


@pytest.fixture(name="other_dips")
def installed_other_dips(tmp_path: Path) -> Path:
    """A directory on the path with what pip leaves of the other project."""
    info = tmp_path / "dips-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dips\nVersion: 0.2.0\n")
    return tmp_path


def test_the_other_project_beside_ours_is_found(other_dips: Path) -> None:
    """The message names the directory, says why and what to do; alone, nothing is refused."""
    refuse_other_dips()
    with pytest.raises(ConfigError, match=r"'dips' 0\.2\.0.*overwritten.*pip uninstall dips di-ps") as refused:
        refuse_other_dips([str(other_dips)])
    assert str(other_dips) in str(refused.value)


@pytest.mark.parametrize("module", ["dips.cli", "dips.master.app", "dips.slave.app", "dips.client.app"])
def test_no_command_starts_beside_the_other_project(
    module: str, other_dips: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four refuse with the exit code of a wrong configuration, before they read anything."""
    main = importlib.import_module(module).main
    monkeypatch.syspath_prepend(other_dips)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.setattr(files, "_given", files._given)
    umask = present_umask()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        os.umask(umask)
    said = capsys.readouterr()
    assert ended.value.code == 78 and "another project" in said.err and not said.out


@pytest.mark.real_commands
def test_no_rank_trains_beside_the_other_project(other_dips: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(other_dips)])
    script = "from dips.client import cosine"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "another project" in done.stderr
