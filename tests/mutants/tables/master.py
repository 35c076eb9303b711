"""Mutants of the master's core, its ledger and its recovery (dips/master)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "dips/master"
CORE = "tests/unit/master/test_core.py"
LEDGER = "tests/unit/master/test_bites_ledger.py tests/unit/master/test_ledger.py"
OUTBOX = "tests/unit/master/test_outbox.py"
HELD = "tests/unit/master/test_held.py"
JOURNAL = "tests/unit/master/test_journal.py"
RECOVER = "tests/unit/master/test_recover.py"
RECOVERING, REBUILD = "dips/commands/recovering.py", "tests/unit/test_recover.py"
MIRROR = "tests/unit/master/test_ledger_mirror.py"
GENESIS = "tests/unit/master/test_bites_ledger.py tests/unit/master/test_genesis.py"
ON_VERSION, PLOT = "tests/unit/master/test_on_version.py", "tests/unit/commands/test_plot.py"

MUTANTS = (
    # ---- a gap, and what is said before a Join
    Mutant(
        "whoever beats is judged at once after a gap",
        ROOM,
        "self._judging_from = now + ",
        "self._judging_from = now - ",
        CORE,
    ),
    Mutant("a gap is judged before what arrived", ROOM, "if now < self._judging_from:", "if False:", CORE),
    Mutant("a gap does not move the leases", ROOM, "self._judge.skip_gap(gap_s)", "pass", CORE),
    Mutant(
        "a gap does not move the alignment",
        ROOM,
        "self._alignment.skip_gap(gap_s)",
        "pass",
        "equivalent: the grid moves by whole periods, and a cluster gets the next of its points",
    ),
    Mutant("a gap is not reported to the Coordinator", ROOM, "self._step_event(Blind(gap_s), now)", "pass", CORE),
    Mutant("no last words before a Join", ROOM, "if isinstance(event, ClusterJoined):", "if False:", CORE),
    Mutant(
        "a heartbeat of an old term is believed", ROOM, "register or heartbeat.term != ", "register or None is ", CORE
    ),
    Mutant("a list is told to nobody", ROOM, "if register or heartbeat.live == live.number", "if True", CORE),
    Mutant("a stranger's heartbeat is kept", ROOM, "if standing is ClusterStanding.LIVE:", "if True:", CORE),
    Mutant("who has gone is judged silent", ROOM, "self._judge.forget_cluster(effect.cluster)", "pass", CORE),
    Mutant("who has gone is waited for", ROOM, "self._alignment.forget_cluster(effect.cluster)", "pass", CORE),
    Mutant("a question is held beyond its patience", ROOM, "now < question.until and", "True and", CORE),
    # ---- the outbox and held questions
    Mutant(
        "what stands behind a record leaves",
        ROOM,
        "        self._writing = True",
        "        self._writing = False",
        OUTBOX,
    ),
    Mutant(
        "records leave one by one",
        ROOM,
        "records = tuple(item for item in self._queue if _is_record(item))",
        "records = tuple(item for item in list(self._queue)[:1] if _is_record(item))",
        OUTBOX,
    ),
    Mutant("a change wakes no question", ROOM, "max(now, self._asked_at + pause_s)", "now + 99.0", HELD),
    Mutant("questions are asked without pause", ROOM, "max(now, self._asked_at + pause_s)", "now", HELD),
    Mutant(
        "questions wait for changes only", ROOM, "again_s: float = 2.0", "again_s: float = 200.0", HELD + " " + CORE
    ),
    # ---- its mirror
    Mutant("a half-written mirror is believed", ROOM, "    if not whole:\n        return None", "", MIRROR),
    Mutant("another run's ledger is restored", ROOM, "if of != run:", "if False:", MIRROR),
    Mutant("an old ledger beats its mirror", ROOM, "if mirrored > term:", "if False:", MIRROR),
    Mutant(
        "effects leave before the mirror has them",
        ROOM,
        "await asyncio.wrap_future(done)",
        "await asyncio.sleep(0)",
        MIRROR,
    ),
    Mutant(
        "a restored ledger gives rounds twice",
        ROOM,
        "state.next_round, state.next_round + SPARE",
        "state.next_round, state.next_round",
        MIRROR,
    ),
    # ---- the ledger
    Mutant("the ledger is not fsynced", ROOM, "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL", LEDGER),
    Mutant(
        "the ledger has no write-ahead log", ROOM, "PRAGMA journal_mode = WAL", "PRAGMA journal_mode = DELETE", LEDGER
    ),
    Mutant("rows may refer to nothing", ROOM, "PRAGMA foreign_keys = ON", "PRAGMA foreign_keys = OFF", LEDGER),
    Mutant("a new ledger's name is not fsynced", ROOM, "sync_path(Path(path).parent)", "pass", LEDGER),
    Mutant(
        "a master writes over its successor",
        ROOM,
        "(newest := self.read_term()) != self._term:",
        "(newest := 0):",
        LEDGER,
    ),
    Mutant("a term is given twice", ROOM, "max(self.read_term(), above) + 1", "max(self.read_term(), above)", LEDGER),
    Mutant(
        "half a transaction is written",
        ROOM,
        'db.execute("ROLLBACK")\n        if isinstance(',
        'db.execute("COMMIT")\n        if isinstance(',
        LEDGER,
    ),
    Mutant("a ledger of another format is opened", ROOM, "if schema != SCHEMA_VERSION:", "if False:", LEDGER),
    Mutant("any SQLite file is a ledger", ROOM, "if application != APPLICATION_ID:", "if False:", LEDGER),
    Mutant(
        "a push is in two versions",
        ROOM,
        "    UNIQUE (cluster, inc, seq)  -- once",
        "    CHECK (seq >= 0)  -- once",
        LEDGER,
    ),
    Mutant(
        "the initial model is not fsynced",
        ROOM,
        "sync_path(aside)\n    aside.replace(model)",
        "aside.replace(model)",
        GENESIS,
    ),
    Mutant(
        "the initial manifest is not fsynced",
        ROOM,
        "sync_path(aside)\n        aside.replace(listing)",
        "aside.replace(listing)",
        GENESIS,
    ),
    Mutant(
        "a disk that fails is called a damaged ledger",
        ROOM,
        "return code & PRIMARY in FAILING and ",
        "return False and ",
        "tests/unit/master/test_ledger_chain.py",
    ),
    Mutant(
        "a restored ledger is not fsynced",
        ROOM + "/ledger.py",
        "    sync_path(built)\n",
        "",
        "tests/unit/master/test_bites_ledger.py",
    ),
    Mutant(
        "the name of a restored ledger is not fsynced",
        ROOM + "/ledger.py",
        "    built.rename(path)\n    sync_path(path.parent)\n",
        "    built.rename(path)\n",
        "tests/unit/master/test_bites_ledger.py",
    ),
    Mutant(
        "what is mirrored piece by piece has no durable name",
        "dips/mirror.py",
        "            if self._local:\n                sync_path(Path(path).parent)\n",
        "",
        "tests/unit/master/test_bites_ledger.py",
    ),
    Mutant(
        "what is written durably is not fsynced",
        "dips/fsync.py",
        "        os.fsync(file.fileno())",
        "        pass",
        "tests/unit/master/test_bites_ledger.py",
    ),
    Mutant(
        "nothing is written any more at a stop",
        ROOM,
        "            await self._flush_records()\n",
        "",
        "tests/unit/master/test_runtime.py",
    ),
    Mutant(
        "whoever hangs up is asked for again",
        ROOM + "/runtime.py",
        "            self._core.withdraw_question(req)\n",
        "",
        "tests/unit/master/test_runtime.py",
    ),
    Mutant(
        "gates and rules name no code",
        ROOM,
        'root.rglob("*.py")',
        'root.glob("*.py")',
        JOURNAL + "::test_a_gate_or_rule_that_changed_is_other_code",
    ),
    Mutant(
        "a log that cannot be written ends who logs",
        "dips/telemetry",
        "            self._lost += 1",
        "            raise",
        "tests/unit/telemetry/test_logs.py",
    ),
    Mutant(
        "a lease that is over is kept",
        ROOM,
        "if not left and place != self._newest:",
        "if False:",
        LEDGER,
    ),
    # ---- recovery, journal
    Mutant("a recovered term is not above what was seen", ROOM, "found_term + SPARE", "found_term", RECOVER),
    Mutant("a recovered round is not above what was seen", ROOM, "found_round + SPARE", "found_round", RECOVER),
    Mutant(
        "incarnations are given twice after a recovery",
        ROOM,
        "(role, peer.name, peer.inc + SPARE, REASON)",
        "(role, peer.name, peer.inc + 1, REASON)",
        RECOVER,
    ),
    Mutant(
        "a ledger of another run is recovered", ROOM, "if state.row.run != config.shared.run:", "if False:", RECOVER
    ),
    Mutant("versions in mirrors are not counted", ROOM, ".union(*offered.values(), *mirrored.values())", "", RECOVER),
    Mutant(
        "a mirror that cannot be read is no matter",
        ROOM,
        'unread.append(f"slaves.{slave.name}.mirror: {error}")',
        "pass",
        RECOVER,
    ),
    Mutant(
        "a restored ledger is named before it is on the disk", ROOM + "/ledger.py", "    sync_path(built)\n", "", MIRROR
    ),
    Mutant(
        "a restored initial model is named before it is on the disk",
        ROOM,
        "        sync_path(aside)\n        aside.replace(path)",
        "        aside.replace(path)",
        MIRROR,
    ),
    # ---- dips recover
    Mutant(
        "a recovered version's round is not reserved",
        RECOVERING,
        "ledger.write_records([RoundReserved(version.round, 0.0)], time.time())",
        "pass",
        REBUILD,
    ),
    Mutant("a recover takes no term", RECOVERING, "ledger.start_term()", "pass", REBUILD),
    Mutant("a recover gives no names", RECOVERING, "rebuild.place_version(version)", "pass", REBUILD),
    Mutant("a recover finishes nothing", RECOVERING, "head in rebuild.finished", "False", REBUILD),
    Mutant("a new ledger stays aside", RECOVERING, "put_in_place(_aside(path), path)", "pass", REBUILD),
    Mutant(
        "what a killed recover staged is taken for a snapshot",
        "dips/slave/rebuild.py",
        "shutil.rmtree(staged_path(section.directory, version))",
        "pass",
        REBUILD,
    ),
    Mutant(
        "what a failed recover staged takes room",
        "dips/slave/rebuild.py",
        "self._disks[one.slave].release_room(version)",
        "pass",
        REBUILD,
    ),
    Mutant(
        "momentum of other layers is taken",
        "dips/slave/rebuild.py",
        "fitting = [version for version in complete if self._holds_layers(name, version, layers)]",
        "fitting = complete",
        REBUILD,
    ),
    Mutant(
        "momentum stays in the mirror",
        "dips/slave/rebuild.py",
        "lacking = self._bring_back(name, layers)",
        'lacking = ""',
        REBUILD,
    ),
    Mutant("the journal keeps every segment", ROOM, "[: -self._segments]", "[:0]", JOURNAL),
    # ---- versions for people
    Mutant(
        "the whole process group outlives its version",
        "dips/master/children.py",
        "os.killpg(self.pid, ",
        "os.kill(self.pid, ",
        ON_VERSION,
    ),
    Mutant(
        "a version's process has no bound",
        "dips/master/on_version.py",
        "while (left := until - self._clock()) > 0:",
        "while (left := 1.0) > 0:",
        ON_VERSION,
    ),
    Mutant("a failed process has numbers", "dips/master/on_version.py", "if child.code != 0:", "if False:", ON_VERSION),
    Mutant(
        "a retired version is due",
        "dips/master/ledger_history.py",
        " AND u.round IS NULL AND t.round IS NULL",
        " AND u.round IS NULL",
        ON_VERSION,
    ),
    Mutant(
        "an undone version is due",
        "dips/master/ledger_history.py",
        " AND u.round IS NULL AND t.round IS NULL",
        " AND t.round IS NULL",
        ON_VERSION,
    ),
    Mutant(
        "tokens of what was rolled back count in the curve",
        "dips/view/points.py",
        "None if before is None else before + tokens",
        "max(self._tokens.values()) + tokens",
        PLOT,
    ),
    Mutant(
        "a missing loss is 0 in the CSV",
        "dips/view/points.py",
        "fold.loss if fold else None",
        "(fold.loss or 0.0) if fold else None",
        PLOT,
    ),
    Mutant(
        "a cluster that gave up is called left",
        "dips/view/judging.py",
        "QUIET = frozenset({ClusterCause.LEFT, ClusterCause.ENDED})",
        "QUIET = frozenset({ClusterCause.LEFT, ClusterCause.ENDED, ClusterCause.GAVE_UP})",
        "tests/unit/view/test_judging.py",
    ),
    Mutant(
        "any remark of a dead trainer is called a crash",
        "dips/view/judging.py",
        "any(remark.subject is RemarkSubject.CRASH for remark in heartbeat.remarks)",
        "bool(heartbeat.remarks)",
        "tests/unit/view/test_judging.py",
    ),
    Mutant(
        "a cause is read from its sentence",
        "dips/view/judging.py",
        'why, held = "" if c.cause in PLAIN else c.reason, _explain_quarantine(c)',
        'why, held = "" if c.reason.startswith("trains") else c.reason, _explain_quarantine(c)',
        "tests/unit/view/test_rewording.py",
    ),
)
