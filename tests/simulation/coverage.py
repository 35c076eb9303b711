"""Which failures a seed has really met: the rows of docs/architecture.md#failure-table, and crash points.

A row is met when it was *seen* to happen and to end as the table says, not when a fault was planned: an agent that dies
meets nothing until its lease runs out or its successor joins. Each seed counts once for each row that it met.
"""

from __future__ import annotations

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import AbortVersion, CommitVersion, LoadVersion, Note, Registered
from dips.protocol.events import ClusterSilent, Event, TrainerChanged
from dips.protocol.records import ClusterEnded, IncarnationGiven, LedgerState, Record, RolledBack, VersionCommitted
from dips.sim.agent import SimAgent
from dips.sim.master import MasterProcess
from dips.sim.observer import Observer
from dips.sim.slave import SlaveProcess
from dips.sim.world import World

# docs/architecture.md#failure-table: what fails → what was seen to happen
ROWS: dict[str, str] = {
    "trainer": "a rank or trainer died; the same incarnation pulled and went on",
    "cluster": "a cluster's lease ran out",
    "cluster_back": "a cluster came back under a new incarnation and pulled",
    "frame": "a frame was corrupt, repeated or not asked for, and was refused",
    "slave_before": "a slave was lost before Persisted: round skipped",
    "slave_after": "a slave was lost after Persisted: ordered Commit, Abort or Load by the row",
    "rollback": "a slave could not offer the head: rollback by a ledger row",
    "snapshot": "a snapshot was torn or rotten, and passed over",
    "disk_lost": "a disk was lost for good, and its slave went on with what its mirror holds",
    "master": "a new term began, and a version was made in it",
    "blind": "a master that was not looking said Blind",
    "disk_full": "a snapshot failed for want of room: round skipped, or degraded",
    "partition": "messages vanished on a parted link, and its ends spoke again",
}

# docs/protocol.md#crash-points, and whatever else chance alone would seldom meet.
POINTS: dict[str, str] = {
    "master_before_row": "a master died over an open round: no row, presumed abort",
    "master_after_row": "a master died over a flip: the row stands, Commit is said again",
    "torn_ledger": "a transaction was torn, and rolled back",
    "zombie_master": "an old master woke beside its successor, was fenced and exited",
    "old_ledger": "a restored old ledger was refused",
    "ledger_lost": "a ledger was lost for good, and the run went on with what its mirror holds",
    "slave_in_doubt": "a slave in doubt was ordered Commit",
    "slave_aborts": "a slave in doubt was ordered Abort",
    "slave_loads": "a slave that died after Persisted loaded the version that it had prepared",
    "push_of_the_dead": "a committed push counted after its cluster's incarnation was over",
    "push_dropped": "an uncommitted push died with its cluster",
    "rank_in_push": "a rank died in the middle of a push",
    "rank_in_pull": "a rank died in the middle of a pull",
    "hung": "a trainer hung, and no window waited for it",
    "revoked_agent": "the calls of an agent were refused for good, and it exited",
    "denied_agent": "an agent found its name taken by one that lives, and exited",
    "fenced_agent": "an agent learned that it is fenced, and exited",
    "answer_lost": "an answer was lost, and the same question got it again",
    "room": "the whole room died",
    "undone": "a cluster went on after its version was undone",
    "degraded": "versions were announced without a snapshot",
    "durable_again": "and durable again",
    "stopped": "the run stopped for a broken disk, and went on when it was mended",
    "lossy": "a push in a lossy codec was accepted",
    "updates": "a rank pulled the update to a version instead of its parameters",
    "two_updates": "a rank two versions behind pulled both updates",
    "one_way": "a link was parted one way only",
    "quarantine": "a diverged push was gated",
    "held": "a push waited in its slot for the others of its round",
    "flagged": "a gate spoke against a push that was accepted",
    "seeded": "slaves that began with empty disks were brought the first model",
    "seed_broken": "that broke on the way, and was begun anew",
    "extended": "a run was extended before its end",
    "resumed": "a finished run was extended, and its clusters came back",
    "tuned": "an operator changed the outer step while the run went on",
    "operator_quarantine": "a push was gated since an operator quarantined its cluster",
    "expelled": "a cluster was expelled while the run went on",
    "fragments": "a version was merged whose fragments were pulled an inner step apart, as those of its push were",
    "forged_register": "another process registered in the name of a slave that lives, and was refused",
    "forged_order": "an order of a term of which no master told was refused",
    "unmerged": "what was trained under overlap was not finite, and the version was installed whole",
}

NOTED = {"push_gated": "quarantine", "push_held": "held", "push_flagged": "flagged"}

EXPELLED = "is revoked"  # stands in the reason of who is expelled here

# Ways to run a cluster and a run; each is seen in a third of the seeds at least.
WAYS: dict[str, str] = {
    "aligned": "a cluster of aligned pace pushed when the master said",
    "overlap": "a version was merged into a model that had trained on since its push was frozen",
    "torchrun": "torchrun started all ranks again under one agent, and they pulled and went on",
    "async": "a version became durable after its row",
}


