"""A real Prometheus beside a test, with the rules of deploy/prometheus in a hurry."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.expressions import ALERTS, SCRAPE
from tests.integration.cluster_harness import free_port

EVERY_S = 1  # scrapes and evaluations
WINDOW_S = 20  # what ranges of minutes and hours become


def hurried_rules(thresholds: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The alerts as they are, but without patience: `for` is nothing, ranges are short, some thresholds are near."""
    rules: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["for"] = "0s"
            expression = re.sub(r"\[\d+[mhd]\]", f"[{WINDOW_S}s]", rule["expr"])
            if rule["alert"] in thresholds:
                usual, near = thresholds[rule["alert"]]
                assert usual in expression, rule
                expression = expression.replace(usual, near)
            rule["expr"] = expression
    return rules


def scrape_config(words: Mapping[str, str]) -> dict[str, Any]:
    """The example as an operator edits it: each of `words` becomes another."""
    text = SCRAPE.read_text()
    for usual, ours in words.items():
        assert usual in text, usual
        text = text.replace(usual, ours)
    config: dict[str, Any] = yaml.safe_load(text)
    config["global"].update(scrape_interval=f"{EVERY_S}s", evaluation_interval=f"{EVERY_S}s")
    del config["alerting"]
    return config


class Prometheus:
    """One process; `firing` is every alert that fires now, `fired` every one that has."""

    def __init__(self, directory: Path, config: Mapping[str, Any], rules: Mapping[str, Any]) -> None:
        directory.mkdir()
        self.fired: set[str] = set()
        self._address = f"127.0.0.1:{free_port()}"
        (directory / "alerts.yaml").write_text(yaml.safe_dump(dict(rules)))
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(dict(config)))
        self.log = directory / "prometheus.log"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data",
                    f"--web.listen-address={self._address}",
                ],
                cwd=directory, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def __enter__(self) -> Prometheus:
        end = time.monotonic() + 30
        while True:
            assert self._process.poll() is None, self.log.read_text()
            try:
                self.query("vector(1)")
                return self
            except OSError:
                assert time.monotonic() < end, self.log.read_text()
                time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(20)

    def query(self, expression: str) -> list[Any]:
        """The vector that an expression has now; an error of Prometheus fails the test."""
        expression = expression.replace("$__rate_interval", f"{WINDOW_S}s").replace("$run", ".*")
        answer = self._ask("query", {"query": expression})
        assert answer["status"] == "success", answer
        result: list[Any] = answer["data"]["result"]
        return result

    def firing(self) -> set[str]:
        now = {a["labels"]["alertname"] for a in self._ask("alerts", {})["data"]["alerts"] if a["state"] == "firing"}
        self.fired |= now
        return now

    def targets(self) -> dict[str, str]:
        """Health by job and address, with what is wrong."""
        found = self._ask("targets", {})["data"]["activeTargets"]
        return {f"{t['labels']['job']} {t['scrapeUrl']}": f"{t['health']} {t['lastError']}".strip() for t in found}

    def _ask(self, what: str, words: Mapping[str, str]) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(dict(words))}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it reads its storage still, and says so in plain words
                raise
            return json.load(error)
