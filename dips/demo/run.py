"""The course of `dips demo`: starts all processes, shows the training, kills two in the middle, evaluates the model."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dips.commands.options import find_master, open_ledger
from dips.commands.plot import plot_run
from dips.config import load_run
from dips.demo import data, layout, plots, train
from dips.demo.evaluate import Losses, evaluate_losses, validation_sample
from dips.demo.layout import SLAVES, DemoLayout
from dips.demo.model import build
from dips.ids import GENESIS, VersionId
from dips.local import run as local
from dips.local.run import LocalProcesses, ProcessEnded, exit_on_sigterm
from dips.protocol.enums import SlaveCause, SlaveState
from dips.protocol.view import RunView
from dips.store.version import MANIFEST_FILE
from dips.telemetry import timeline
from dips.transport.endpoints import Endpoint
from dips.view import terminal
from dips.view.points import RoundHistory

RANKS = {"fast": 2, "slow": 1}
SLOWDOWN = {"fast": 1.0, "slow": 3.0}  # on two cores; fast's ranks share them and exchange shards, too
KILLED_CLUSTER, KILLED_SLAVE = "slow", "slave-1"
KILL_AT = 0.45  # share of the time or of the tokens, whichever comes first; the slave is killed a little later
BETWEEN_KILLS_S = 5.0
LOOK_EVERY_S = 1.0
START_S = 60.0  # timeout for the master's first answer
END_S = 60.0  # time for the run to finish after its end
CALIBRATION_STEPS = 6
EXPECTED_SHARE = 0.75  # of the speed on idle cores, so that the schedule comes near its end in time
SAME = 5e-5  # nats: losses of the same model, rounded to 4 decimals


@dataclass(frozen=True, slots=True)
class Kill:
    """The demo killed KILLED_CLUSTER and KILLED_SLAVE."""

    head: VersionId  # when the slave was killed
    left: ModelLeft | None = None  # directories were removed, too


def run_demo(
    *,
    seconds: float,
    kill: bool,
    out: Path | None,
    seed: int,
    way: Way = "kept",
    secure: bool = False,
    preset: Path | None = None,
) -> int:
    """Run the whole demo; return 1 if `find_faults` finds any, else 0. Every started process has ended on return.

    way     "mirrored", "unmirrored": also remove the killed slave's directory (py)
    secure  make certificates first, and use TLS everywhere
    preset  a `shared` section whose rules replace the demo's
    """
    layout.read_preset(preset)  # raises before a directory is made
    exit_on_sigterm()
    files = layout.make_layout(out)
    console = Console()
    try:
        console.print(f"everything of this run is in {files.directory}", highlight=False, soft_wrap=True)
        status, killed = _train_and_kill(files, seconds, kill, seed, way, secure, preset)
        if status.head_version == GENESIS:
            console.print(f"[bold red]✗[/] expected versions in {seconds:g} s, got none; give it more --seconds")
            return 1
        return _report_results(files, status.head, killed, seconds, seed, console)
    except KeyboardInterrupt:
        console.print("stopped; every process of the demo has ended")
        return 130


# ---- watch -----------------------------------------------------------------------------------------------------------

PLAIN_EVERY_S = 10.0
NEWS_LINES = 8


class Watch:
    """Draws the status and the events of the demo."""

    def __init__(self, seconds: float, console: Console | None = None) -> None:
        self._console = console or Console()
        self._seconds, self._begun = seconds, time.monotonic()
        self._news: deque[str] = deque(maxlen=NEWS_LINES)
        self._status: RunView | None = None
        self._drawn_at = -PLAIN_EVERY_S
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def print_event(self, text: str) -> None:
        """Show an event of the demo."""
        line = f"[{self._elapsed_s():5.0f} s] {text}"
        self._news.append(line)
        if self._live:
            self._live.update(self._draw_status(), refresh=True)
        else:
            self._console.print(line, highlight=False, soft_wrap=True)

    def show_status(self, status: RunView | None) -> None:
        """Draw a status; None: the master did not answer this time."""
        if self._live:
            self._status = status or self._status
            self._live.update(self._draw_status(), refresh=True)
        elif status and time.monotonic() - self._drawn_at >= PLAIN_EVERY_S:
            self._drawn_at = time.monotonic()
            line = f"[{self._elapsed_s():5.0f} s] {terminal.one_line(status)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def _draw_status(self) -> RenderableType:
        done = min(1.0, self._elapsed_s() / self._seconds)
        bar = Text("▰" * round(40 * done) + "▱" * round(40 * (1 - done)) + f" {self._elapsed_s():.0f} s", style="cyan")
        news = Panel("\n".join(self._news) or " ", title="the demo", title_align="left")
        return Group(bar, terminal.render_status(self._status), news) if self._status else Group(bar, news)


# ---- lost machines ---------------------------------------------------------------------------------------------------
# Mirrored: the directories of a slave and of the master are removed, and both are restored from mirrors. Unmirrored: a
# slave's directory is removed, and `dips recover` continues from the last export. The remaining model is kept, so that
# later losses can be compared with its own.


Way = Literal["kept", "mirrored", "unmirrored"]  # whether the killed slave's directory is kept, and is mirrored

LEAST_VERSION = {"kept": 0, "mirrored": 3, "unmirrored": 3}  # least head before the loss, so that steps can be lost
AWAY_S = 6.0  # longer than a lease, so that the master notices the loss of the slave
BACK_S = 60.0  # timeout for the run to continue
AFTER_EXPORT = 2  # outer steps after the export, which are lost with a disk without a mirror


@dataclass(frozen=True, slots=True)
class ModelLeft:
    """The version from which the run continues: the newest in the slave's mirror, or the last exported one."""

    version: VersionId
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The running demo: processes, files, display and master."""

    running: LocalProcesses
    files: DemoLayout
    watch: Watch
    master: Endpoint

    def wait_for(self, holds: Callable[[RunView], bool], what: str) -> RunView:
        """Show the status until `holds` is true for it, and return it. Raises ProcessEnded after BACK_S."""
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            status = local.read_status(self.master)
            self.watch.show_status(status)
            self.running.check_alive()
            if status is not None and holds(status):
                return status
            time.sleep(LOOK_EVERY_S)
        raise ProcessEnded(f"{what}: not within {BACK_S:g} s; {self.running.processes['master'].log_tail()}")


# ---- with mirrors ----------------------------------------------------------------------------------------------------


def lose_mirrored(demo: DemoRun, slave: str, head: VersionId) -> ModelLeft:
    """Kill the master after the slave, remove the directories of both, and restart them on empty disks."""
    running, files, watch = demo.running, demo.files, demo.watch
    running.processes["master"].kill()
    left = newest_mirrored(files, slave)
    models = _keep_models(files, slave, left)
    for directory in (files.slave_directory(slave), files.master_directory):
        shutil.rmtree(directory)
    watch.print_event(
        f"killed the master with SIGKILL; rm -rf {slave}/ master/: two machines are gone with their disks"
    )
    watch.print_event(
        f"left are their mirrors: the ledger's, and {slave}'s with {left}, {head.version - left.version} outer steps "
        f"behind the head {head}"
    )
    time.sleep(AWAY_S)
    local.start_master(running, files.run_file)
    local.start_slave(running, files.run_file, slave)
    watch.print_event(f"started the master and {slave} again, on empty disks")
    begun = time.monotonic()
    status = demo.wait_for(_serves, "the run goes on from its mirrors")
    watch.print_event(
        f"both restored themselves from their mirrors: after {time.monotonic() - begun:.0f} s the run goes on "
        f"at {status.head}; the clusters trained on meanwhile"
    )
    return ModelLeft(left, models)


def newest_mirrored(files: DemoLayout, slave: str) -> VersionId:
    """Return the newest complete version in a slave's mirror: its manifest is written last."""
    whole = files.slave_mirror(slave).glob(f"v*@r*/{MANIFEST_FILE}")
    return max((VersionId.parse(path.parent.name) for path in whole), default=VersionId(0, 0))


