"""`dips_refusals_total`: what a daemon has refused, by reason; the same metric in all of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dips.telemetry.refusals import refusals_by_reason


class RefusalCollector(Collector):
    """Reads the process's one count at each scrape."""

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "dips_refusals", "Refused since the start: calls, connections, frames.", labels=("reason",)
        )
        for reason, count in sorted(refusals_by_reason().items()):
            family.add_metric((reason,), count)
        yield family
