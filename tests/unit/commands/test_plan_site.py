"""`dips plan site`: the site that loses the fewest tokens, beside the paper's; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.plan_site import TEMPLATE, describe_choice, plan_sites, read_inventory
from dips.errors import ConfigError

TWO = {  # servers at the first, accelerators at the second
    "parameters": 1_000_000,
    "sites": {"one": {"tokens_per_s": 1, "memory_gb": 100}, "two": {"tokens_per_s": 1, "memory_gb": 90}},
    "rates": {"one": {"one": 100, "two": 0.1}, "two": {"one": 10, "two": 10}},
}


def written(directory: Path, content: dict[str, Any]) -> Path:
    path = directory / "sites.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def changed(*keys: str, to: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(TWO))
    at = content
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = to
    return content


def test_a_fast_link_does_not_outweigh_a_slow_one(tmp_path: Path) -> None:
    """By hand: 8 MB each way. At one: 0.64 s and 640 s; at two: 6.4 s each. The paper's sums are 100.1 and 20."""
    inventory = read_inventory(written(tmp_path, TWO))
    plan = plan_sites(inventory)
    assert [site.site for site in plan.sites] == ["two", "one"] and plan.paper == "one"
    assert plan.best.lost_tokens == pytest.approx(2 * 2 * 32e6 / 10e6)
    assert plan.sites[1].lost_tokens == pytest.approx(2 * 32e6 / 100e6 + 2 * 32e6 / 0.1e6)
    assert [site.paper_score for site in plan.sites] == pytest.approx([20, 100.1])
    assert plan.best.clusters[0].inner_s == pytest.approx(19 * 6.4)
    said = describe_choice(inventory, plan)
    assert "servers at two" in said and "the paper's rule takes one" in said and "50.05 times" in said


def test_what_leaves_a_site_is_paid_there(tmp_path: Path) -> None:
    """Pushes by the cluster's site, pulls by the servers'; what stays is free."""
    content = changed("sites", "one", "price_per_gb", to=1000.0)
    by_site = {site.site: site.price for site in plan_sites(read_inventory(written(tmp_path, content))).sites}
    assert by_site == pytest.approx({"one": 1000 * 0.004, "two": 1000 * 0.004})
    content["pull_codec"] = "int8"
    by_site = {site.site: site.price for site in plan_sites(read_inventory(written(tmp_path, content))).sites}
    assert by_site["two"] == pytest.approx(4.0) and by_site["one"] < 1.1


def test_rates_are_read_from_iperf(tmp_path: Path) -> None:
    """Both ways with --bidir; what is not its output is named by key and file."""
    end = {"sum_received": {"bits_per_second": 5e6}, "sum_received_bidir_reverse": {"bits_per_second": 2e6}}
    (tmp_path / "a.json").write_text(json.dumps({"end": end}))
    content = changed("rates", "one", "two", to="a.json")
    inventory = read_inventory(written(tmp_path, content))
    rate: Any = inventory.rates["one"]["two"]
    assert (rate.up, rate.down) == (5.0, 2.0)
    scores = {site.site: site.paper_score for site in plan_sites(inventory).sites}
    assert scores["one"] == 100 + 2, "the slower way counts"
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"rates\.one\.two: .*a\.json: expected what `iperf3 -J` prints"):
        read_inventory(written(tmp_path, content))
    with pytest.raises(ConfigError, match=r"rates\.one\.two: .*none\.json: cannot be read"):
        read_inventory(written(tmp_path, changed("rates", "one", "two", to="none.json")))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("rates", "one"), {"one": 100}, r"rates\.one\.two: missing"),
        (("rates", "one", "two"), 0, r"rates.*greater than 0"),
        (("rates", "one", "two"), -3, r"rates.*greater than 0"),
        (("rates", "one", "two"), {"up": 3}, r"rates.*down"),
        (("rates", "one", "three"), 5, r"rates: three is none of `sites`"),
        (("slaves",), 3, ""),
        (("layers",), 1, r"slaves: expected at most 1"),
        (("layers",), 2, ""),
        (("sites", "one", "tokens"), 3, r"unknown key"),
        (("sites",), {"one": {"memory_gb": 100}}, r"no site has tokens_per_s"),
        (("sites",), {"one": {"tokens_per_s": 1}}, r"no site has memory_gb"),
        (("parameters",), 10**14, r"expected [\d,.]+ GB of memory at one site.* got at most 100\.0 GB"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path: Path, keys: tuple[str, ...], value: Any, message: str) -> None:
    path = written(tmp_path, changed(*keys, to=value))
    if not message:
        plan_sites(read_inventory(path))
        return
    with pytest.raises(ConfigError, match=message):
        plan_sites(read_inventory(path))


def test_a_site_without_the_memory_is_told_and_not_taken(tmp_path: Path) -> None:
    content = changed("sites", "two", "memory_gb", to=0.001)
    plan = plan_sites(read_inventory(written(tmp_path, content)))
    assert [(site.site, site.fits) for site in plan.sites] == [("one", True), ("two", False)]
    content["sites"]["two"]["memory_gb"] = sum(slave.memory_bytes for slave in plan.slaves) / 1e9
    assert all(site.fits for site in plan_sites(read_inventory(written(tmp_path, content))).sites), "just enough"


def test_the_template_is_an_inventory(tmp_path: Path) -> None:
    """As it stands: it named a file of iperf3 that nobody had, and the example of the help ended with 78."""
    (tmp_path / "sites.yaml").write_text(TEMPLATE)
    plan = plan_sites(read_inventory(tmp_path / "sites.yaml"))
    (tmp_path / "paris-oslo.json").write_text(json.dumps({"end": {"sum_received": {"bits_per_second": 9e8}}}))
    (tmp_path / "sites.yaml").write_text(TEMPLATE.replace("paris: 900", "paris: paris-oslo.json"))
    assert plan_sites(read_inventory(tmp_path / "sites.yaml")) == plan and plan.best.site == "berlin"


def test_the_command_shows_all_sites(tmp_path: Path) -> None:
    """A row for each, the best first, with its longest wait; then the choice in sentences. The template is printed."""
    content = changed("sites", "three", to={"memory_gb": 0.001})
    content["rates"]["three"] = {"one": 1, "two": 1}
    done = CliRunner().invoke(cli, ["plan", "site", str(written(tmp_path, content))], env={"COLUMNS": "120"})
    assert done.exit_code == 0, repr(done.exception)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines()]
    assert [row for row in rows if len(row) > 1] == [
        ["two", "13", "0.00", "20", "6.4 s, one"],
        ["one", "641", "0.00", "100", "640.0 s, two"],
        ["three (too little memory)", "128", "0.00", "2", "64.0 s, one"],
    ]
    assert "tokens lost in a round" in done.stdout and "longest wait" in done.stdout
    assert "servers at two: a round costs 13 tokens; at one, the next best, 4905% more" in done.stdout
    assert CliRunner().invoke(cli, ["plan", "site"]).exit_code == 2
    assert CliRunner().invoke(cli, ["plan", "site", "--template"]).stdout == TEMPLATE
