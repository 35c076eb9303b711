"""`make deploy-check`: everything under deploy/ that can be checked without a cluster, and nothing is skipped.

The exit code is 1 if a line was printed that is wrong, or if a tool is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.arrows import ARROWS, FROM_OUTSIDE, find_wrong_arrows
from tests.deploy.configuration import find_contradictions
from tests.deploy.kubectl import KUBERNETES, Manifest, render
from tests.deploy.pods import expand_pods
from tests.deploy.rules import find_misfits
from tests.deploy.schemas import VERSIONS, find_invalid

PARTS = ("base", "production", "cluster", "cluster/jobset", "cluster/trainjob")
TOGETHER = (("base", "cluster", ARROWS), ("production", "cluster", ARROWS | FROM_OUTSIDE))
DEPLOY = KUBERNETES.parent
PROMTOOL_S = 120.0


def check_manifests() -> Iterator[str]:
    rendered: dict[str, list[Manifest]] = {part: render(KUBERNETES / part) for part in PARTS}
    for part, objects in rendered.items():
        for find in (find_invalid, find_misfits, find_contradictions):
            yield from (f"{part}: {line}" for line in find(objects))
    for servers, clusters, arrows in TOGETHER:
        objects = rendered[servers] + rendered[clusters]
        yield from (f"{servers}: {line}" for line in find_wrong_arrows(objects, expand_pods(objects), arrows))


def check_prometheus(directory: Path = DEPLOY / "prometheus") -> Iterator[str]:
    """Rules, their tests and the examples of configurations, by Prometheus' own tools."""
    if not directory.is_dir():
        return
    for tool, words, pattern in (
        ("promtool", ("check", "rules"), "*rules*.y*ml"),
        ("promtool", ("test", "rules"), "tests/*.y*ml"),
        ("promtool", ("check", "config"), "prometheus*.y*ml"),
        ("amtool", ("check-config",), "alertmanager*.y*ml"),
    ):
        for file in sorted(directory.glob(pattern)):
            yield from _run(tool, *words, file.relative_to(directory).as_posix(), directory=directory)


def _run(tool: str, *words: str, directory: Path) -> Iterator[str]:
    if shutil.which(tool) is None:
        yield f"{tool} is not here: apt install {'prometheus' if tool == 'promtool' else 'prometheus-alertmanager'}"
        return
    done = subprocess.run(
        [tool, *words], cwd=directory, capture_output=True, text=True, timeout=PROMTOOL_S, check=False
    )
    if done.returncode:
        yield f"{tool} {' '.join(words)}: {(done.stdout + done.stderr).strip()}"


def main() -> int:
    found = [*check_manifests(), *check_prometheus()]
    print("\n".join(found) if found else f"deploy: {', '.join(PARTS)} hold for Kubernetes {', '.join(VERSIONS)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
