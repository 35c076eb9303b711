"""The images of deploy/docker, built without a network: a base of the apt mirror, wheels of the package index.

What is fetched is kept in the cache and fetched once; the builds themselves run with `--network none`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.deploy.podman import CACHE, has_image, run_podman

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "deploy" / "docker" / "requirements.txt"
MIRROR, SUITE = os.environ.get("DIPS_APT_MIRROR", "http://deb.debian.org/debian"), "bookworm"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
PYTHON = "3.11"  # of the suite: the wheels are for it
FETCH_S = 900.0
BASE, TORCH = "localhost/dips-base", "localhost/dips-base-torch"
DAEMONS, CLIENT = "localhost/dips-daemons", "localhost/dips-client"
CONTEXT = ("dips", "deploy/nodes.sh", "deploy/docker", "pyproject.toml", "constraints.txt", "README.md", "LICENSE",
           "CHANGELOG.md", ".dockerignore")  # fmt: skip
_TORCH = """\
FROM {base}
COPY torch /wheels
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --no-index --find-links /wheels torch && rm -r /wheels
"""


def build_images(tag: str) -> dict[str, str]:
    """Build both images of this tree; return their names by those of the manifests."""
    base, torch = _ensure_base(), _ensure_torch()
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        context = Path(directory)
        _copy_tree(context)
        wheels = context / "deploy" / "docker" / "wheels"
        for wheel in _ensure_wheels("daemons", ["-r", str(REQUIREMENTS)]).glob("*.whl"):
            os.link(wheel, wheels / wheel.name)
        for file, image, start in (("daemons", DAEMONS, base), ("client", CLIENT, torch)):
            run_podman(
                "build", "--quiet", "--network", "none", "--build-arg", f"BASE={start}", "--tag", f"{image}:{tag}",
                "--file", str(context / "deploy" / "docker" / f"{file}.Dockerfile"), str(context),
            )  # fmt: skip
    return {"dips-daemons": f"{DAEMONS}:{tag}", "dips-client": f"{CLIENT}:{tag}"}


def _copy_tree(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *CONTEXT], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout  # what is committed or added, as in a fresh clone
    for name in filter(None, listed.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def _ensure_base() -> str:
    name = f"{BASE}:{_digest(MIRROR, SUITE, PACKAGES)}"
    if not has_image(name):
        tarball = CACHE / "base.tar"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(tarball), MIRROR],
            check=True, timeout=FETCH_S,
        )  # fmt: skip
        run_podman("import", "--quiet", str(tarball), name)
        tarball.unlink()
    return name


def _ensure_torch() -> str:
    """A training image of somebody else: Python and torch."""
    version = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    base = _ensure_base()
    name = f"{TORCH}:{_digest(base, version)}"
    if not has_image(name):
        wheels = _ensure_wheels("torch", [f"{version}+cpu", "numpy"])
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            (Path(directory) / "Dockerfile").write_text(_TORCH.format(base=base))
            shutil.copytree(wheels, Path(directory) / "torch", copy_function=os.link)
            run_podman("build", "--quiet", "--squash", "--network", "none", "--tag", name, directory)
    return name


def _ensure_wheels(name: str, wanted: list[str]) -> Path:
    """Wheels of these requirements and all that they need, within constraints.txt."""
    inputs = [path.read_text() for path in (ROOT / "constraints.txt", REQUIREMENTS)]
    directory = CACHE / "wheels" / f"{name}-{_digest(*inputs, *wanted)}"
    if not directory.exists():
        aside = directory.with_name(f"{directory.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "download", "-q", "-c", "constraints.txt", "-d", str(aside)]
        command += ["--python-version", PYTHON, "--only-binary", ":all:"] if "-r" not in wanted else []
        subprocess.run([*command, *wanted], cwd=ROOT, check=True, timeout=FETCH_S)
        with suppress(OSError):  # another run was first: its wheels are the same
            aside.rename(directory)
    return directory


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