def _keep_models(files: DemoLayout, lost: str, version: VersionId) -> tuple[Path, ...]:
    """Copy the files of a version: the lost slave's from its mirror, the others' from their disks."""
    kept = []
    for name in SLAVES:
        directory = files.slave_mirror(name) if name == lost else files.slave_directory(name)
        copy = files.directory / f"left-of-{name}"
        shutil.copytree(directory / str(version), copy)
        kept.append(copy)
    return tuple(kept)


# ---- without ---------------------------------------------------------------------------------------------------------


def export_head(demo: DemoRun) -> VersionId:
    """Export the head as an operator would, and return its version."""
    said = local.run_word("export", "--config", str(demo.files.run_file), "--output", str(demo.files.saved_file))
    version = VersionId.parse(said.split()[1])
    demo.watch.print_event(f"dips export: {version} is saved in {demo.files.saved_file.name}")
    demo.wait_for(lambda s: s.head_version.version >= version.version + AFTER_EXPORT, "outer steps after the export")
    return version


def lose_unmirrored(demo: DemoRun, slave: str, left: VersionId) -> ModelLeft:
    """Remove the killed slave's directory, start it on an empty one, and recover from the saved model."""
    running, files, watch = demo.running, demo.files, demo.watch
    shutil.rmtree(files.slave_directory(slave))
    watch.print_event(f"rm -rf {slave}/: its machine is gone with its disk, and nothing mirrored it")
    time.sleep(AWAY_S)
    local.start_slave(running, files.run_file, slave)
    status = demo.wait_for(lambda s: s.slaves[slave].cause is SlaveCause.LACKS_HEAD, f"{slave} says what it lacks")
    watch.print_event(f"started {slave} again, on an empty disk; dips status says: {status.slaves[slave].reason}")
    words = ("recover", "--config", files.run_file.name, "--model", files.saved_file.name, "--yes")
    watch.print_event(f"$ dips {' '.join(words)}")
    begun = time.monotonic()
    said = local.run_word("recover", "--config", str(files.run_file), "--model", str(files.saved_file), "--yes")
    for line in said.splitlines():
        watch.print_event(f"  {line.replace(str(files.directory) + '/', '')}")
    status = demo.wait_for(_serves, "the run goes on from the saved model")
    watch.print_event(
        f"after {time.monotonic() - begun:.0f} s the run goes on at {status.head}; the clusters trained on meanwhile"
    )
    return ModelLeft(left, (files.saved_file,))


