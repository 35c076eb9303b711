"""33 simulated days at the failure rates of the paper's Table 1.

Nine clusters with 10,112 devices and 16 slaves, as in §5.1 and §5.4, with the real Coordinator, ledger, shards and
client sessions. One second of the simulated world stands for SCALE seconds of the run, and one inner step for STEPS of
the paper's: H = 64 of 112 s each give a push every two hours, as in Figure 16; push, pull and update take a few percent
of this time. The window is the default: 5 % of the time between a cluster's pushes.

Failures are as frequent as in Table 1, at times drawn uniformly from a cluster's active days: a Poisson process
of the table's rate, given its count. The parameter server fails four times (§5.4).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from dips.dataclass import dataclass
from dips.protocol.effects import Note, Outcome
from dips.protocol.options import DataOptions, Options, PenaltyOptions, TimingOptions
from dips.sim.agent import SimAgent
from dips.sim.master import MasterProcess
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario, name_clusters
from dips.sim.work import Frozen
from dips.sim.world import World

SCALE = 40.0  # seconds of the run per second of the simulated world
DAY_S = 86_400.0 / SCALE
MONTH_DAYS = 33.0
STEPS = 16  # inner steps of the paper per simulated one
INNER_STEPS = 4  # H = 64 of the paper's
STEP_S = 45.0  # 16 steps of 112 s, on a cluster of kind A
SLAVES = 16
SERVER_FAILURES = 4  # §5.4
QUIET_S = 0.25 * DAY_S  # time without failures at the end
RESTART_S = 3.0
TRAINER_SHARE = 0.4  # share of a cluster's failures that its agent survives


WIDE = "{:<8}{:<5}{:>8}{:>9}{:>9}{:>6}{:>8}{:>8}{:>8}"  # a row of the figures


@dataclass(frozen=True)
class FailureKind:
    """A row of Table 1; `active` is #Failures times MTBF over the month: the share of it in which its clusters took
    part.
    """

    name: str
    clusters: int
    devices: int  # of each
    pflops: float
    failures: int  # of all of them
    mtbf_days: float
    repair_h: float  # mean; an assumption: Figure 17 has no numbers, but shows that A and B returned soon

    @property
    def active(self) -> float:
        return min(1.0, self.failures * self.mtbf_days / (self.clusters * MONTH_DAYS))


TABLE_1 = (
    FailureKind("A", 5, 1024, 378.9, 3, 55.0, 0.5),
    FailureKind("B", 1, 896, 331.5, 1, 33.0, 0.5),
    FailureKind("C", 1, 1472, 329.5, 4, 7.3, 3.0),
    FailureKind("D", 1, 448, 229.4, 2, 3.0, 3.0),
    FailureKind("E", 1, 2176, 479.2, 31, 0.9, 3.0),
)


@dataclass
class Member:
    """One cluster of the month: when it takes part, and its failures."""

    name: str
    kind: FailureKind
    begins: float
    ends: float
    failures: int = 0

    @property
    def active_s(self) -> float:
        return self.ends - self.begins


class Month(Observer):
    """Plans the failures, counts their effects, and formats the figures at the end."""

    def __init__(self, days: float, seed: int) -> None:
        self.days, self.seed, self.rng = days, seed, Random(f"month/{seed}")
        self.lasts_s = days * DAY_S
        kinds = [kind for kind in TABLE_1 for _ in range(kind.clusters)]
        self.members = [self._make_member(*member) for member in zip(name_clusters(len(kinds)), kinds, strict=True)]
        self.kinds: Counter[str] = Counter()  # of failures
        self.notes: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.down_s: dict[str, float] = dict.fromkeys((m.name for m in self.members), 0.0)
        self._down_since: dict[str, float] = {}
        self.serving_since: float | None = None
        self.served_s = 0.0
        self.world = World(seed, self._make_scenario())

    def _make_member(self, name: str, kind: FailureKind) -> Member:
        """Make a cluster; one that was not active all the time takes part in one interval at a random time."""
        active_s = kind.active * self.lasts_s
        begins = (self.lasts_s - active_s) * self.rng.random()
        return Member(name, kind, begins, begins + active_s)

    def _make_scenario(self) -> Scenario:
        fastest = TABLE_1[0].pflops
        clusters = tuple(ClusterShape(1, STEP_S * fastest / m.kind.pflops) for m in self.members)
        timing = TimingOptions(
            window_s=None, heartbeat_s=12.0, lease_heartbeats=3, hang_s=180.0, order_s=8.0,
        compute_s=20.0, transfer_s=60.0,
            least_transfer_s=30.0, busy_retry_s=1.0,
        )  # fmt: skip
        ranges = DataOptions(ranges=int(1_000 + 2.0 * self.lasts_s / STEP_S * len(self.members)))
        options = Options(penalty=PenaltyOptions(), data=ranges, timing=timing)
        return Scenario(
            clusters, slaves=SLAVES, layers=SLAVES, slots=4, pinned=1, inner_steps=INNER_STEPS, options=options,
            lasts_s=self.lasts_s, quiet_at=self.lasts_s - QUIET_S, run="month",
        )  # fmt: skip

    # ---- failures --------------------------------------------------------------------------------------------------

    def plan_failures(self, world: World) -> None:
        """Plan all failures with `call_later`."""
        last = self.lasts_s - 2 * QUIET_S
        for kind in TABLE_1:
            members = [m for m in self.members if m.kind is kind]
            for _ in range(max(1, round(kind.failures * self.days / MONTH_DAYS))):
                member = self.rng.choice(members)
                at = member.begins + member.active_s * self.rng.random()
                member.failures += 1
                world.call_later(min(at, last), f"{member.name} fails", partial(self._cluster_fails, world, member))
        for member in self.members:
            cluster = world.clusters[member.name]
            if member.begins > 0:
                cluster.crash()  # before its first message, since it joins later
                world.call_later(member.begins, f"{member.name} joins the run", cluster.start)
            if member.ends < last:
                world.call_later(member.ends, f"{member.name} leaves the run", cluster.leave_run)
        for number in range(max(2, round(SERVER_FAILURES * self.days / MONTH_DAYS))):
            at = last * self.rng.random()
            what = partial(self._master_fails, world) if number == 1 else partial(self._slave_fails, world)
            world.call_later(at, "the parameter server fails", what)

    def _cluster_fails(self, world: World, member: Member) -> None:
        cluster = world.clusters[member.name]
        if cluster.agent is None:
            member.failures -= 1  # it is down already
            return
        self._shut_down(member.name)
        if self.rng.random() < TRAINER_SHARE:
            self.kinds["a rank or trainer of a cluster"] += 1
            cluster.crash_rank(0, 0.5)
            return
        self.kinds["a whole cluster"] += 1
        cluster.crash()
        repair_s = 3600.0 / SCALE * member.kind.repair_h * (0.3 + self.rng.expovariate(1.0))
        last = self.lasts_s - QUIET_S
        if world.heap.now + repair_s < member.ends:
            world.call_later(min(repair_s, last - world.heap.now), f"{member.name} is repaired", cluster.start)

    def _slave_fails(self, world: World) -> None:
        self.kinds["a slave"] += 1
        machine = self.rng.choice(list(world.machines.values()))
        machine.crash()
        world.call_later(self._restart_s(), f"{machine.name} starts again", machine.start)

    def _master_fails(self, world: World) -> None:
        self.kinds["the master"] += 1
        world.crash_master()
        world.call_later(self._restart_s(), "the master starts again", world.start_master)

    def _restart_s(self) -> float:
        """Return the time until a crashed process of the parameter server is back: usually short."""
        return RESTART_S * (0.4 + 0.6 * self.rng.random()) * (3.0 if self.rng.random() < 0.2 else 1.0)

    # ---- counting -----------------------------------------------------------------------------------------

    def note_logged(self, note: Note) -> None:
        self.notes[note.kind] += 1

    def outcome_received(self, agent: SimAgent, frozen: Frozen, outcome: Outcome) -> None:
        self.outcomes[agent.name, outcome.kind] += 1

    def trainer_stepped(self, agent: SimAgent) -> None:
        since = self._down_since.pop(agent.name, None)
        if since is not None:  # its first inner step after a failure
            self.down_s[agent.name] += agent.world.heap.now - agent.site.step_s - since

    def after_event(self) -> None:
        serving = all(m.process is not None and m.process.holds for m in self.world.looked_at)
        if not serving and self.serving_since is not None:
            self.served_s += self.world.heap.now - self.serving_since
            self.serving_since = None
        elif self.serving_since is None and serving and self._all_serve():
            self.serving_since = self.world.heap.now

    def _all_serve(self) -> bool:
        machines = self.world.machines.values()
        return self.world.master.process is not None and all(m.process and m.process.holds for m in machines)

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        if self.serving_since is not None:
            self.served_s += self.world.heap.now - self.serving_since
            self.serving_since = None

    def _shut_down(self, cluster: str) -> None:
        self._down_since.setdefault(cluster, self.world.heap.now)

    # ---- results ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the month."""
        self.world.run([self], self.plan_failures)

    def at_rest(self) -> None:
        if self.serving_since is not None:
            self.served_s += self.world.heap.now - self.serving_since
        for name, since in self._down_since.items():
            member = next(m for m in self.members if m.name == name)
            self.down_s[name] += max(0.0, min(self.world.heap.now, member.ends) - since)

    def too_much_lost(self) -> str:
        """Return which cluster lost more work than expected, and how much; "" if none did.

        A failure costs the work that its cluster had not pushed: at most that of two pushes, and of one per skipped
        round.
        """
        for member in self.members:
            steps = sum(n for (_, n) in self.lost_work(member.name).values())
            lives = member.failures + (1 if member.ends < self.lasts_s else 0)
            most = INNER_STEPS * (2 * lives + self.notes["round_skipped"])
            if steps > most:
                return f"{member.name} lost {steps} inner steps by {lives} failures, {most} at most were expected"
        return ""

    def lost_work(self, cluster: str) -> dict[str, tuple[int, int]]:
        """Return by cause the tokens and inner steps that will never be in a version."""
        found: dict[str, tuple[int, int]] = {}
        for work in self.world.books.work:
            if work.cluster == cluster and work.lost and id(work) not in self.world.books.settled:
                tokens, steps = found.get(work.lost, (0, 0))
                found[work.lost] = (tokens + work.tokens, steps + 1)
        return found

    def format_figures(self) -> str:
        """Return the table of figures."""
        notes, books = self.notes, self.world.books
        rounds = notes["version_committed"] + notes["round_unchanged"] + notes["round_skipped"]
        devices = sum(m.kind.devices for m in self.members)
        active = sum(m.active_s * m.kind.devices for m in self.members)
        down = sum(self.down_s[m.name] * m.kind.devices for m in self.members)
        made, unchanged, skipped = (notes[k] for k in ("version_committed", "round_unchanged", "round_skipped"))
        served = 100 * self.served_s / self.world.heap.now
        head = ("cluster", "kind", "active d", "failures", "accepted", "gated", "skipped", "tokens", "lost %")
        lines = [
            f"{self.days:g} days, {len(self.members)} clusters, {devices} devices, {SLAVES} slaves, seed {self.seed}",
            "failures: " + ", ".join(f"{n} of {what}" for what, n in sorted(self.kinds.items())),
            f"rounds: {rounds}: {made} versions, {unchanged} unchanged, {skipped} skipped",
            f"pushes committed: {notes['push_committed']}; rollbacks: {notes['rolled_back']}",
            f"availability of the parameter server: {served:.3f} % of the time",
            f"availability of devices: {100 * (1 - down / active):.2f} % of their active time",
            "",
            WIDE.format(*head) + f"  lost by (inner steps of {STEPS})",
        ]
        for m in self.members:
            tokens = sum(w.tokens for w in books.work if w.cluster == m.name)
            lost = self.lost_work(m.name)
            gone = sum(t for t, _ in lost.values())
            why = ", ".join(f"{cause}: {n}" for cause, (_, n) in sorted(lost.items())) or "nothing"
            kinds = [self.outcomes[m.name, kind] for kind in ("accepted", "gated", "skipped")]
            row = (m.name, m.kind.name, f"{m.active_s / DAY_S:.1f}", m.failures, *kinds, tokens)
            lines.append(WIDE.format(*row, f"{100 * gone / max(1, tokens):.3f}") + f"  {why}")
        return "\n".join(lines)
