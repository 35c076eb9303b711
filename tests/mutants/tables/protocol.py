"""Mutants of what the master decides (dips/protocol)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "dips/protocol"
STORIES = NAMES = "tests/transcripts"
ROUND = "tests/unit/protocol/test_bites_round.py " + STORIES
RULES = "tests/unit/protocol/test_rules.py tests/unit/protocol/test_step_rules.py"
PUSHES = "tests/unit/protocol/test_bites_transfers.py " + STORIES
END = "tests/unit/protocol/test_bites_end_of_run.py " + STORIES
DISKS = "tests/unit/protocol/test_bites_durability.py " + STORIES
OLD = "tests/unit/protocol/test_bites_old_ledger.py " + STORIES
BLIND = "tests/unit/protocol/test_bites_blind.py"
QUEUE = "tests/unit/protocol/test_admission.py tests/unit/protocol/test_bites_slots.py"
PENALTY = "tests/unit/protocol/test_bites_penalty.py tests/unit/protocol/test_penalty.py"
STUDY, STUDIES = "dips/study", "tests/unit/study/test_study.py"
HOSTILE = "tests/unit/protocol/test_hostile_clusters.py"
GATES = "tests/unit/protocol/test_gates.py tests/unit/protocol/test_held_pushes.py"
MOVED = "tests/unit/protocol/test_moved.py"
JUDGE = "tests/unit/protocol/test_bites_judge.py tests/unit/protocol/test_membership.py"
DATA = "tests/unit/protocol/test_bites_transfers.py tests/unit/protocol/test_small.py " + STORIES
PACE = "tests/unit/protocol/test_bites_alignment.py tests/unit/protocol/test_alignment.py"
TIMES = "tests/unit/protocol/test_deadlines.py"
ORDER = "tests/unit/protocol/test_order.py"
CLAIMS = "tests/unit/protocol/test_claims.py"
HELD = TUNED = "tests/unit/protocol/test_operators.py"
INDEXES = "tests/unit/protocol/test_indexes.py"
GROUPS = "tests/unit/protocol/test_manifest.py"

ROUND_PY, WINDOW = "dips/protocol/round.py", "dips/protocol/window.py"
MIRRORS = "tests/unit/protocol/test_mirrors.py"
WINDOWS = "tests/unit/protocol/test_windows.py"

MUTANTS = (
    Mutant("a lost disk waits though its mirror always lags", ROOM, "steps <= lag + run", "steps <= run", MIRRORS),
    Mutant(
        "any process is believed of its mirror",
        ROOM,
        "slave.state is SlaveState.READY:\n        note",
        "1:\n        note",
        MIRRORS,
    ),
    Mutant("a mirror that fails covers its lag", ROOM, "reason and not slave.mirror.unknown\n", "unknown\n", MIRRORS),
    Mutant(
        "a pull whose end was not heard holds the next push up",
        ROOM,
        "    if cluster.pull is not None:\n        close_pull",
        "    if False:\n        close_pull",
        STORIES,
    ),
    Mutant(
        "clusters follow the term of a ledger that nobody has proven",
        ROOM,
        "return self._run.term if self._run.is_proven else 0",
        "return self._run.term",
        STORIES,
    ),
    Mutant(
        "heartbeats are answered with a term that nobody has proven",
        "dips/master/core.py",
        "ClusterHeartbeatAnswer(coordinator.proven_term,",
        "ClusterHeartbeatAnswer(coordinator.term,",
        "tests/unit/master/test_runtime.py",
    ),
    Mutant(
        "one version more than the newest few stays",
        ROOM,
        "if len(complete) >= keep else",
        "if len(complete) > keep else",
        "tests/unit/protocol/test_archive.py",
    ),
    # ---- a name that is taken
    Mutant(
        "a second agent takes a name from one that lives",
        ROOM,
        "event.rival_heard_s < SILENT",
        "False and SILENT",
        NAMES,
    ),
    Mutant("an agent may not have its own name again", ROOM, "event.former == cluster.inc or", "", NAMES),
    Mutant("--take-over is not heard", ROOM, "or event.take_over", "", NAMES),
    Mutant("a model that did not move counts", ROOM, "g == 0.0 and push.inner_steps > 0", "False", PENALTY),
    Mutant(
        "a push that diverged is not counted",
        "dips/protocol/pushes.py",
        "if event.diverged:",
        "if False:",
        "tests/transcripts",
    ),
    # ---- the end of a run
    Mutant("stop.tokens is never reached", ROOM, "(stop.tokens and", "(False and", END),
    Mutant(
        "stop.tokens is reached one token late",
        ROOM,
        "tokens_accepted >= stop.tokens",
        "tokens_accepted > stop.tokens",
        END,
    ),
    Mutant("stop.wall_s is never reached", ROOM, "(stop.wall_s and", "(False and", END),
    Mutant("stop.wall_s wakes nobody", ROOM, "run.targets.wall_s and not", "run.targets.versions and not", END),
    Mutant("stop.versions is one late", ROOM, "head.version >= stop.versions", "head.version > stop.versions", END),
    # ---- how far it goes, and what may be pulled
    Mutant(
        "a target that is reached is taken",
        ROOM,
        "elif refusal := _find_refusal(run, targets)",
        'elif refusal := ""',
        STORIES,
    ),
    Mutant(
        "a new master forgets an extension", ROOM, "state.row.targets or options.targets", "options.targets", STORIES
    ),
    Mutant(
        "a finished run stays so", ROOM, "resumed, run.finished = run.finished, None", "resumed = run.finished", STORIES
    ),
    Mutant("another epoch frees nothing", ROOM, "run.ranges.add_epochs(targets.epochs)", "pass", STORIES),
    Mutant(
        "a new master finds the end",
        "dips/master/ledger_rows.py",
        'rows.delete_rows("finished")',
        "pass",
        STORIES,
    ),
    Mutant(
        "a version that is gone is granted",
        ROOM,
        "if missing := _why_not_kept(run, version)",
        'if missing := ""',
        STORIES,
    ),
    # ---- the outer step's numbers
    Mutant("relative clip is off", ROOM, "clip.norm if clip.relative is None else relative", "clip.norm", ROUND),
    Mutant(
        "relative clip takes the largest norm",
        ROOM,
        "clip.relative * median(norms)",
        "clip.relative * max(norms)",
        ROUND,
    ),
    Mutant("clip of what is short", ROOM, "limit is None or not norm > limit", "limit is None or norm > limit", ROUND),
    Mutant("clip the wrong way", ROOM, "tuple(s * (limit / norm) for s", "tuple(s * (norm / limit) for s", ROUND),
    Mutant(
        "mean over pushes, not tokens",
        ROOM,
        "shares[0].weight / sum(share.weight for share in shares)",
        "shares[0].weight / sum(100 for share in shares)",
        ROUND,
    ),
    Mutant(
        "weight upside down", ROOM, "push.counted / r.folded[0].counted", "r.folded[0].counted / push.counted", ROUND
    ),
    Mutant("the norm is that of the first fold", ROOM, "r.acc_sq = _order", "r.acc_sq = r.acc_sq or _order", ROUND),
    Mutant(
        "norm of the sum unscaled",
        ROOM,
        "scales[0] * _root(sum_in_order(acc_sq))",
        "_root(sum_in_order(acc_sq))",
        ROUND,
    ),
    Mutant("a mean that is not finite is applied", ROOM, "return isfinite(self.norm)", "return True", ROUND),
    Mutant("few norms are kept for the clip", ROOM, "DELTA_NORMS_KEPT = 50", "DELTA_NORMS_KEPT = 2", ROUND),
    # ---- rules
    Mutant("lengths pull the mean direction", ROOM, " * (first.norm / share.norm)", "", RULES),
    Mutant("softmax upside down", ROOM, "_exp_clamped(first.norm - share.norm)", "_exp_clamped(share.norm)", RULES),
    Mutant("more steps weigh less", ROOM, "share.norm / sqrt(max(1, share.inner_steps))", "share.norm", RULES),
    Mutant("embeddings go by directions", ROOM, "MEAN if merge.blocks_only and", "MEAN if False and", RULES),
    Mutant(
        "buffers' layers are blocks",
        ROOM,
        "any(part.isdigit() for part in l.name",
        "any(True for part in l.name",
        RULES,
    ),
    Mutant("noise is a direction", ROOM, "if acc_norm > LEAST_DIRECTION * agreed", "if acc_norm > 0", RULES),
    Mutant(
        "a flagged layer counts",
        ROOM,
        "if push.verdict is not None and layer in push.verdict.flagged:",
        "if False:",
        RULES,
    ),
    Mutant("a share keeps no momentum longer", ROOM, "r.momentum**r.share", "r.momentum", RULES),
    Mutant("who has no push is no part of a cycle", ROOM, "(cycle * clusters / len(known))", "cycle", RULES),
    Mutant("layers are never clipped", ROOM, "if limit is not None and norm > limit else s", "if False else s", RULES),
    Mutant(
        "rates beyond the table go on",
        ROOM,
        "min(log2(max(1, clusters)), len(BEST_RATES) - 1.0)",
        "log2(clusters)",
        RULES,
    ),
    # ---- the window
    Mutant("a push without tokens is folded", ROOM, "if push.tokens <= 0:", "if push.tokens < 0:", ROUND),
    Mutant("a slave's NaN is not believed", ROOM, "answer.finite and len(", "len(", ROUND),
    Mutant("ancestors are exempt, strangers scored", ROOM, "exempt=not ", "exempt=", ROUND),
    Mutant("a cluster's pace is forgotten", ROOM, "requested_at + interval_s +", "requested_at +", ROUND),
    Mutant("windows wait for whoever comes after them", ROOM, "push.due <= r.closes and", "True and", ROUND),
    Mutant("late is waited for", ROOM, "LATE_SHARE = 0.1 ", "LATE_SHARE = 5.0 ", ROUND),
    Mutant(
        "ranks that train on are late", ROOM, "run.moving_s(cluster), push.idle_s)", "run.moving_s(cluster))", ROUND
    ),
    Mutant("a push is due when its bytes are", ROOM, "run.moving_s(cluster) + idle_s", "run.moving_s(cluster)", ROUND),
    Mutant("a window is as long for fragments", ROOM, "+ IDLE_SHARE * min(idle_s, pace)", "", ROUND),
    Mutant(
        "whatever a cluster says holds a window", ROOM, "IDLE_SHARE * min(idle_s, pace)", "IDLE_SHARE * idle_s", ROUND
    ),
    Mutant("a window adapts without end", WINDOW, "min(_adapt(run, r), r", "max(_adapt(run, r), r", WINDOWS),
    Mutant("a window adapts back", WINDOW, "max(r.closes, min(", "max(0.0, min(", WINDOWS),
    Mutant(
        "a window adapts to a push that stands still",
        WINDOW,
        "if push.due and run.clusters[push.id.cluster].moving:",
        "if push.due:",
        WINDOWS,
    ),
    Mutant(
        "who has too few steps goes to this window",
        ROOM,
        "earliest = now + (least - member.since_push) * member.step_s",
        "earliest = now",
        PACE,
    ),
    Mutant(
        "a gap is the last one", ROOM, "= max(waiter.gap_s, now - waiter.asked_at)", "= now - waiter.asked_at", QUEUE
    ),
    Mutant("the last push is usual", ROOM, "NEWEST_SHARE if self.usual_tokens else 1.0", "1.0", QUEUE),
    Mutant("windows adapt to the last alone", WINDOW, "due - total / count <=", "due - r.opened <=", WINDOWS),
    Mutant("an arrival makes no window longer", ROUND_PY, "window.extend_window(run, r)", "pass", WINDOWS),
    Mutant("a grant makes no window longer", ROOM, "window.extend_open_window(run)", "pass", WINDOWS),
    Mutant("windows are half of a pace", ROOM, "WINDOW_SHARE = 0.05", "WINDOW_SHARE = 0.5", ROUND),
    Mutant("windows follow the slowest", ROOM, "pace = median(paces)", "pace = max(paces)", ROUND),
    Mutant(
        "tokens of a dead cluster's skipped push vanish",
        ROOM,
        'tokens["lost"] += push.tokens',
        'tokens["lost"] += 0',
        ROUND,
    ),
    Mutant("tokens are never settled", ROOM, "cluster.settled += push.tokens", "cluster.settled += 0", ROUND),
    # ---- pushes
    Mutant("a stale push seq opens", ROOM, "if event.push.seq <=", "if False and event.push.seq <=", PUSHES),
    Mutant("the last push seq opens again", ROOM, "event.push.seq <= cluster", "event.push.seq < cluster", PUSHES),
    Mutant(
        "ranks of a push without bound", ROOM + "/pushes.py", "<= event.ranks <= MAX_RANKS", "<= event.ranks", PUSHES
    ),
    Mutant(
        "a cluster settles another's ranges",
        ROOM,
        "if foreign := set(event.ranges)",
        "if foreign := set[int]()",
        PUSHES,
    ),
    Mutant("negative inner steps", ROOM, "event.tokens < 0 or event.inner_steps < 0", "event.tokens < 0", PUSHES),
    Mutant("tokens beyond what adds up", ROOM, "+ tokens <= MAX_TOKENS", "+ tokens <= 2 * MAX_TOKENS", PUSHES),
    Mutant("a base of the future is taken", ROOM, "event.base.round >= ", "event.base.round > ", PUSHES),
    Mutant("one push more than slots", ROOM, "else slots - len(", "else slots + 1 - len(", PUSHES),
    Mutant("tokens lead without bound", ROOM, "MOST_LEAD * tokens / (tokens + ", "MOST_LEAD * tokens / (1 + ", QUEUE),
    Mutant("no slot is kept", ROOM, "ahead = bisect_left(self.expected, waiter.place)", "ahead = 0", QUEUE),
    Mutant("a slot is kept without bound", ROOM, "min(most_kept_s, LATE * ", "max(0.0, LATE * ", QUEUE),
    Mutant("who overstays is lent to again", ROOM, "waiter.lends and not waiter.lent", "waiter.lends", QUEUE),
    Mutant("a slot is lent too long", ROOM, "w.asked_at + w.step_s < until", "False", QUEUE),
    Mutant(
        "a place outlives its incarnation",
        ROOM,
        "    run.slot_queue.leave_queue(cluster.name)\n    run.ranges",
        "    run.ranges",
        QUEUE,
    ),
    Mutant("a gap of the master makes clusters late", ROOM, "run.slot_queue.shift_times(event.gap_s)", "pass", QUEUE),
    Mutant("ask for a slot too late", ROOM, "min(longest, max(LEAST_RETRY_S", "max(longest, max(LEAST_RETRY_S", PUSHES),
    Mutant(
        "an old incarnation of a slave stages",
        ROOM,
        "if slave and slave.sinc == event.sinc else None",
        "if slave else None",
        PUSHES,
    ),
    Mutant(
        "a transfer outlives its deadline",
        ROOM,
        "push_deadlines.take_due(run.now)",
        "push_deadlines.take_due(run.now - 1e-9)",
        PUSHES,
    ),
    Mutant("a transfer that is awaited ends", ROOM, "run.now + transfer.deadline_s)", "transfer.deadline_s)", PUSHES),
    Mutant("one push's word keeps another", ROOM, "and transfer.id.seq == event.seq:", ":", PUSHES),
    Mutant(
        "a former incarnation's word keeps a push",
        ROOM + "/movement.py",
        "cluster is None or cluster.inc != event.inc:",
        "cluster is None:",
        PUSHES,
    ),
    Mutant(
        "a push that is given up keeps its slot",
        ROOM,
        "    end_superseded(run, cluster, event.push)",
        "    pass",
        PUSHES,
    ),
    # ---- pulls
    Mutant("a stale pull seq opens", ROOM, "if event.pull.seq <=", "if False and event.pull.seq <=", PUSHES),
    Mutant("the last pull seq opens again", ROOM, "event.pull.seq <= cluster", "event.pull.seq < cluster", PUSHES),
    Mutant(
        "ranks of a pull without bound", ROOM + "/pulls.py", "<= event.ranks <= MAX_RANKS", "<= event.ranks", PUSHES
    ),
    Mutant(
        "all pulls begin at one slave",
        ROOM,
        "first = run.transfers.pull_ranks",
        "first = 0 * run.transfers.pull_ranks",
        PUSHES,
    ),
    # ---- durability, rollback, drain
    Mutant("three failures before a disk is given up", ROOM, "FAILURES = 2", "FAILURES = 3", DISKS),
    Mutant("a disk that failed is tried at once", ROOM, "RETRY_S = 30.0", "RETRY_S = 0.0", DISKS),
    Mutant(
        "failures are counted for ever",
        ROOM,
        "d.failures, d.again_at = 0, 0.0",
        "d.failures, d.again_at = d.failures, 0.0",
        DISKS,
    ),
    Mutant("only the newest snapshot is kept", ROOM, "complete[-keep]", "complete[-1]", DISKS),
    Mutant(
        "a partial snapshot counts as complete",
        ROOM,
        "version.version > 0 and v.durable",
        "version.version > 0",
        DISKS,
    ),
    Mutant("roll back before all have spoken", ROOM, "if unasked:", "if False:", DISKS),
    Mutant("undone tokens stay accepted", ROOM, "tokens_accepted -= row.tokens", "tokens_accepted -= 0", DISKS),
    Mutant("undone tokens stay their cluster's", ROOM, ".ACCEPTED] -= tokens", ".ACCEPTED] -= 0", DISKS),
    Mutant("a slave with open orders is drained", ROOM, "orders = sum(", "orders = 0 * sum(", PUSHES),
    # ---- slaves
    Mutant("a slave may be unresponsive for longer", ROOM, "_ORDERS = 2", "_ORDERS = 3", OLD),
    Mutant("a snapshot of the next round is no alarm", ROOM, "if newest >= ", "if newest > ", OLD),
    Mutant("a later term is no alarm", ROOM, "event.term_seen > ", "event.term_seen > 1 + ", OLD),
    # ---- a gap of the master
    Mutant("Blind moves no transfer deadline", ROOM, "run.transfers.shift_times(event.gap_s)", "pass", BLIND),
    Mutant("Blind moves no window", ROOM, "round.closes += ", "round.closes += 0 * ", BLIND),
    Mutant("Blind counts as a cluster's pace", ROOM, "requested_at += ", "requested_at += 0 * ", BLIND),
    Mutant("Blind counts as the run's time", ROOM, "started += ", "started += 0 * ", BLIND),
    Mutant("Blind shortens the pause of a disk", ROOM, "again_at += ", "again_at += 0 * ", BLIND),
    # ---- liveness
    Mutant("a heartbeat of an old incarnation renews a lease", ROOM, "known.inc != ", "None is ", JUDGE),
    Mutant(
        "a heartbeat of a slave's old incarnation renews its lease",
        ROOM + "/membership.py",
        "known.sinc != ",
        "None is ",
        JUDGE,
    ),
    Mutant("a lease does not move with a gap", ROOM, "cluster.heard_at += ", "cluster.heard_at += 0 * ", JUDGE),
    Mutant("a gap counts as a hang", ROOM, "cluster.progressed_at += ", "cluster.progressed_at += 0 * ", JUDGE),
    Mutant("a slave's lease does not move with a gap", ROOM, "slave.heard_at += ", "slave.heard_at += 0 * ", JUDGE),
    Mutant(
        "a cluster's lease ends late", ROOM, "now - cluster.heard_at >= lease", "now - cluster.heard_at > lease", JUDGE
    ),
    Mutant("a slave's lease ends late", ROOM, "now - slave.heard_at >= lease", "now - slave.heard_at > lease", JUDGE),
    Mutant("a trainer hangs late", ROOM, "cluster.progressed_at >= self", "cluster.progressed_at > self", JUDGE),
    # ---- claims
    Mutant("tokens are believed at once", ROOM, "if settled.tokens + tokens > told.tokens:", "if False:", CLAIMS),
    Mutant("what was settled is told for ever", ROOM, "settled.inner_steps + inner_steps >", "inner_steps >", CLAIMS),
    Mutant("a later report forgets the earlier", ROOM, "max(self.tokens, tokens)", "tokens", CLAIMS),
    Mutant("the impossible is possible", ROOM, "        if claimed > most:", "        if False:", CLAIMS),
    Mutant("time counts from the Join for ever", ROOM, "cluster.works_since = push.opened_at", "pass", CLAIMS),
    Mutant("a base needs no row", ROOM, "if not run.has_row(event.base):", "if False:", CLAIMS),
    Mutant("v0 has any round", ROOM, "GENESIS.version < version.version <", "version.version <", CLAIMS),
    Mutant("any seq is believed", ROOM, "if seq > highest + MOST_AHEAD:", "if False:", CLAIMS),
    Mutant("any register is believed", ROOM, "        if got > most:", "        if False:", CLAIMS),
    Mutant("a slave believes any term", "dips/slave", "if term > self.term + MOST_TERMS_AHEAD:", "if False:", CLAIMS),
    Mutant("an order raises the term", "dips/slave", "        if order.term > self.term:", "        if False:", CLAIMS),
    Mutant("another process of a slave counts", ROOM, "if event.rival_heard_s >= silent_s:", "if True:", CLAIMS),
    Mutant("a slave that starts again waits", ROOM, "(event.nonce, event.former_nonce)", "(event.nonce,)", CLAIMS),
    # ---- penalty
    Mutant(
        "any norm enters the reference whole",
        ROOM,
        "min(value, max(known, MOST_TIMES_ENTERED * mean))",
        "value",
        PENALTY,
    ),
    Mutant("the reference does not move", ROOM, "1.0 / (count + 1)) *", "1.0 / (count + 1)) * 0.0 *", PENALTY),
    Mutant("a warm-up forgets the reference", ROOM, "max(row.reference, others", "max(0.0, others", PENALTY),
    Mutant("any number of inner steps is believed", ROOM, "if row.steps <= 0:", "if True:", PENALTY),
    Mutant("what is not finite quarantines nobody", ROOM, "if not verdict.evidence.finite:", "if False:", PENALTY),
    Mutant("a broken cluster comes back by itself", ROOM, "if gates and past.row.broken:", "if False:", PENALTY),
    Mutant("threshold half as much again", ROOM, "options.beta * min(", "1.5 * options.beta * min(", PENALTY),
    Mutant("the moving average never begins", ROOM, "weight = max(alpha, 1.0 / n)", "weight = 1.0 / n", PENALTY),
    Mutant(
        "norms are compared with the largest",
        ROOM,
        "return low if count % 2 else",
        "return self.ordered[-1] or",
        PENALTY,
    ),
    Mutant("norms are compared with themselves", ROOM, "self.ordered[i + (i >= skip)]", "self.ordered[i]", INDEXES),
    Mutant("variance never fades", ROOM, "(1.0 - alpha) * sigma**2", "sigma**2", PENALTY),
    Mutant("warm-up for ever", ROOM, "row.warm_left - 1", "row.warm_left", PENALTY),
    Mutant("an outlier moves the mean in full", ROOM, "x = min(g, row.mu", "x = max(g, row.mu", PENALTY),
    Mutant(
        "half of the clusters is most of them", ROOM, "len(gating) > len(live)", "len(gating) >= len(live)", PENALTY
    ),
    Mutant("sigma without correction", ROOM, "row.sigma * spread_factor(row.n, options.alpha)", "row.sigma", PENALTY),
    Mutant("residuals as if the mean were known", ROOM, "(1.0 - weight) ** 2 * (1.0 + of_mean)", "1.0", PENALTY),
    Mutant("a normal's quantile for few pushes", ROOM, " * student_quantile(freedom) / NORMAL_", " / 1 or ", PENALTY),
    Mutant("sigma without floor", ROOM, "options.sigma_floor if row.n > 1 else 1.0", "0.0", PENALTY),
    Mutant("a joiner's cap is the wide one", ROOM, "if is_joiner(row, options) and (", "if 0 and (", PENALTY),
    Mutant("a young run never believes the world", ROOM, "if is_world and self._is_joiner(row):", "if 0:", PENALTY),
    Mutant("a formed run believes the world", ROOM, "if is_world and self._is_joiner(row):", "if is_world:", PENALTY),
    Mutant("who left is compared with", ROOM, " or picture.is_alone(row.cluster)", "", PENALTY),
    Mutant("a quiet history gates everybody", ROOM, "max(1.0, largest)", "max(0.0, largest)", PENALTY),
    Mutant("a loud history gates nobody", ROOM, "min(options.e_cap, ", "max(options.e_cap, ", PENALTY),
    Mutant("a norm over steps, not their root", ROOM, "self.layer_sq)) / sqrt(", "self.layer_sq)) / (", PENALTY),
    Mutant(
        "cap of the genesis grows with steps",
        ROOM,
        "return genesis_norm / sqrt(",
        "return genesis_norm * sqrt(",
        PENALTY,
    ),
    # ---- gates
    Mutant(
        "who is flagged alone is gated",
        ROOM,
        "return push.witnesses < max(enough",
        "return 0 * max(enough",
        GATES,
    ),
    Mutant("a sum at odds with itself gates", ROOM, "    if push.split:", "    if False:", GATES),
    Mutant("a few outvote many", ROOM, "if push.against >= push.others:", "if False:", GATES),
    Mutant("two of nine are enough", ROOM, "push.clusters // WRONG_SHARE + 1", "0", GATES),
    Mutant("stale pushes are witnesses", ROOM, "return self.others - self.strangers", "return self.others", GATES),
    Mutant(
        "the fresh are strangers", ROOM, "sum(not p.base == push.base == run.head", "sum(p.base == push.base", GATES
    ),
    Mutant("others of no one mind gate", ROOM, "if push.usual < LEAST_USUAL:", "if False:", GATES),
    Mutant("noise is out of line", ROOM, "LEAST_COSINE = -0.1", "LEAST_COSINE = 0.0", GATES),
    Mutant("who was gated counts alone", ROOM, "if convicted and lacks_witnesses(push)", "if False", GATES),
    Mutant("who waits in vain is locked out", ROOM, "KEPT_UNHEARD = 0.75", "KEPT_UNHEARD = 1.0", GATES),
    Mutant("suspects are trusted", ROOM, "c != cluster and not is_suspect(self", "c != cluster and bool(self", GATES),
    Mutant("foreign is good enough of suspects", ROOM, "foreign = SHARE_OF_USUAL * push.usual", "foreign = 0.0", GATES),
    Mutant("who does not train is trusted", ROOM, "    if verdict.is_unmoved:\n", "    if False:\n", GATES),
    Mutant("a norm of 0 warms up", ROOM, "if verdict.is_unmoved or (", "if (", GATES),
    Mutant("who was better must stay so", ROOM, "(1.0 + max(0.0, usual)) * (1.0 +", "(1.0 + usual) * (1.0 +", GATES),
    Mutant("a cosine without lengths", ROOM, "return self.dot / lengths if", "return self.dot if", GATES),
    Mutant("who waits is measured in any order", ROOM, "push = min(r.held, key=", "push = max(r.held, key=", GATES),
    Mutant("who waits keeps its slot", ROOM, "free <= 0 and run.slot_queue", "False and run.slot_queue", GATES),
    Mutant("a skipped round loses who waits", ROOM, "*held_pushes.let_go(r), *run", "*run", GATES),
    Mutant("suspects are measured like others", ROOM, "if is_suspect(row):", "if False:", GATES),
    Mutant("who was gated accuses the others", ROOM, "        if settled.verdict.accepted:", "        if True:", GATES),
    Mutant("two losses are enough to gate", ROOM, "if len(others) < LEAST_OTHERS:", "if False:", GATES),
    Mutant("a loss has no usual distance", ROOM, "return (1.0 + max(0.0, usual)) * (", "return (", GATES),
    Mutant(
        "losses of joiners count",
        ROOM,
        "if row.loss is not None and not is_joiner(row, past.options)]",
        "if row.loss is not None]",
        GATES,
    ),
    Mutant(
        "any number of tokens counts",
        ROOM,
        "min(push.tokens, most)",
        "push.tokens",
        "tests/unit/protocol/test_hostile_clusters.py",
    ),
    Mutant(
        "a cluster leases all ranges",
        ROOM,
        "range(min(count, room, self.free))",
        "range(min(count, self.free))",
        HOSTILE,
    ),
    Mutant(
        "a cluster claims all ranges",
        ROOM,
        "if self._free.remove_number(r)), room))",
        "if self._free.remove_number(r)), 99))",
        HOSTILE,
    ),
    Mutant(
        "what others hold counts as gone",
        ROOM,
        "not taken and book.is_exhausted(cluster.name, cluster.inc)",
        "not taken",
        HOSTILE,
    ),
    Mutant(
        "nobody waits for ranges of others",
        ROOM,
        "if not event.claims and (waits :=",
        "if False and (waits :=",
        HOSTILE,
    ),
    Mutant(
        "who holds ranges waits for others",
        ROOM,
        "(lease is not None and (lease.ranges or seq <= lease.seq))",
        "False",
        HOSTILE,
    ),
    Mutant(
        "what a cluster trained does not count for its ranges",
        ROOM,
        "run.ranges.note_used(push.id.cluster, len(push.ranges))",
        "pass",
        HOSTILE,
    ),
    Mutant(
        "one push makes tokens usual",
        ROOM,
        "if len(tokens) >= TOKENS_KEPT]",
        "if tokens]",
        "tests/unit/protocol/test_hostile_clusters.py",
    ),
    Mutant("a gated loss is forgotten", ROOM, "row = replace(row, loss=bound_loss(loss))", "pass", GATES),
    Mutant("a gated loss teaches", ROOM, "if not verdict.accepted or excess is None:", "if excess is None:", GATES),
    Mutant(
        "who always was unlike is not shown",
        ROOM,
        "for by, said in run.penalty.find",
        "for by, said in {} and run.penalty.find",
        GATES,
    ),
    Mutant(
        "who has no like is shown as unlike", ROOM, "if usual >= LEAST_USUAL and row.cosine <", "if row.cosine <", GATES
    ),
    Mutant(
        "what is usual is not learned",
        ROOM,
        "row.loss_shift if row.losses >= LEARNED else",
        "row.loss_shift if True else",
        GATES,
    ),
    Mutant(
        "nothing is learned in the first warm-up",
        ROOM,
        "return known if len(known) >= LEAST_OTHERS else [",
        "return known if True else [",
        GATES,
    ),
    Mutant("one rise of a loss is enough", ROOM, "    if not past.row.loss_rises:", "    if False:", GATES),
    Mutant(
        "whom another gate keeps out has risen", ROOM, "if verdict.accepted or verdict.gate is", "if True or", GATES
    ),
    Mutant("other data is out of line", ROOM, "    if is_unlike(push):\n", "    if False:\n", GATES),
    Mutant("who turns must stay opposite", ROOM, "push.own - TURNED)", "push.own - 3 * TURNED)", GATES),
    Mutant(
        "who is flagged makes it usual",
        ROOM,
        "or lacks_witnesses(push) or is_against(push):",
        "or lacks_witnesses(push):",
        GATES,
    ),
    Mutant(
        "only the opposite is out of line",
        ROOM,
        "max(LEAST_COSINE, min(push.own - TURNED, foreign)) if",
        "LEAST_COSINE if",
        GATES,
    ),
    Mutant(
        "who was unlike has no second push",
        ROOM,
        "(is_unlike(push) or cosine >= LEAST_COSINE):",
        "cosine >= LEAST_COSINE:",
        GATES,
    ),
    Mutant(
        "a turn while all turn is out of line",
        ROOM,
        "min(push.own - TURNED, foreign)) if",
        "push.own - TURNED) if",
        GATES,
    ),
    Mutant("one turn is enough", ROOM, "if not suspect and (is_unlike(push)", "if False and (is_unlike(push)", GATES),
    Mutant("joiners are held to the others' cosines", ROOM, "        return LEAST_LEARNING", "        pass", GATES),
    Mutant("digests pile up", ROOM, "*made)[-DIGESTS_KEPT:]", "*made)", GATES),
    Mutant(
        "a late push is held to its whole length", ROOM, "for norm in (g, push.own_norm)", "for norm in (g, g)", GATES
    ),
    Mutant(
        "what theta moved is of one inner step",
        ROOM,
        "self.moved / sqrt(max(1, self.inner_steps))",
        "self.moved",
        GATES,
    ),
    Mutant(
        "only the last step counts as moved", ROOM, "moved, version = moved + step,", "moved, version = step,", MOVED
    ),
    Mutant(
        "an unknown step is none",
        ROOM,
        "                return 0.0\n            moved,",
        "                break\n            moved,",
        MOVED,
    ),
    Mutant(
        "layers move together",
        ROOM,
        "norm = sum(map(sqrt, squares))",
        "norm = sqrt(sum(squares))",
        MOVED,
    ),
    Mutant("modules are no layers", ROOM, "if self.layers is LayerUnit.BLOCK", "if True", GROUPS),
    Mutant("a module is its block", ROOM, 'parameter.rpartition(".")', 'parameter.partition(".")', GROUPS),
    Mutant("what was pulled counts as trained", ROOM, "(theta_digest,) if theta_digest else ()", "()", GATES),
    Mutant("a layer that is left out teaches", ROOM, "if place not in flagged:", "if True:", GATES),
    Mutant("a layer is left out for ever", ROOM, "elif layer.left_out_in_a_row + 1 >= patience:", "elif False:", GATES),
    Mutant("a push without a layer left counts", ROOM, "if len(flagged) == moving:", "if False:", GATES),
    Mutant("no warm-up for layers", ROOM, "past.row.warm_left > 0 or push.exempt or", "push.exempt or", GATES),
    Mutant("a direction that is out of line warms up", ROOM, "verdict.gate not in OF_NORMS):", "False):", GATES),
    Mutant("history of one round", ROOM, "[-self._options.history :]", "[-1:]", PENALTY),
    Mutant(
        "patience one round longer", ROOM, "gated_in_a_row < self._options", "gated_in_a_row <= self._options", PENALTY
    ),
    # ---- studies
    Mutant("a row with a fault is recommended", STUDY, "== asked and not _faults_of(of)]", "== asked]", STUDIES),
    Mutant("a row of another question is recommended", STUDY, "if _question_of(of) == asked and", "if", STUDIES),
    Mutant(
        "a row that ended early is recommended", STUDY, 'and all(numbers["finished"] for', "and all(True for", STUDIES
    ),
    Mutant(
        "gated pushes of one seed are told",
        STUDY,
        "    for numbers in runs:\n        by.update(",
        "    for numbers in runs[:1]:\n        by.update(",
        STUDIES,
    ),
    # ---- what is found without a look at everything
    Mutant("a time that was moved counts still", ROOM, "if at.get(name) == when:", "if name in at:", INDEXES),
    Mutant("stale times pile up", ROOM, "> 2 * len(self.at) + STALE_KEPT", "> 10**9", INDEXES),
    # ---- data ranges
    Mutant("a lease is asked again and grows", ROOM, "if seq <= lease.seq", "if seq < lease.seq", DATA),
    Mutant("freed ranges come last", ROOM, "number = self.begins[0]", "number = self.begins[-1]", DATA),
    Mutant("data is used up while leased", ROOM, "not self.free and not self.leased", "not self.free", DATA),
    Mutant("a claim of what is leased", ROOM, "or self.begins[i] > number:", "or False:", INDEXES),
    Mutant("freed ranges never join", ROOM, "joins_left = i > 0 and", "joins_left = False and", INDEXES),
    Mutant("the committed push's ranges are freed", ROOM, "if r not in kept]", "if True]", DATA),
    Mutant("the committed push's begun range is freed", ROOM, "(*self.ranges, self.begun.number)", "self.ranges", DATA),
    Mutant("who goes on with a range begins anew", ROOM, "if r in self.begun)", "if False)", DATA),
    Mutant("a part that is all of it", ROOM, "if not 0 < begun.done < begun.of:", "if not 0 < begun.done:", DATA),
    # ---- order, pace, deadlines
    Mutant("all workers begin where they are", ROOM, "(worker + turn) % slaves", "(turn) % slaves", ORDER),
    Mutant("a slave's line runs backwards", ROOM, "(slave - worker) % slaves", "(slave + worker) % slaves", ORDER),
    Mutant("begin at a slave with hardly any link left", ROOM, "LEAST_SHARE = 0.5 ", "LEAST_SHARE = 0.01 ", ORDER),
    Mutant("meet after the meeting", ROOM, "begin = self._anchor - ", "begin = self._anchor + ", PACE),
    Mutant("push as if nobody trained on", ROOM, "min(moving_s + self.idle_s, ", "min(moving_s, ", PACE),
    Mutant(
        "who trains on less long begins as early",
        ROOM,
        "(member.bytes_per_s, member.idle_s)",
        "(member.bytes_per_s, before.idle_s)",
        PACE,
    ),
    Mutant("shortest push first", ROOM, "(-durations[name], name)", "(durations[name], name)", PACE),
    Mutant("the period leaps", ROOM, "MOST_CHANGE = 1.25", "MOST_CHANGE = 12.5", PACE),
    Mutant(
        "a gap moves the grid off its clusters",
        ROOM,
        "self.period_s * (gap_s // self.period_s)",
        "gap_s",
        PACE,
    ),
    Mutant("whoever is late comes anyway", ROOM, "LATE_SHARE = 0.25", "LATE_SHARE = 0.99", PACE),
    Mutant("no slack in a deadline", ROOM, "SLACK = 3.0", "SLACK = 1.0", TIMES),
    Mutant("the newest heartbeat decides", ROOM, "NEWEST_SHARE = 0.3", "NEWEST_SHARE = 0.9", TIMES),
    Mutant("an old measurement bars a link for ever", ROOM, " or measured_s_ago >= timing.transfer_s", "", TIMES),
    Mutant(
        "archived versions are retired",
        "dips/protocol/durability.py",
        "_archived_versions(run.options, complete)",
        "()",
        "tests/unit/protocol/test_archive.py",
    ),
    Mutant(
        "archived versions pile up",
        "dips/protocol/durability.py",
        "[-options.keep_most :]",
        "",
        "tests/unit/protocol/test_archive.py",
    ),
    # ---- operators
    Mutant(
        "a question that is asked again has another row", ROOM, "Pending) and not changed", "Failed) and False", STORIES
    ),
    Mutant("who is denied fills the ledger", ROOM, "run.denied_rows if event.refused else None", "None", STORIES),
    Mutant("a gate by an operator tries the patience", ROOM, "and not s.verdict.held", "", HELD),
    Mutant("a tuned gate judges as before", ROOM, "run.penalty.change_options(options.penalty)", "pass", TUNED),
    Mutant("an expelled cluster goes on", ROOM, "cluster is not None and cluster.live:", "False:", STORIES),
)