# ---- leaves ----------------------------------------------------------------------------------------------------------


def _serves(status: RunView) -> bool:
    return all(slave.state is SlaveState.READY for slave in status.slaves.values())


# ---- training ------------------------------------------------------------------------------------------------------


def _train_and_kill(
    files: DemoLayout, seconds: float, kill: bool, seed: int, way: Way, secure: bool, preset: Path | None
) -> tuple[RunView, Kill | None]:
    """Train until the run is finished; return the master's last status, and the kill."""
    with Watch(seconds) as watch, LocalProcesses() as running:
        corpus = data.load_corpus(seed)
        tokens = _expected_tokens(corpus, seconds)
        watch.print_event(f"{corpus.training.size / 1e6:.1f} MB of Python to learn, in {corpus.ranges} ranges")
        address = layout.write_configs(
            files, corpus.ranges, tokens, seconds, mirror=way == "mirrored", seed=seed, secure=secure, preset=preset
        )
        if secure:
            made = layout.make_certificates(files)
            watch.print_event(f"dips certs: an authority and {made} certificates; nothing on gRPC is plain text")
        master = find_master(None, address, layout.viewer_file(files) if secure else None)
        local.run_word(
            "init", "--config", str(files.run_file), "--factory", "dips.demo.model:build", "--seed", str(seed)
        )
        _start_processes(running, files, seed)
        watch.print_event(f"started {', '.join(running.processes)}; the master is at {address}")
        killed = _watch_training(DemoRun(running, files, watch, master), seconds, kill, way)
        for name in layout.CLUSTERS:
            running.processes[name].wait(END_S)
        running.check_alive()
        status = local.read_status(master)
        if status is None:
            raise ProcessEnded(f"the master does not answer; {running.processes['master'].log_tail()}")
        watch.show_status(status)
        watch.print_event(f"the run is finished at {status.finished}")
    _check_codes(running)
    return status, killed


def _expected_tokens(corpus: data.Corpus, seconds: float) -> int:
    """Measure a few inner steps; return the estimated tokens of both clusters, as the end of the schedule."""
    torch.set_num_threads(1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.LR)
    batches = list(corpus.batches(0, train.SEQUENCES, train.LENGTH))[:CALIBRATION_STEPS]
    train.inner_step(model, optimizer, batches[0], train.LR)
    begun = time.monotonic()
    for batch in batches:
        train.inner_step(model, optimizer, batch, train.LR)
    per_second = len(batches) * batches[0][:, 1:].size / (time.monotonic() - begun)
    busy = min(os.cpu_count() or 1, sum(RANKS[n] / SLOWDOWN[n] for n in layout.CLUSTERS))
    return int(per_second * busy * EXPECTED_SHARE * seconds)


