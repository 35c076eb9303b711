"""Prometheus metrics: what a daemon knows, read anew at each scrape, so that nothing is counted twice or forgotten.

Tables say which number becomes which metric; those of the master are here, dips_shard_… and dips_agent_… stand beside
the slave and the agent. Labels are names of clusters and slaves, whose number is
bounded by the run; versions and reasons are never labels. Bytes and seconds, as the names' endings say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dips.errors import ConfigError
from dips.telemetry.refusal_metric import RefusalCollector

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric: its name, where its number stands (keys joined by dots), and what it means."""

    name: str
    path: str
    help: str
    counter: bool = False


RUN = (
    MetricRow("dips_term", "term", "Incarnations of the master so far."),
    MetricRow("dips_head_version", "head_version", "Outer steps of the head."),
    MetricRow("dips_head_round", "head_round", "The round that made the head."),
    MetricRow("dips_tokens_accepted", "progress.tokens", "Tokens in the head's lineage."),
    MetricRow("dips_tokens_target", "progress.tokens_target", "Tokens after which the run ends; 0 for none."),
    MetricRow("dips_uptime_seconds", "uptime_s", "Since this master started."),
    MetricRow(
        "dips_journal_writing", "journal.writing", "1 while the master writes its journal; 0: its disk fails it."
    ),
    MetricRow("dips_journal_written_bytes", "journal.bytes", "Written to the journal since the start.", counter=True),
    MetricRow("dips_journal_waiting", "journal.waiting", "Events that wait for the journal's disk."),
    MetricRow("dips_rounds_applied", "rounds.applied", "Rounds that made a version.", counter=True),
    MetricRow("dips_rounds_skipped", "rounds.skipped", "Rounds that broke.", counter=True),
    MetricRow("dips_rounds_unchanged", "rounds.unchanged", "Rounds whose contributions were all gated.", counter=True),
    MetricRow("dips_ranges_free", "ranges.free", "Data ranges that nobody holds."),
    MetricRow("dips_ranges_leased", "ranges.leased", "Data ranges leased to clusters."),
    MetricRow("dips_ranges_settled", "ranges.settled", "Data ranges trained or gated."),
    MetricRow(
        "dips_ranges_undone", "ranges.undone", "Data ranges trained by undone versions only, and not leased again."
    ),
    MetricRow("dips_head_durable", "durability.head", "1 if the head lies complete on every slave's disk."),
    MetricRow(
        "dips_durability_red", "durability.red", "1 if snapshots fail: versions are not durable, or the run stopped."
    ),
    MetricRow(
        "dips_ledger_mirror_red", "ledger_mirror.red", "1 if the ledger's mirror lags or fails; 0 if it keeps up."
    ),
    MetricRow(
        "dips_ledger_mirror_behind_transactions", "ledger_mirror.behind_transactions", "Lost with the master's disk."
    ),
    MetricRow("dips_ledger_mirror_behind_seconds", "ledger_mirror.behind_s", "Since the mirror kept up."),
    MetricRow("dips_versions_undone", "undone_total", "Versions that were rolled back."),
)
CLUSTER = (
    MetricRow("dips_cluster_incarnation", "inc", "Incarnations of the cluster so far."),
    MetricRow("dips_cluster_accepted", "accepted", "Contributions accepted.", counter=True),
    MetricRow("dips_cluster_gated", "gated", "Contributions gated.", counter=True),
    MetricRow("dips_cluster_skipped", "skipped", "Contributions whose round broke.", counter=True),
    MetricRow("dips_cluster_claims_refused", "claims_refused", "Pushes that claimed what cannot be.", counter=True),
    MetricRow("dips_cluster_tokens_accepted", "tokens_accepted", "Tokens accepted.", counter=True),
    MetricRow("dips_cluster_tokens_gated", "tokens_gated", "Tokens gated.", counter=True),
    MetricRow(
        "dips_cluster_tokens_undone", "tokens_undone", "Tokens accepted once, by versions that were rolled back."
    ),
    MetricRow("dips_cluster_tokens_lost", "tokens_lost", "Tokens lost with trainers and incarnations."),
    MetricRow("dips_cluster_tokens_carried", "tokens_carried", "Tokens consumed and not yet settled."),
    MetricRow("dips_cluster_staleness", "staleness", "Outer steps of the head since the cluster's base."),
    MetricRow("dips_cluster_norm", "norm", "Norm of its last accepted pseudo-gradient."),
    MetricRow("dips_cluster_score", "score", "The penalty's score of its last contribution."),
    MetricRow("dips_cluster_quarantined", "quarantined", "1 if it was gated too often in a row."),
    MetricRow("dips_cluster_inner_steps", "inner_steps", "Inner steps since its agent started."),
    MetricRow("dips_cluster_loss", "loss", "Loss of its last inner step."),
    MetricRow("dips_cluster_transfer_bytes", "bytes_moved", "Moved by the present or last push or pull."),
    MetricRow("dips_cluster_transfer_size_bytes", "bytes_total", "Size of the present or last push or pull."),
    MetricRow("dips_cluster_transfer_bytes_per_second", "bytes_per_s", "Its rate."),
    MetricRow("dips_cluster_heard_seconds", "heard_s", "Since its last heartbeat."),
)
SLAVE = (
    MetricRow("dips_slave_incarnation", "sinc", "Incarnations of the slave so far."),
    MetricRow("dips_slave_slots", "slots", "Pushes that may move at once."),
    MetricRow("dips_slave_slots_used", "slots_used", "Slots in use."),
    MetricRow("dips_slave_pool_bytes", "pool_used", "Memory pool in use."),
    MetricRow("dips_slave_pool_limit_bytes", "pool_limit", "The pool's written sum."),
    MetricRow("dips_slave_received_bytes", "bytes_in", "Received by the data flow since its start.", counter=True),
    MetricRow("dips_slave_sent_bytes", "bytes_out", "Sent by the data flow since its start.", counter=True),
    MetricRow("dips_slave_persist_seconds", "persist_s", "Its last snapshot took."),
    MetricRow("dips_slave_apply_seconds", "apply_s", "Its last outer step took."),
    MetricRow("dips_slave_mirror_behind_versions", "mirror.behind_versions", "Outer steps that its mirror lacks."),
    MetricRow("dips_slave_mirror_behind_seconds", "mirror.behind_s", "Since its mirror held the head."),
    MetricRow("dips_slave_mirror_failing", "mirror.failing", "1 while its mirror is full, gone or failing."),
    MetricRow("dips_slave_heard_seconds", "heard_s", "Since its last heartbeat."),
)
TRANSFER = (
    MetricRow("dips_transfer_bytes", "nbytes", "Of a push or pull at a slave, arrived so far."),
    MetricRow("dips_transfer_size_bytes", "total", "Of a push or pull at a slave, in all."),
)