class Coverage(Observer):
    """Watches one world; `seen` holds the names of the rows and points that it met."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: dict[str, None] = {}  # in the order of meeting
        self._dead_trainers: dict[str, int] = {}  # cluster → the incarnation in which a trainer died
        self._new_incarnations: dict[str, int] = {}
        self._ended: dict[tuple[str, int], None] = {}
        self._terms = 0
        self._orphans: dict[str, VersionId] = {}  # slave → what it had on its disk when it was lost in doubt
        self._moving: dict[str, str] = {}  # cluster → "push" | "pull"
        self._undone = self._stopped = False

    def met(self, row: str) -> None:
        self.seen[row] = None

    def rare_event_occurred(self, what: str) -> None:
        self.met(what)

    # ---- records ---------------------------------------------------------------------------------------------------

    def master_restored(self, state: LedgerState) -> None:
        self._terms += 1

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self._version(record)
        elif isinstance(record, RolledBack):
            self.met("rollback")
            self._undone = True
        elif isinstance(record, ClusterEnded):
            self._ended[record.cluster, record.inc] = None
        elif isinstance(record, IncarnationGiven) and record.role == "cluster" and record.inc > 1:
            self._new_incarnations[record.name] = record.inc

    def _version(self, record: VersionCommitted) -> None:
        if self._terms > 1:
            self.met("master")
        if self._stopped:
            self.met("stopped")
        for fold in record.folds:
            if (fold.push.cluster, fold.push.inc) in self._ended:
                self.met("push_of_the_dead")
            if self.world.books.frozen[fold.push].codec.lossy:
                self.met("lossy")
            if self._undone:
                self.met("undone")

    # ---- what Coordinators say -------------------------------------------------------------------------------------

    def note_logged(self, note: Note) -> None:
        fields = dict(note.fields)
        if note.kind == "round_skipped" and "was lost" in fields["reason"]:
            self.met("slave_before")
        elif note.kind == "persist_failed":
            self.met("disk_full")
        elif note.kind == "version_durable":
            self.met("async")
        elif note.kind == "push_dropped" and ("silent" in fields["reason"] or "fenced" in fields["reason"]):
            self.met("push_dropped")
        elif note.kind in NOTED:
            self.met(NOTED[note.kind])
        elif note.kind == "stopped":
            self._stopped = True
        elif note.kind in ("blind", "degraded", "durable_again"):
            self.met(note.kind)

    def silence_judged(self, verdict: Event) -> None:
        if isinstance(verdict, ClusterSilent):
            self.met("cluster")
        elif isinstance(verdict, TrainerChanged) and "trainer hangs" in verdict.reason:
            self.met("hung")

    # ---- slaves ----------------------------------------------------------------------------------------------------

    def slave_crashed(self, process: SlaveProcess) -> None:
        """Its memory is gone; what lay prepared on its disk stays."""
        prepared = process.versions.prepared
        if prepared is not None and prepared in process.machine.disk.good_versions:
            self._orphans[process.name] = prepared

    def slave_registered(self, process: SlaveProcess, answer: Registered) -> None:
        order = answer.order
        if isinstance(order, CommitVersion):
            self.met("slave_in_doubt")
            self.met("slave_after")
        elif isinstance(order, AbortVersion):
            self.met("slave_aborts")
            self.met("slave_after")
        elif isinstance(order, LoadVersion) and self._orphans.get(process.name) == order.version:
            self.met("slave_loads")
            self.met("slave_after")

    # ---- masters ---------------------------------------------------------------------------------------------------

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        """`rows`: a version's row was under way; `written`: it was durable when the process died."""
        deciding = process.coordinator._run
        if (rows and written) or (not rows and deciding.flipping is not None):
            self.met("master_after_row")
        elif rows or deciding.round is not None:
            self.met("master_before_row")

    # ---- clusters --------------------------------------------------------------------------------------------------

    def push_begun(self, agent: SimAgent, push: PushId) -> None:
        self._moving[agent.name] = "push"
        if agent.meets:
            self.met("aligned")

    def pull_merged(self, agent: SimAgent, kept: bool) -> None:
        if not kept:
            self.met("unmerged")
        elif agent.trainer is not None and agent.trainer.in_hand.works:
            self.met("overlap")
            if agent.site.fragments > 1:
                self.met("fragments")

    def pull_begun(self, agent: SimAgent, pull: PullId) -> None:
        self._moving[agent.name] = "pull"

    def push_moved(self, agent: SimAgent, push: PushId, moved: bool) -> None:
        self._moving.pop(agent.name, None)

    def pull_ended(self, agent: SimAgent, installed: bool, attempt: int) -> None:
        self._moving.pop(agent.name, None)
        if not installed:
            return
        if self._dead_trainers.pop(agent.name, None) == agent.inc:
            self.met("trainer")
        if agent.trainer is not None and agent.trainer.restart > 0:
            self.met("torchrun")
        if self._new_incarnations.get(agent.name) == agent.inc:
            self.met("cluster_back")

    def trainer_died(self, agent: SimAgent, rank: bool) -> None:
        moving = self._moving.pop(agent.name, None)
        if rank and moving is not None:
            self.met(f"rank_in_{moving}")
        self._dead_trainers[agent.name] = agent.inc

    def agent_exits(self, agent: SimAgent, reason: str) -> None:
        if reason.startswith("StaleIncarnation"):
            self.met("fenced_agent")
        else:
            self.met("revoked_agent" if EXPELLED in reason else "denied_agent")

    # ---- links -----------------------------------------------------------------------------------------------------

    def cut_off(self, sender: str, receiver: str, both: bool) -> None:
        if not both:
            self.met("one_way")

    def passes_again(self, sender: str, receiver: str) -> None:
        self.met("partition")
