"""Every daemon's metrics, scraped for real from a run: they parse, promtool has nothing to say, and the numbers fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.integration import cluster_harness as harness
from tests.integration import train_constant as script
from tests.metric_names import kinds_of

HERE = Path(__file__).parent
RUN = ("run", "test")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> tuple[str, Samples]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert all(RUN in s.labels.items() for s in samples), "a sample without its run"
    return text, {(s.name, tuple(sorted(item for item in s.labels.items() if item != RUN))): s.value for s in samples}


def held_by_promtool(text: str) -> None:
    """Names, types and help as Prometheus wants them."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here (Debian: prometheus): the names were not held against it")
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(240)
def test_every_daemon_is_scraped_while_a_run_goes_on(tmp_path: Path) -> None:
    """One cluster behind a relay, two slaves: bytes, seconds and tokens of the three kinds of daemons agree, and each
    registers the names that docs/guides/metrics.md lists for it, no more and no fewer."""
    tensors = script.tensors()
    nbytes = 4 * sum(t.size for t in tensors.values())
    ports = {name: harness.free_port() for name in ("master", "ps0", "ps1", "slow")}
    with harness.Run(tmp_path, tensors, shared={"penalty": {"gates": []}}) as run:
        content = yaml.safe_load(run.file.read_text())
        for section in (content["master"], *content["slaves"]):
            section["http"] = f"127.0.0.1:{ports[section.get('name', 'master')]}"
        run.file.write_text(yaml.safe_dump(content))
        run.start_servers()
        command = [sys.executable, str(HERE / "train_constant.py"), "slow", "24", "1", str(tmp_path / "slow.out")]
        run.start_cluster("slow", command, steps=1, relay="127.0.0.1", http=f"127.0.0.1:{ports['slow']}")

        def pushes() -> float:
            try:
                scraped = scrape(ports["slow"])[1]
            except OSError:
                return 0.0
            return scraped.get(("dips_agent_moved_bytes_total", (("direction", "push"),)), 0.0) / nbytes

        run.until(lambda: pushes() >= 5, 120, "five pushes of the cluster")
        texts, scraped = {}, {}
        for name in ("slow", "ps0", "ps1", "master"):  # later ones can only know more
            texts[name], scraped[name] = scrape(ports[name])

    agent = scraped["slow"]
    assert agent["dips_agent_tokens_total", ()] >= 5 * 24
    waits = {cause: agent["dips_agent_wait_seconds_count", (("cause", cause),)] for cause in ("push", "update", "pull")}
    assert min(waits.values()) >= 4
    assert agent["dips_agent_inner_steps_total", ()] * 24 == agent["dips_agent_tokens_total", ()]
    assert agent["dips_agent_devices", ()] == 1
    spent = {dict(labels)["cause"]: v for (name, labels), v in agent.items() if name == "dips_agent_seconds_total"}
    assert spent["push"] > 0 and spent["window"] > 0 and spent["update"] > 0 and spent["pull"] > 0
    assert spent["failure"] == spent["ended"] == 0
    link = {
        way: sum(
            scraped[ps]["dips_shard_link_bytes_total", (("cluster", "slow"), ("direction", way))] for ps in run.slaves
        )
        for way in ("in", "out")
    }
    for way, direction in (("in", "push"), ("out", "pull")):
        assert link[way] >= agent["dips_agent_moved_bytes_total", (("direction", direction),)]
    moved = sum(v for (name, _), v in agent.items() if name == "dips_agent_moved_bytes_total")
    assert agent["dips_agent_relayed_bytes_total", ()] >= moved, "the ranks went past the relay"
    for slave in run.slaves:
        shard = scraped[slave]
        assert 0 < shard["dips_shard_pool_bytes", ()] <= shard["dips_shard_pool_limit_bytes", ()]
        assert shard["dips_shard_order_seconds_count", (("order", "persist"),)] >= 4
        assert shard["dips_shard_order_seconds_sum", (("order", "persist"),)] > 0
        assert shard["dips_shard_snapshots", ()] >= 1 and shard["dips_shard_snapshot_bytes", ()] > 0
    master = scraped["master"]
    assert master["dips_cluster_accepted_total", (("cluster", "slow"),)] >= 4
    assert all(master["dips_clusters", (("standing", s),)] == 1 for s in ("live", "participating", "contributing"))
    assert time.time() - 120 < master["dips_head_timestamp_seconds", ()] == master["dips_durable_timestamp_seconds", ()]
    assert master["dips_push_seconds_count", ()] >= 4
    assert all(master["dips_round_phase_seconds_count", (("phase", p),)] >= 4 for p in ("window", "apply", "persist"))
    for name, role in (("master", "master"), ("ps0", "slave"), ("ps1", "slave"), ("slow", "agent")):
        assert dict(re.findall(r"^# TYPE (\S+) (\w+)$", texts[name], re.MULTILINE)) == kinds_of("process", role)
        assert scraped[name]["dips_ready", ()] == 1
        assert scraped[name]["process_resident_memory_bytes", ()] > 1 << 20
        assert scraped[name]["process_open_fds", ()] > 3
        assert scraped[name]["dips_disk_free_bytes", (("directory", "directory"),)] > 0
        assert scraped[name]["dips_loop_lag_seconds_count", ()] > 0
        held_by_promtool(texts[name])
