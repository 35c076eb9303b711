"""`make deploy-check`: everything under deploy/ that can be checked without a cluster, and nothing is skipped.

The exit code is 1 if a line was printed that is wrong, or if a tool is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.deploy.arrows import ARROWS, FROM_OUTSIDE, TO_STORE, find_wrong_arrows
from tests.deploy.configuration import find_contradictions
from tests.deploy.kubectl import CHART, KUBERNETES, Manifest, render, render_chart
from tests.deploy.pods import expand_pods
from tests.deploy.rules import find_frozen, find_misfits
from tests.deploy.schemas import VERSIONS, find_invalid

PARTS = ("base", "seed", "cluster")
CHARTS: dict[str, tuple[str, ...]] = {  # what is rendered → options
    "chart": (),
    "chart of clusters": ("--set", "servers=false"),
    "chart in production": ("--values", str(CHART / "production.yaml")),
    "chart as JobSet": ("--set", "servers=false,clusters.kind=JobSet,monitoring=true"),
    "chart as TrainJob": ("--set", "servers=false,clusters.kind=TrainJob"),
}
NAMESPACES = ("base/namespace.yaml", "cluster/common/namespace.yaml", "issuer.yaml")  # applied before the chart
TOGETHER = (
    (("base", "seed", "cluster"), ARROWS),
    (("chart", "seed", "chart of clusters"), ARROWS),
    (("chart in production", "seed", "cluster"), ARROWS | FROM_OUTSIDE | TO_STORE),
)
DEPLOY = KUBERNETES.parent
TOOL_S = 120.0
TOOLS = {  # key that a file has → what checks it
    "tests": ("promtool", "test", "rules"),
    "groups": ("promtool", "check", "rules"),
    "scrape_configs": ("promtool", "check", "config", "--syntax-only"),  # its certificates are elsewhere
    "receivers": ("amtool", "check-config"),
}


def render_all() -> dict[str, list[Manifest]]:
    """Kustomizations and charts; a chart with the namespaces that are there before it."""
    namespaces = [o for name in NAMESPACES for o in yaml.safe_load_all((KUBERNETES / name).read_text())]
    return {part: render(KUBERNETES / part) for part in PARTS} | {
        part: [*namespaces, *render_chart(*words)] for part, words in CHARTS.items()
    }


def check_manifests() -> Iterator[str]:
    rendered = render_all()
    for part, objects in rendered.items():
        for find in (find_invalid, find_misfits, find_contradictions, find_frozen):
            yield from (f"{part}: {line}" for line in find(objects))
    for parts, arrows in TOGETHER:
        objects = [o for part in parts for o in rendered[part]]
        yield from (f"{parts[0]}: {line}" for line in find_wrong_arrows(objects, expand_pods(objects), arrows))


def check_monitoring(directory: Path = DEPLOY) -> Iterator[str]:
    """Rules, their tests and examples of configurations, by Prometheus' own tools."""
    for file in sorted(path for part in ("prometheus", "alertmanager") for path in (directory / part).glob("*.y*ml")):
        content = yaml.safe_load(file.read_text())
        found = [words for key, words in TOOLS.items() if key in content]
        if not found:
            yield f"{file.relative_to(DEPLOY)}: expected one of the keys {', '.join(TOOLS)}: nobody knows what it is"
        for words in found[:1]:
            yield from _run(*words, file.name, directory=file.parent)


def _run(tool: str, *words: str, directory: Path) -> Iterator[str]:
    if shutil.which(tool) is None:
        yield f"{tool} is not here: apt install {'prometheus' if tool == 'promtool' else 'prometheus-alertmanager'}"
        return
    done = subprocess.run([tool, *words], cwd=directory, capture_output=True, text=True, timeout=TOOL_S, check=False)
    if done.returncode:
        yield f"{tool} {' '.join(words)}: {(done.stdout + done.stderr).strip()}"


def main() -> int:
    found = [*check_manifests(), *check_monitoring()]
    print(
        "\n".join(found)
        if found
        else f"deploy: {', '.join((*PARTS, *CHARTS))} hold for Kubernetes {', '.join(VERSIONS)}"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