def collect(status: Status) -> Iterator[Metric]:
    """Turn the master's status into metric families; numbers not reported yet are left out."""
    version, _, number = str(status.get("head", "")).partition("@r")
    flat = {**status, "head_version": _parse_whole(version.lstrip("v")), "head_round": _parse_whole(number)}
    yield from make_families(RUN, [((), flat)], ())
    for rows, section, label in ((CLUSTER, "clusters", "cluster"), (SLAVE, "slaves", "slave")):
        peers = status.get(section, {})
        yield from make_families(rows, [((name,), peer) for name, peer in peers.items()], (label,))
        yield _state_series(peers, label)
    moving = [
        ((slave, str(t["cluster"]), "push" if t["push"] else "pull"), t)
        for slave, peer in status.get("slaves", {}).items()
        for t in peer.get("transfers", ())
    ]
    yield from make_families(TRANSFER, moving, ("slave", "cluster", "direction"))


def serve_metrics(
    address: tuple[str, int], read: Callable[[], Status], collect: Callable[[Status], Iterable[Metric]] = collect
) -> tuple[int, Callable[[], None]]:
    """Answer scrapes at host, port (0 takes a free one) in threads that call `read`; return the port and what ends it.

    `collect` turns what was read into metrics; by default it is the master's status.

    Raise ConfigError if the port cannot be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reader(read, collect))
    registry.register(RefusalCollector())
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"metrics: cannot listen on {host}:{port}: {error.strerror}") from error

    def stop_server() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop_server


class _Reader(Collector):
    def __init__(self, read: Callable[[], Status], families: Callable[[Status], Iterable[Metric]]) -> None:
        self._read, self._families = read, families

    def collect(self) -> Iterable[Metric]:
        return self._families(self._read())


def make_families(
    rows: Iterable[MetricRow], peers: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]], labels: tuple[str, ...]
) -> Iterator[Metric]:
    for row in rows:
        kind = CounterMetricFamily if row.counter else GaugeMetricFamily
        family = kind(row.name, row.help, labels=labels)
        for values, numbers in peers:
            value = _value_at(numbers, row.path)
            if value is not None:
                family.add_metric(values, value)
        yield family


def _state_series(peers: Mapping[str, Any], label: str) -> Metric:
    """One series for each peer, whose state is a label: `sum by (state)` counts live, pushing, lost."""
    family = GaugeMetricFamily(f"dips_{label}_state", "1 for the present state.", labels=(label, "state"))
    for name, peer in peers.items():
        family.add_metric((name, str(peer.get("state", "unknown"))), 1.0)
    return family


def _value_at(numbers: Mapping[str, Any], path: str) -> float | None:
    value: Any = numbers
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _parse_whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
