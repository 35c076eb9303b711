"""One set of names: what daemons register, the guide lists, and alerts and dashboard ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.expressions import ALERTMANAGER, ALERTS, SCRAPE, STORIES, list_alerts, list_panels, names_in
from tests.metric_names import GUIDE, ROLES, series_of, table_of, with_tables

RUNBOOK = GUIDE.with_stem("runbook")
NAMES = [rule["alert"] for rule in list_alerts()]


def test_the_guide_lists_what_the_code_has() -> None:
    """Name, type, unit, labels and meaning: `python -m tests.metric_names --write` writes them anew."""
    assert GUIDE.read_text() == with_tables(GUIDE.read_text())
    listed = re.findall(r"^\| `(dips_[a-z_]+)` \|", GUIDE.read_text(), re.MULTILINE)
    rows = [row for role in ROLES for row in table_of(role)][2:]
    assert len(listed) == len(set(listed)) == len([row for row in rows if row.startswith("| `dips_")])


@pytest.mark.parametrize("rule", list_alerts(), ids=NAMES)
def test_an_alert_asks_for_what_there_is(rule: dict[str, object]) -> None:
    unknown = names_in(str(rule["expr"])) - series_of(*ROLES)
    assert not unknown


def test_the_dashboard_asks_for_what_there_is() -> None:
    asked = {name for _, expression in list_panels() for name in names_in(expression)}
    assert len(asked) > 50
    assert not asked - series_of(*ROLES)


def test_each_alert_has_one_entry_of_the_runbook() -> None:
    """And each entry an alert; it says what is seen, what it means, what to do, when it is over."""
    entries = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^##|\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL))
    assert sorted(entries) == sorted(NAMES) and len(set(NAMES)) == len(NAMES)
    for rule in list_alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/guides/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "warn")
        told = re.findall(r"^\* \*\*(\w+)\*\*", entries[rule["alert"]], re.MULTILINE)
        assert told == ["See", "Means", "Do", "Over"], rule["alert"]


def test_each_alert_has_a_story() -> None:
    """In which it fires, and clears."""
    told = {
        (story["alertname"], bool(story.get("exp_alerts")))
        for test in yaml.safe_load(STORIES.read_text())["tests"]
        for story in test["alert_rule_test"]
    }
    assert told == {(name, fires) for name in NAMES for fires in (True, False)}


def test_inhibitions_name_alerts() -> None:
    named = set(re.findall(r"Dips\w+", ALERTMANAGER.read_text()))
    assert len(named) > 5 and named <= set(NAMES)


@pytest.mark.parametrize(
    "command",
    [
        ["promtool", "check", "rules", str(ALERTS)],
        ["promtool", "check", "config", "--syntax-only", str(SCRAPE)],
        ["amtool", "check-config", str(ALERTMANAGER)],
    ],
    ids=lambda command: Path(command[-1]).name,
)
def test_their_own_tools_have_nothing_to_say(command: list[str]) -> None:
    ask_tool(*command)


def test_stories_are_told_as_the_rules_have_them(tmp_path: Path) -> None:
    """As `promtool test rules` of the file, which would evaluate every rule in every minute of every story: each story
    has the rules of its alerts alone.
    """
    groups, stories = yaml.safe_load(ALERTS.read_text())["groups"], yaml.safe_load(STORIES.read_text())
    files = []
    for at, story in enumerate(stories["tests"]):
        asked = {test["alertname"] for test in story["alert_rule_test"]}
        rules, test = tmp_path / f"{at}.yaml", tmp_path / f"{at}.test.yaml"
        own = [{**group, "rules": [rule for rule in group["rules"] if rule["alert"] in asked]} for group in groups]
        rules.write_text(json.dumps({"groups": own}))
        test.write_text(json.dumps({**stories, "rule_files": [rules.name], "tests": [story]}))
        files.append(str(test))
    ask_tool("promtool", "test", "rules", *files)


def ask_tool(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here (Debian: prometheus, prometheus-alertmanager): not checked")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
