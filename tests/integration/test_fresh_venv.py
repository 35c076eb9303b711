"""The built wheel in an environment of its own: refused beside the other project `dips`, and alone the README's steps.

The dependencies come from this interpreter's site-packages by a path file, so that nothing is downloaded but, where
hatchling is not installed, the build backend.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.harness import end_process
from tests.integration.cluster_harness import free_port

pytestmark = [pytest.mark.slow, pytest.mark.real_commands, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ROUNDS = 5
STEP_S, RUN_S, END_S = 120.0, 240.0, 30.0
RANKS = 2  # not 8: two cores

# What the wheel of dips 0.2.0 on PyPI holds, by its listing: the same package, and the same script.
OTHER = {
    "dips/__init__.py": "from .dips import *\n",
    "dips/dips.py": "def photometry():\n    pass\n",
    "dips-0.2.0.data/scripts/dips": "#!python\nimport dips\n",
    "dips-0.2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: dips\nVersion: 0.2.0\n",
    "dips-0.2.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 50))
"""

# What the README leaves to its reader, around the lines that it gives.
BEFORE = """
import itertools
import torch
from torch import distributed, nn
from mymodel import build

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
model = nn.parallel.DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch_tokens = 2 * 64

def forward_and_step(batch):
    loss = nn.functional.cross_entropy(model(batch), (3 * batch + 1) % 50)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

loader = (torch.randint(50, (64,)) for _ in itertools.count())
"""