def _start_processes(running: LocalProcesses, files: DemoLayout, seed: int) -> None:
    local.start_master(running, files.run_file)
    for name in layout.SLAVES:
        local.start_slave(running, files.run_file, name)
    for name in layout.CLUSTERS:
        trainer = local.module_command(
            *("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name])),
            *("-m", "dips.demo.train", "--seed", str(seed), "--slowdown", str(SLOWDOWN[name])),
        )
        local.start_cluster(running, files.run_file, files.cluster_file(name), name, trainer)


def _watch_training(demo: DemoRun, seconds: float, kill: bool, way: Way) -> Kill | None:
    """Show the run until it is finished; kill processes in the middle if asked to."""
    master = demo.running.processes["master"]
    begun, ends_s = time.monotonic(), seconds + END_S
    killed: Kill | None = None
    answered = False
    while True:
        status = local.read_status(demo.master)
        answered = answered or status is not None
        demo.watch.show_status(status)
        demo.running.check_alive()
        if status and status.finished:
            return killed
        elapsed = time.monotonic() - begun
        if elapsed > START_S and not answered:
            raise ProcessEnded(f"the master does not answer; {master.log_tail()}")
        if elapsed > ends_s:
            raise ProcessEnded(f"the run is not finished {END_S:.0f} s after its time; {master.log_tail()}")
        halfway = status is not None and max(elapsed / seconds, _run_progress(status)) >= KILL_AT
        if status and halfway and kill and not killed and _may_be_lost(demo.files, status, way):
            killed = _kill_cluster_and_slave(demo, way)
            if way != "kept":  # a restarted master counts the run's time from its own start
                ends_s = time.monotonic() - begun + seconds + END_S
        time.sleep(LOOK_EVERY_S)


def _may_be_lost(files: DemoLayout, status: RunView, way: Way) -> bool:
    """Return whether there is a version from which the run can continue."""
    enough = status.head_version.version >= LEAST_VERSION[way]
    return enough and (way != "mirrored" or newest_mirrored(files, KILLED_SLAVE).version > 0)


def _kill_cluster_and_slave(demo: DemoRun, way: Way) -> Kill:
    """Kill slow's torchrun and, while it restarts, a slave, possibly with its directory; restart all."""
    processes = demo.running.processes[KILLED_CLUSTER].kill_children()
    demo.watch.print_event(
        f"killed torchrun of {KILLED_CLUSTER}, {len(processes)} processes, with SIGKILL; its agent starts it again"
    )
    back = time.monotonic() + BETWEEN_KILLS_S
    demo.wait_for(lambda status: time.monotonic() > back, "the master answers")
    exported = export_head(demo) if way == "unmirrored" else None
    status = demo.wait_for(lambda status: True, "the master answers")
    demo.running.processes[KILLED_SLAVE].kill()
    after = local.read_status(demo.master)  # a version may have been made just before the kill
    head = (after or status).head_version
    demo.watch.print_event(f"killed {KILLED_SLAVE} with SIGKILL at {head}")
    if exported is not None:
        return Kill(head, lose_unmirrored(demo, KILLED_SLAVE, exported))
    if way == "mirrored":
        return Kill(head, lose_mirrored(demo, KILLED_SLAVE, head))
    time.sleep(AWAY_S)
    local.start_slave(demo.running, demo.files.run_file, KILLED_SLAVE)
    demo.watch.print_event(f"started {KILLED_SLAVE} again")
    return Kill(head)


def _run_progress(status: RunView) -> float:
    progress = status.progress
    return progress.tokens / progress.tokens_target if progress.tokens_target else 0.0


def _check_codes(running: LocalProcesses) -> None:
    for process in running.processes.values():
        if process.exit_code() != 0:
            raise ProcessEnded(
                f"{process.name} ended with exit code {process.exit_code()}, expected 0; {process.log_tail()}"
            )


# ---- results ----------------------------------------------------------------------------------------------------


def _report_results(
    files: DemoLayout, head: str, killed: Kill | None, seconds: float, seed: int, console: Console
) -> int:
    """Evaluate, plot and print the results; return the exit code."""
    torch.set_num_threads(os.cpu_count() or 1)
    left = killed.left if killed else None
    with console.status("exporting and evaluating"):
        local.run_word(
            "export", "--config", str(files.run_file), "--output", str(files.exported_file), "--version", head
        )
        directory = _export_directory(files, head)
        snapshots = [files.slave_directory(name) / head for name in layout.SLAVES]
        copies, sample = left.files if left else (), validation_sample(seed)
        losses = evaluate_losses(files.initial_model, snapshots, files.exported_file, sample, copies, directory)
    with open_ledger(load_run(files.run_file)) as ledger:
        rounds, tokens = ledger.read_history(limit=1_000_000), ledger.read_tokens()
    lines = {name: list(timeline.read_marks(files.timeline_file(name))) for name in (*layout.CLUSTERS, "master")}
    with console.status("drawing"):
        drawn = [*plot_run(files.run_file, files.directory), plots.draw_timeline(lines, files.directory)]
    _print_results(console, losses, head, left, rounds, tokens)
    for path in (*drawn, files.exported_file, *([directory] if directory else [])):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    faults = find_faults(losses, rounds, killed, seconds)
    for fault in faults:
        console.print(f"[bold red]✗[/] {fault}", highlight=False, soft_wrap=True)
    return 1 if faults else 0


def find_faults(losses: Losses, rounds: Sequence[RoundHistory], killed: Kill | None, seconds: float) -> list[str]:
    """Return what went wrong in a run that ended by itself: it learned nothing, or went on without a cluster.

    seconds  duration of the run; a short one need not reach the bigram entropy
    """
    enough = losses.bigrams if seconds >= layout.FULL_S else losses.first - 1
    since = killed.head.round if killed else 0
    present = {fold.push.cluster for r in rounds if r.round > since for fold in r.folds}
    exported = [loss for loss in (losses.exported, losses.transformers) if loss is not None]
    faults = (
        (losses.head >= enough, f"the model learned too little: expected below {enough:.4f}, got {losses.head:.4f}"),
        (
            any(abs(loss - losses.head) >= SAME for loss in exported),
            f"an exported model is not the head: expected {losses.head:.4f}, got {exported}",
        ),
        (
            losses.left is not None and losses.head >= losses.left,
            f"after the loss of a disk the run learned nothing: {losses.left} before, {losses.head:.4f} now",
        ),
        *(
            (name not in present, f"no push of {name} is in a version{' since the kill' if killed else ''}")
            for name in layout.CLUSTERS
        ),
    )
    return [fault for is_wrong, fault in faults if is_wrong]


def _export_directory(files: DemoLayout, head: str) -> Path | None:
    """Export for transformers, if that is installed; return the directory or None."""
    if importlib.util.find_spec("transformers") is None:
        return None
    words = ("--format", "hf", "--convert", "dips.demo.llama:convert", "--version", head)
    local.run_word("export", "--config", str(files.run_file), "--output", str(files.exported_directory), *words)
    return files.exported_directory


def _print_results(
    console: Console,
    losses: Losses,
    head: str,
    left: ModelLeft | None,
    rounds: list[RoundHistory],
    tokens: Mapping[str, Mapping[str, int]],
) -> None:
    numbers = Table("validation loss", "nats per byte", title="the global model", title_justify="left")
    numbers.add_row("version 0", f"{losses.first:.4f}")
    if left and losses.left is not None:
        numbers.add_row(f"{left.version}, all that was left", f"{losses.left:.4f}")
    numbers.add_row(f"head, {head}", f"{losses.head:.4f}")
    numbers.add_row("exported file", f"{losses.exported:.4f}")
    pretrained = "not made: transformers is not installed"
    if losses.transformers is not None:
        pretrained = f"{losses.transformers:.4f}, by from_pretrained"
    numbers.add_row("exported directory", pretrained)
    numbers.add_row("entropy of bigrams", f"{losses.bigrams:.4f}")
    console.print(numbers)
    ended = {kind: sum(r.kind == kind for r in rounds) for kind in ("applied", "skipped", "unchanged", "unfinished")}
    gated = sum(o.kind == "gated" for r in rounds for o in r.outcomes)
    console.print("rounds: " + ", ".join(f"{n} {kind}" for kind, n in ended.items()) + f"; {gated} pushes gated")
    account = Table("cluster", "outer steps", "tokens accepted", "gated", "lost", title="tokens", title_justify="left")
    for name in layout.CLUSTERS:
        took_part = sum(any(f.push.cluster == name for f in r.folds) for r in rounds)
        counted = tokens.get(name, {})
        account.add_row(name, str(took_part), *(f"{counted.get(kind, 0):,}" for kind in ("accepted", "gated", "lost")))
    console.print(account)
