"""The expressions of alerts and dashboard, and the names in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
STORIES = DEPLOY / "prometheus" / "alerts.test.yaml"
SCRAPE = DEPLOY / "prometheus" / "scrape.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
ALERTMANAGER = DEPLOY / "alertmanager" / "alertmanager.yaml"


def list_alerts() -> list[dict[str, Any]]:
    """Every rule of the alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def list_panels() -> Iterator[tuple[str, str]]:
    """Title and expression of everything that the dashboard asks."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def names_in(expression: str) -> set[str]:
    """The metrics of ours that it asks for."""
    return set(re.findall(r"\b(?:dips|process)_[a-z_]+\b", expression))
