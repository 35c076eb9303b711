"""The command `dips plan site`: at which site the servers cost the run the fewest tokens, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table

from dips.codecs import Codec
from dips.commands.options import AS_JSON
from dips.commands.planning import (
    KEEP_SNAPSHOTS,
    PlannedSlave,
    default_section,
    plan_cluster,
    plan_slave,
    share_equally,
)
from dips.config.reading import load_file
from dips.config.section import PullCodec, Section
from dips.errors import ConfigError

MOST_WAIT = 0.05  # of a cluster's time, in transfers: what `inner_s` is proposed for
GB, MBIT_BYTES = 1e9, 1.25e5
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TEMPLATE = """\
# What `dips plan site` reads. Rates are in Mbit/s between servers at the first site and accelerators at the second.
parameters: 7000000000
layers: 34                  # slaves hold whole layers, so there are at most as many slaves
slaves: 2
codec: bf16                 # of pushes
pull_codec: bf16
sites:
  berlin: {tokens_per_s: 250000, step_s: 4.2, memory_gb: 512, price_per_gb: 0.05}
  oslo:   {tokens_per_s: 90000,  step_s: 5.0, memory_gb: 256, price_per_gb: 0.02}
  paris:  {tokens_per_s: 120000, step_s: 4.0}          # no memory_gb: no servers there
rates:
  berlin: {berlin: 20000, oslo: 800, paris: {up: 2000, down: 1000}}
  oslo:   {berlin: 700, oslo: 10000, paris: 900}       # or paris: paris-oslo.json, what iperf3 -J has measured
"""


# ---- the inventory --------------------------------------------------------------------------------------------------


class InventorySite(Section):
    """A place with accelerators, with machines for servers, or with both."""

    tokens_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of its cluster; 0: no accelerators
    step_s: Positive | None = None  # of an inner step there; null: `inner_s` is not told in steps
    memory_gb: Positive | None = None  # of all machines for servers; null: none
    price_per_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of what leaves the site, in any currency


class SiteRate(Section):
    """Mbit/s between servers at one site and accelerators at another; a number stands for both ways."""

    up: Positive  # pushes, to the servers
    down: Positive  # pulls

    @model_validator(mode="before")
    @classmethod
    def _take_number(cls, value: Any) -> Any:
        return {"up": value, "down": value} if isinstance(value, int | float) else value


class Inventory(Section):
    """The sites of a run that is planned."""

    parameters: Annotated[int, Field(gt=0)]
    layers: Annotated[int, Field(gt=0)] | None = None  # of the model; null: enough for any number of slaves
    slaves: Annotated[int, Field(gt=0)] = 2
    codec: Codec = Codec.FP32
    pull_codec: PullCodec = Codec.FP32
    sites: Annotated[dict[str, InventorySite], Field(min_length=1)]
    rates: dict[str, dict[str, SiteRate | Path]]  # servers' site → accelerators' site → rate, or iperf3's file

    @model_validator(mode="after")
    def _check(self) -> Inventory:
        if self.layers is not None and self.slaves > self.layers:
            raise ValueError(f"slaves: expected at most {self.layers}, one for each of `layers`, got {self.slaves}")
        if not self.clusters:
            raise ValueError("sites: no site has tokens_per_s: who trains?")
        if not self.candidates:
            raise ValueError("sites: no site has memory_gb: where may servers stand?")
        named = {*self.rates, *(name for row in self.rates.values() for name in row)}
        if unknown := sorted(named - self.sites.keys()):
            raise ValueError(f"rates: {unknown[0]} is none of `sites`, which are {', '.join(self.sites)}")
        for servers in self.candidates:
            for cluster in self.clusters:
                if cluster not in self.rates.get(servers, {}):
                    raise ValueError(
                        f"rates.{servers}.{cluster}: missing: expected Mbit/s between servers at {servers} and "
                        f"accelerators at {cluster}, or {{up: …, down: …}}"
                    )
        return self

    @property
    def clusters(self) -> list[str]:
        return [name for name, site in self.sites.items() if site.tokens_per_s > 0]

    @property
    def candidates(self) -> list[str]:
        """The sites at which servers may stand."""
        return [name for name, site in self.sites.items() if site.memory_gb is not None]


def read_inventory(path: Path) -> Inventory:
    """Return an inventory with all rates as numbers. Raises ConfigError naming the key."""
    inventory = load_file(path, Inventory)
    rates = {
        servers: {
            cluster: _read_iperf(path.parent / rate, f"{path}: rates.{servers}.{cluster}")
            if isinstance(rate, Path)
            else rate
            for cluster, rate in row.items()
        }
        for servers, row in inventory.rates.items()
    }
    return inventory.model_copy(update={"rates": rates})


def _read_iperf(path: Path, key: str) -> SiteRate:
    """Return what `iperf3 -J` measured from the accelerators (its client), by --bidir both ways, else one for both."""
    try:
        end = json.loads(path.read_text(encoding="utf-8"))["end"]
        there = end["sum_received"]
        back = end.get("sum_received_bidir_reverse", there)
        return SiteRate(up=there["bits_per_second"] / 1e6, down=back["bits_per_second"] / 1e6)
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{key}: {path}: expected what `iperf3 -J` prints after a whole test, got {error!r}"
        ) from error


# ---- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterWait:
    """A cluster's transfers in one round, with its servers at a given site."""

    cluster: str
    push_s: float
    pull_s: float
    inner_s: float  # between two pushes, so that transfers take at most MOST_WAIT of its time
    inner_steps: int | None

    @property
    def wait_s(self) -> float:
        return self.push_s + self.pull_s