class Environment:
    """A virtual environment and a directory in which a person types commands."""

    def __init__(self, directory: Path) -> None:
        self.bin, self.place = directory / "venv" / "bin", directory / "place"
        self.place.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")], check=True)
        (site,) = (directory / "venv" / "lib").glob("python*/site-packages")
        self.site = site
        libraries = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))]
        (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(libraries)) + "\n")
        torchrun = self.bin / "torchrun"
        torchrun.write_text(f'#!/bin/sh\nexec {self.bin / "python"} -m torch.distributed.run --standalone "$@"\n')
        torchrun.chmod(0o755)

    def install(self, wheel: Path) -> None:
        words = [
            "--python",
            str(self.bin / "python"),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--force-reinstall",
        ]
        subprocess.run([sys.executable, "-m", "pip", *words, str(wheel)], check=True)

    @property
    def variables(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DIPS_"))}
        return {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def start(self, line: str, log: Path | None = None) -> subprocess.Popen[str]:
        out = log.open("w") if log else None
        try:
            return subprocess.Popen(
                shlex.split(line), cwd=self.place, env=self.variables, text=True, stdin=subprocess.DEVNULL,
                stdout=out or subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        finally:
            if out is not None:
                out.close()

    def type_line(self, line: str, code: int = 0) -> str:
        """Type one line and wait for its end; return what it said."""
        process = self.start(line)
        said, _ = process.communicate(timeout=STEP_S)
        assert process.returncode == code, f"{line}: exit code {process.returncode}\n{said}"
        return said


@pytest.fixture(scope="module", name="wheel")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` of this checkout would install."""
    target = tmp_path_factory.mktemp("wheel")
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    words = ["wheel", "--quiet", "--no-deps", *here, "--wheel-dir", str(target), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = target.glob("di_ps-*.whl")
    return wheel


@pytest.fixture(name="environment")
def fresh_environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


@pytest.fixture(name="other")
def other_wheel(tmp_path: Path) -> Path:
    path = tmp_path / "dips-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in OTHER.items():
            file.writestr(name, text)
        names = "".join(f"{name},,\n" for name in OTHER)
        file.writestr("dips-0.2.0.dist-info/RECORD", f"{names}dips-0.2.0.dist-info/RECORD,,\n")
    return path


@pytest.mark.parametrize("ours_first", [False, True])
def test_beside_the_other_project_it_refuses_to_start(
    wheel: Path, other: Path, environment: Environment, ours_first: bool
) -> None:
    """Whichever was installed last: our commands say that the other one is there, and what to do."""
    for each in (wheel, other) if ours_first else (other, wheel):
        environment.install(each)
    names = ("dips-master", "dips-slave", "dips-client") + (() if ours_first else ("dips",))  # else `dips` is theirs
    for name in names:
        said = environment.type_line(f"{name} --help", code=78)
        assert "holds the distribution 'dips' 0.2.0, another project" in said, said
        assert "pip uninstall dips di-ps" in said and "Traceback" not in said


def readme_blocks() -> list[str]:
    return re.findall(r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def readme_commands() -> list[str]:
    """The lines under "Run it", without their comments."""
    (block,) = (b for b in readme_blocks() if "dips-master  --config" in b)
    return [" ".join(line.partition("#")[0].split()) for line in block.splitlines()]


def script_of_readme() -> str:
    """A training script: the README's own lines, its ellipsis filled in."""
    (block,) = (b for b in readme_blocks() if "outer = OuterLoop(model)" in b)
    filled, count = re.subn(r"    \.\.\. *#[^\n]*\n", "    loss = forward_and_step(batch)\n", block)
    assert count == 1
    return BEFORE + filled + "distributed.destroy_process_group()\n"


@pytest.fixture(name="started")
def ends_all() -> Iterator[list[subprocess.Popen[str]]]:
    """What was started and still runs is ended."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in reversed(started):
        end_process(process, END_S)


def test_the_readme_alone_makes_a_run(
    wheel: Path, environment: Environment, started: list[subprocess.Popen[str]]
) -> None:
    """`dips new`, one line edited, then every line under "Run it" as it stands there: five rounds."""
    environment.install(wheel)
    place = environment.place
    (place / "mymodel.py").write_text(MODEL)
    (place / "train.py").write_text(script_of_readme())
    new, init, check, master, slave, client, status, history, plot, trace, export = readme_commands()
    environment.type_line(f"{new} --listen 127.0.0.1:{free_port()}")  # the test's own: another run may be here
    text = (place / "shared.yaml").read_text()
    assert "versions: 0 " in text
    (place / "shared.yaml").write_text(text.replace("versions: 0 ", f"versions: {ROUNDS} "))

    environment.type_line(init)
    environment.type_line(check)
    lines = [master, *(slave.replace("slave-0", name) for name in ("slave-0", "slave-1"))]
    started += [environment.start(line, place / f"{i}.log") for i, line in enumerate(lines)]
    cluster = environment.start(
        client.replace("--nproc-per-node 8", f"--nproc-per-node {RANKS}"), place / "cluster.log"
    )
    watch = environment.start(status, place / "watch.log")
    started += [watch, cluster]
    until = time.monotonic() + RUN_S
    while cluster.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(place.glob("*.log")))
    assert cluster.returncode == 0, logs
    assert "Warning" not in (place / "cluster.log").read_text(), logs

    watch.send_signal(signal.SIGINT)  # as a person ends it; what is no terminal gets a line a second
    assert watch.wait(END_S) == 0 and f"head v{ROUNDS}@r{ROUNDS}" in (place / "watch.log").read_text()
    told = environment.type_line(history)
    assert [f"v{n}@r{n}" in told for n in range(1, ROUNDS + 1)] == [True] * ROUNDS
    environment.type_line(plot)
    assert len((place / "loss.csv").read_text().splitlines()) == 1 + ROUNDS and (place / "loss.png").exists()
    environment.type_line(trace)
    events = json.loads((place / "trace.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in events if event["ph"] == "X"}) == 4, "master, two slaves, a cluster"
    environment.type_line(export)
    load = "import dips, mymodel; print(dips.load(mymodel.build(), 'model.safetensors'))"
    assert environment.type_line(f'python -c "{load}"').strip() == f"v{ROUNDS}@r{ROUNDS}"
    assert "finished at" in environment.type_line(status.removesuffix(" --watch"))
