"""The run file, `dips.yaml`: read by master and slaves; `dips init` makes the run from it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from dips.config.master import MasterSection
from dips.config.reading import check_names, check_transport, load_file
from dips.config.section import HttpTokenKey, LogLevel, TlsKey
from dips.config.shared import Shared
from dips.config.slave import SlaveSection
from dips.errors import ConfigError
from dips.protocol.options import Options, TimingOptions


class RunFile(HttpTokenKey, TlsKey):
    """A run file, `dips.yaml`: one run, its master and its slaves."""

    shared: Shared
    master: MasterSection
    slaves: tuple[SlaveSection, ...] = Field(min_length=1)
    clusters: tuple[str, ...] | None = None  # that may join; null: all with a certificate of the run
    log_level: LogLevel = "info"  # of master and slaves; may change while they run; --log-level overrides it

    @model_validator(mode="after")
    def _require_bounds(self) -> RunFile:
        self.timing_options()
        return self

    def make_options(self) -> Options:
        """Return the Coordinator's options."""
        s, m = self.shared, self.master
        return Options(
            s.outer, s.penalty.make_options(), s.stop, s.data, self.timing_options(),
            codec=s.codec, durability=m.durability, on_persist_failure=m.on_persist_failure, requeue=m.requeue,
            keep_every=m.keep_every, keep_most=m.keep_most, most_rollback=m.most_rollback,
        )  # fmt: skip

    def timing_options(self) -> TimingOptions:
        """Return the master's deadlines and leases."""
        return self.master.timing.make_options(self.shared.heartbeat_s)

    def slave_section(self, name: str) -> SlaveSection:
        """Return one slave's section. Raises ConfigError naming those that exist."""
        for section in self.slaves:
            if section.name == name:
                return section
        raise ConfigError(f"no slave {name!r} in this run file; it names {', '.join(s.name for s in self.slaves)}")


def load_run(path: Path) -> RunFile:
    """Read a run file. Raises ConfigError naming file and key."""
    config = load_file(path, RunFile)
    check_names(path, [(config.shared.run, "run"), *((s.name, "slave") for s in config.slaves)])
    if config.http_token is not None and not any(section.http for section in (config.master, *config.slaves)):
        raise ConfigError(f"{path}: http_token: nothing is served without `http: HOST:PORT`")
    names = [s.name for s in config.slaves]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: slaves: the name {name!r} stands {names.count(name)} times, expected once")
    control = [("master.listen", config.master.listen)]
    control += [("master.http", config.master.http)] if config.master.http else []
    for s in config.slaves:
        control += [
            (f"slaves.{s.name}.{key}", address) for key, address in (("master", s.master), ("listen", s.listen))
        ]
        named = s.lanes if isinstance(s.lanes, tuple) else ()
        lanes = [("lanes", lane) for lane in named] or [("listen", s.listen)]
        lanes += [("advertise", address) for address in s.reached_at(["x:0"])] if s.advertise else []
        control += [(f"slaves.{s.name}.{key}", address) for key, address in lanes]
        control += [(f"slaves.{s.name}.http", s.http)] if s.http else []
    check_names(path, [(name, "cluster") for name in config.clusters or ()])
    check_transport(path, bool(config.tls), control)
    return config