@dataclass(frozen=True, slots=True)
class SiteChoice:
    """A site for the servers, and what a round costs then."""

    site: str
    lost_tokens: float  # while accelerators wait for transfers, without overlap
    paper_score: float  # Σ_j B_ij·p_j, of which the paper takes the largest; B: the smaller of both rates
    price: float  # of the bytes that leave a site
    clusters: tuple[ClusterWait, ...]
    fits: bool  # its memory holds all slaves


@dataclass(frozen=True, slots=True)
class SitePlan:
    """All sites at which servers may stand, the best first, and what each slave needs."""

    sites: tuple[SiteChoice, ...]
    slaves: tuple[PlannedSlave, ...]
    paper: str  # the site that the paper's rule takes

    @property
    def best(self) -> SiteChoice:
        return self.sites[0]


def plan_sites(inventory: Inventory) -> SitePlan:
    """Order the sites by the tokens that are lost in a round: argmin_i Σ_j p_j·(push/up_ij + pull/down_ij).

    The paper (Di-PS, §3.1) takes argmax_i Σ_j B_ij·p_j, by which one fast link outweighs a slow one; both are told.

    Raise ConfigError if no site has the memory for the slaves.
    """
    shares = share_equally(inventory.parameters, inventory.slaves)
    slaves = tuple(
        plan_slave(default_section(f"slave-{i}"), 0, numel, inventory.pull_codec, KEEP_SNAPSHOTS)
        for i, numel in enumerate(shares)
    )
    needed = sum(slave.memory_bytes for slave in slaves)
    sites = [_plan_site(inventory, name, needed) for name in inventory.candidates]
    fitting = [site for site in sites if site.fits]
    if not fitting:
        most = max(inventory.sites[name].memory_gb or 0 for name in inventory.candidates)
        raise ConfigError(
            f"sites: expected {needed / GB:,.1f} GB of memory at one site, for {inventory.slaves} slaves, got at most "
            f"{most:,.1f} GB: add machines, or set pull_codec to fp32, which keeps no further copy"
        )
    ordered = sorted(sites, key=lambda site: (not site.fits, site.lost_tokens, site.price))
    return SitePlan(tuple(ordered), slaves, max(fitting, key=lambda site: site.paper_score).site)


def _plan_site(inventory: Inventory, servers: str, needed_bytes: int) -> SiteChoice:
    traffic = plan_cluster(inventory.parameters, 1, inventory.codec, inventory.pull_codec)
    waits, lost, score, price = list[ClusterWait](), 0.0, 0.0, 0.0
    for name in inventory.clusters:
        site, rate = inventory.sites[name], inventory.rates[servers][name]
        assert isinstance(rate, SiteRate)
        push_s = traffic.push_bytes / (rate.up * MBIT_BYTES)
        pull_s = traffic.pull_bytes / (rate.down * MBIT_BYTES)
        inner_s = (push_s + pull_s) * (1 - MOST_WAIT) / MOST_WAIT
        waits.append(ClusterWait(name, push_s, pull_s, inner_s, ceil(inner_s / site.step_s) if site.step_s else None))
        lost += site.tokens_per_s * (push_s + pull_s)
        score += min(rate.up, rate.down) * site.tokens_per_s
        if name != servers:
            price += traffic.push_bytes / GB * site.price_per_gb
            price += traffic.pull_bytes / GB * inventory.sites[servers].price_per_gb
    memory_gb = inventory.sites[servers].memory_gb
    assert memory_gb is not None
    return SiteChoice(servers, lost, score, price, tuple(waits), needed_bytes <= memory_gb * GB)


# ---- the command ----------------------------------------------------------------------------------------------------


def site_command(
    inventory: Annotated[Path | None, typer.Argument(metavar="SITES.yaml", help="Sites, rates and the model.")] = None,
    template: Annotated[bool, typer.Option("--template", help="Print an inventory to begin with.")] = False,
    as_json: AS_JSON = False,
) -> None:
    """Compute where the servers of a run should stand.

    For each site with memory for the servers: the tokens that accelerators lose in a round while they wait for their
    transfers (none of them with `overlap: full`, as long as transfers are shorter than a round). The best is named with
    what the next one loses, and the choice of the paper's rule beside it. For each cluster: how long it should train
    between pushes so that transfers take 5 % of its time.

    Links are taken to be each cluster's own: clusters that share one wait longer.

    Exit codes: 0 done; 2 no inventory named; 78 it is not usable, or the slaves fit at no site.

    \b
    Example:
      dips plan site --template > sites.yaml
      dips plan site sites.yaml
    """
    if template:
        print(TEMPLATE, end="")
        return
    if inventory is None:
        raise typer.BadParameter("which sites? name their file, or print one with --template", param_hint="SITES.yaml")
    read = read_inventory(inventory)
    plan = plan_sites(read)
    if as_json:
        print(json.dumps(asdict(plan)))
        return
    Console().print(_draw_sites(plan))
    print(describe_choice(read, plan))


def _draw_sites(plan: SitePlan) -> Table:
    table = Table(title="servers at", title_justify="left", title_style="bold")
    for column in ("", "tokens lost in a round", "price of a round", "the paper's score", "longest wait"):
        table.add_column(column, justify="left" if not column else "right")
    for site in plan.sites:
        longest = max(site.clusters, key=lambda cluster: cluster.wait_s)
        table.add_row(
            site.site if site.fits else f"{site.site} (too little memory)", f"{site.lost_tokens:,.0f}",
            f"{site.price:,.2f}", f"{site.paper_score:,.0f}", f"{longest.wait_s:,.1f} s, {longest.cluster}",
        )  # fmt: skip
    return table


def describe_choice(inventory: Inventory, plan: SitePlan) -> str:
    """Return the choice in sentences: why, what the next best loses, what each slave and cluster needs."""
    best, rest = plan.best, [site for site in plan.sites[1:] if site.fits]
    lines = [f"servers at {best.site}: a round costs {best.lost_tokens:,.0f} tokens"]
    if rest:
        more = rest[0].lost_tokens / best.lost_tokens - 1
        lines[0] += f"; at {rest[0].site}, the next best, {more:.0%} more"
    if plan.paper != best.site:
        paper = next(site for site in plan.sites if site.site == plan.paper)
        lines.append(
            f"the paper's rule takes {plan.paper}, where it costs {paper.lost_tokens / best.lost_tokens:.2f} times as "
            "many: a fast link there outweighs a slow one in its sum"
        )
    heaviest = max(plan.slaves, key=lambda slave: slave.memory_bytes)
    lines.append(f"{len(plan.slaves)} slaves of at most {heaviest.memory_bytes / GB:,.1f} GB: {heaviest.said}")
    for cluster in best.clusters:
        steps = f", {cluster.inner_steps:,} steps" if cluster.inner_steps is not None else ""
        lines.append(
            f"{cluster.cluster}: pushes for {cluster.push_s:,.1f} s and pulls for {cluster.pull_s:,.1f} s; train "
            f"{cluster.inner_s:,.0f} s between pushes{steps}, so that this is 5 % of its time"
        )
    spread = max(c.push_s for c in best.clusters) - min(c.push_s for c in best.clusters)
    lines.append(f"pushes that begin together end within {spread:,.1f} s: the window that lets all of them meet")
    smaller = inventory.model_copy(update={"codec": Codec.INT8, "pull_codec": Codec.INT8})
    if (inventory.codec, inventory.pull_codec) != (Codec.INT8, Codec.INT8):
        share = _plan_site(smaller, best.site, 0).lost_tokens / best.lost_tokens
        lines.append(f"with codec and pull_codec int8 a round would cost {share:.0%} of that (docs/guides/codecs.md)")
    return "\n".join(lines)
