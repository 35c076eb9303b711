"""Mutants of the shard, its memory and its disk (dips/slave, dips/outer)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM, OUTER = "dips/slave", "dips/outer"
SHARD = " ".join(f"tests/unit/slave/test_shard_{part}.py" for part in ("rounds", "orders", "transfers", "registration"))
REGISTRATION = "tests/unit/slave/test_registration.py"
DISK = "tests/unit/slave/test_bites_disk.py tests/unit/slave/test_snapshots.py"
RECEIVER = "tests/unit/slave/test_bites_receiver.py tests/unit/slave/test_receiver.py"
STAGGERED = "tests/unit/slave/test_staggered_push.py"
SENDER = "tests/unit/slave/test_bites_sender.py tests/unit/slave/test_sender.py"
HELLOS = "tests/unit/slave/test_hostile_hellos.py"
KERNELS = "tests/unit/outer/test_kernels.py"
MIRROR = "tests/unit/slave/test_mirror.py"
RULES = "tests/unit/protocol/test_rules.py"
STEP = "dips/outer_step.py"
AVERAGED = "tests/unit/outer/test_averaged_layers.py"
UPDATES = "tests/unit/outer/test_updates.py"
VERSIONS = "tests/unit/outer/test_bites_versions.py tests/unit/outer/test_versions.py"

LAST = "tests/unit/slave/test_last_process.py"
POWER = "tests/unit/slave/test_power_cut.py"
REBALANCE = "tests/unit/commands/test_rebalance.py"

OLDER = "tests/unit/outer/test_older_versions.py"

MUTANTS = (
    Mutant(
        "a pull that is opened while the flow ends holds it",
        ROOM,
        'self._sender.close_all("the data flow ends")  # the shard',
        "pass  # the shard",
        "tests/integration/test_flow.py::test_a_pull_that_is_opened_while_the_flow_ends_does_not_hold_it",
    ),
    # ---- older versions
    Mutant(
        "a version has the digest of the one before",
        OUTER,
        "theta_next.view(np.uint32)",
        "theta.view(np.uint32)",
        KERNELS,
    ),
    Mutant(
        "a version is measured before it is rounded",
        OUTER,
        "measures = self._kernel_pool.measure(head.bank.arrays, theta_next.arrays)",
        "pass",
        UPDATES,
    ),
    # ---- registration
    Mutant("a copied directory proves who held it", ROOM, "inode == self._lock.stat().st_ino", "inode != 0", LAST),
    Mutant("a name of any length is told", ROOM, "len(nonce) <= NONCE_CHARS", "len(nonce) <= 1 << 20", LAST),
    # ---- updates
    Mutant("what rounding leaves over is lost", STEP, "return (1 - a) / (lr * e * a)", "return 0.0", UPDATES),
    Mutant(
        "what rounding leaves over comes twice",
        STEP,
        "return (1 - a) / (lr * e",
        "return 2 * (1 - a) / (lr * e",
        UPDATES,
    ),
    Mutant("a read update is written over", OUTER, "if not update.pulls]", "]", UPDATES),
    Mutant("slow readers take the last buffer", OUTER, "> self._count - WRITTEN:", "> self._count:", UPDATES),
    Mutant(
        "an aborted update is published",
        OUTER,
        "        self._updates.drop_update()\n        if",
        "        if",
        UPDATES,
    ),
    Mutant(
        "an update that is not finite is zeros", OUTER, "step = np.float32(np.nan)", "step = np.float32(0)", UPDATES
    ),
    Mutant(
        "updates for whoever holds anything",
        ROOM,
        "if held in begins else ()",
        "if held in begins else self.chain",
        SENDER,
    ),
    Mutant(
        "an offer of updates to a rank without a version is taken",
        "dips/client/rank",
        "if welcome.depth and self._order.held is None:",
        "if False:",
        "tests/integration/test_updates.py",
    ),
    Mutant(
        "a pull begins with what a push left",
        "dips/client/rank",
        "self._feedback.restore_base() if",
        "self._feedback._version if",
        "tests/unit/client/rank/test_shard_transfer.py",
    ),
    # ---- buffers
    Mutant("buffers are stepped", ROOM + "/shard.py", "if layer.averaged)", "if False)", SHARD),
    Mutant("buffers weigh by a rule", OUTER, "weight if layer in self.layers else", "weight if False else", RULES),
    Mutant("a layer that nobody made moves", STEP, "if scale == 0.0:", "if False:", RULES),
    Mutant("a first push counts where it is flagged", OUTER, "if weights[i] == 0.0:", "if False:", RULES),
    Mutant("a mean forgets a weight", OUTER, "self._weights += weight", "pass", AVERAGED),
    Mutant("an aborted round's weights count", OUTER, "self._weights = 1.0", "self._weights += 1.0", AVERAGED),
    Mutant("a norm contains buffers", OUTER, "if layer in self.layers and isfinite(square)", "if False", AVERAGED),
    # ---- slaves come and go
    Mutant(
        "a rebalance is no incarnation",
        "dips/protocol/rebalancing.py",
        "known.get(name, 0) + 1",
        "known.get(name, 0)",
        REBALANCE,
    ),
    Mutant(
        "a rebalanced snapshot is not read back",
        ROOM + "/rebalance.py",
        "    read_through(path, manifest, report)",
        "    pass",
        REBALANCE,
    ),
    Mutant(
        "an unmoved snapshot is not read",
        "dips/commands/rebalancing.py",
        "read_through(path, kept[name], report)",
        "pass",
        REBALANCE,
    ),
    Mutant(
        "a staged snapshot is not offered",
        ROOM + "/snapshots.py",
        "            found.update(staged_versions(self._directory))",
        "            pass",
        REBALANCE,
    ),
    Mutant(
        "older versions are not retired by a rebalance",
        "dips/protocol/rebalancing.py",
        "if not v.retired and v.version",
        "if v.retired and v.version",
        REBALANCE,
    ),
    # ---- what a HELLO may name
    Mutant("a HELLO names more than there is", "dips/wire", "if named > most", "if named > most << 9", HELLOS),
    Mutant("a HELLO names what is not here", ROOM, " if misfit else None", " if False else None", HELLOS),
    Mutant(
        "ranges have no budget", ROOM, "if (room := MOST_RANGES - self._ranges) < len(pieces):", "if False:", HELLOS
    ),
    Mutant(
        "a push that never has room comes again",
        ROOM,
        "if push.ranges + len(pieces) > MOST_RANGES:",
        "if False:",
        HELLOS,
    ),
    Mutant(
        "two pushes without room wait for each other",
        ROOM,
        "moves = self._make_room(push, len(pieces))",
        "pass",
        HELLOS,
    ),
    Mutant("the budget is never given back", ROOM, "self._ranges -= len(stream.pieces)", "pass", HELLOS),
    Mutant("streams of pulls have no budget", ROOM, "len(self._latest) >= MOST_STREAMS", "False", HELLOS),
    Mutant(
        "what is rotten is told once",
        ROOM,
        "        if rotten:\n            self._list",
        "        if False:\n            self._list",
        MIRROR,
    ),
    Mutant(
        "all above the oldest comes back",
        ROOM,
        "newest = max((v.round for v in on_disk)",
        "newest = min((v.round for v in on_disk)",
        MIRROR,
    ),
    Mutant("a second damaged one stops a restore", ROOM, "shutil.rmtree(kept, ignore_errors=True)", "pass", MIRROR),
    Mutant(
        "what a promotion discards takes room", ROOM + "/staged_snapshots.py", "shutil.rmtree(aside)", "pass", POWER
    ),
    Mutant("layers that are learned change nothing", ROOM, "self._plan.list_again()", "pass", MIRROR),
    # ---- what is durable
    Mutant("a copy is blessed by an older manifest", ROOM, "store.remove_path(folder)", "pass", POWER),
    Mutant("what comes back is not fsynced", ROOM + "/mirror_copy.py", "os.fsync(file.fileno())", "pass", POWER),
    Mutant(
        "the manifest stays in a buffer",
        ROOM + "/snapshot_files.py",
        "        file.flush()\n        os.fsync",
        "        os.fsync",
        POWER,
    ),
    Mutant(
        "a staged name is not fsynced",
        ROOM,
        "aside.rename(staged)\n    sync_path(aside.parent)",
        "aside.rename(staged)",
        POWER,
    ),
    Mutant(
        "a promoted name is not fsynced",
        ROOM,
        "staged_path(directory, version).rename(path)\n    sync_path(directory)",
        "staged_path(directory, version).rename(path)",
        POWER,
    ),
    Mutant(
        "a directory that was made is not fsynced",
        "dips/fsync.py",
        "sync_path(path.parent)\n\n\n@",
        "pass\n\n\n@",
        POWER,
    ),
    Mutant(
        "bytes that are not the ledger's are rebalanced",
        ROOM,
        "if ours and digests.get((version.round, slave), digest := manifest_digest(path)) == digest:",
        "if ours:",
        POWER,
    ),
    Mutant(
        "what is kept takes a name that is taken",
        ROOM,
        "next(name for name in names if not name.exists())",
        "next(name for name in names)",
        REBALANCE,
    ),
    Mutant(
        "glibc writes what cannot be reserved",
        ROOM + "/tensorfile.py",
        "while _LIBC.fallocate(fd, 0, 0, size) != 0:",
        "while os.posix_fallocate(fd, 0, size):",
        "tests/unit/slave/test_reserved_room.py",
    ),
    Mutant(
        "the model is not fsynced", ROOM + "/tensorfile.py", "        os.fsync(file.fileno())", "        pass", DISK
    ),
    Mutant("the manifest is not fsynced", ROOM + "/snapshot_files.py", "os.fsync(file.fileno())", "pass", DISK),
    Mutant("the names in a snapshot are not fsynced", ROOM, "sync_path(path)", "pass", DISK),
    Mutant(
        "the rename is not fsynced",
        ROOM,
        "aside.rename(path)\n        sync_path(self._directory)",
        "aside.rename(path)",
        DISK,
    ),
    Mutant(
        "the removal is not fsynced",
        ROOM,
        "path.rename(aside)\n                sync_path(self._directory)",
        "path.rename(aside)",
        DISK,
    ),
    Mutant("fsync of a directory does nothing", "dips/fsync.py", "os.fsync(descriptor)", "pass", DISK),
    # ---- mirrors
    Mutant("rot is copied", ROOM, "            if found != expected:", "            if False:", MIRROR),
    Mutant("another run's copy is taken", ROOM, "(run, slave, version):", "(manifest.run, slave, version):", MIRROR),
    Mutant(
        "old copies go before the new one is whole",
        ROOM,
        "if self._wanted[-1] not in self._held:",
        "if self._wanted[-1] not in self._held and all(v in self._wanted for v in self._held):",
        MIRROR,
    ),
    Mutant(
        "a copy of other layers is a copy",
        ROOM,
        "if layers is not None and held != sorted(layers):",
        "if False:",
        MIRROR,
    ),
    Mutant(
        "what was listed is forgotten first",
        ROOM,
        "self._list_due = True\n\n    def on_done",
        "self._held = None\n\n    def on_done",
        MIRROR,
    ),
    Mutant(
        "an empty disk registers while its mirror fails",
        ROOM,
        "        if work.on_disk or work.look_for:",
        "        if True:",
        "tests/unit/slave/test_registration.py",
    ),
    Mutant(
        "a mirror beats a newer disk", ROOM, "(version.round < newest and version not in look_for)", "False", MIRROR
    ),
    # ---- what is believed
    Mutant(
        "the digest of θ is not checked at Load",
        ROOM,
        'if found != expected:\n        raise CorruptSnapshot(\n            f"{reader.path}',
        'if found != expected and prefix != THETA:\n        raise CorruptSnapshot(\n            f"{reader.path}',
        DISK,
    ),
    Mutant(
        "the digest of m is not checked at Load",
        ROOM,
        'if found != expected:\n        raise CorruptSnapshot(\n            f"{reader.path}',
        'if found != expected and prefix != MOMENTUM:\n        raise CorruptSnapshot(\n            f"{reader.path}',
        DISK,
    ),
    Mutant(
        "the initial model is not checked",
        ROOM,
        "if (found := digest_of(flat)) != expected:",
        "if not (found := digest_of(flat)):",
        DISK,
    ),
    Mutant(
        "another slave's snapshot is loaded",
        ROOM + "/snapshots.py",
        "(manifest.run, manifest.slave, manifest.version) != mine",
        "(manifest.run, manifest.version) != (self._run, version)",
        DISK,
    ),
    Mutant("a model file of another size is whole", ROOM, "if size != manifest.size:", "if False:", DISK),
    Mutant(
        "a snapshot of other layers is loaded",
        ROOM,
        "if found != expected:\n            raise",
        "if False:\n            raise",
        DISK,
    ),
    Mutant(
        "another slave takes the directory",
        "dips/pidlock.py",
        "fcntl.LOCK_EX",
        "fcntl.LOCK_SH",
        "tests/unit/test_pidlock.py",
    ),
    # ---- fences
    Mutant("orders of an old term are obeyed", ROOM, "if term < self.term:", "if False:", SHARD),
    Mutant("orders to an old incarnation are obeyed", ROOM, "if order.sinc != self.sinc:", "if False:", SHARD),
    Mutant(
        "an answer of the term before is given again",
        ROOM,
        "            self._answers.clear()",
        "            pass",
        SHARD,
    ),
    Mutant("another order under the same number", ROOM, "if body != order.body:", "if False:", SHARD),
    Mutant(
        "an order forgotten is carried out again", ROOM, "if order.number <= self._forgotten and", "if False and", SHARD
    ),
    Mutant(
        "a Busy order is forgotten",
        ROOM,
        "self._forgotten and order.number not in self._begun:",
        "self._forgotten:",
        SHARD,
    ),
    Mutant(
        "a heartbeat's answer of an old term is believed",
        ROOM,
        "answer.live is None or answer.term < ",
        "answer.live is None or None is ",
        SHARD,
    ),
    # ---- the shard's round
    Mutant(
        "a push is measured against another version",
        ROOM,
        "if self.versions.served_version != order.version:",
        "if False:",
        SHARD,
    ),
    Mutant("a push is folded unmeasured", ROOM, "if known.measured != order.round:", "if False:", SHARD),
    Mutant("a served version is retired", ROOM, "if needed:", "if False:", SHARD),
    Mutant("an old round begins again", ROOM, "if round_ < self._last", "if False and round_ < self._last", SHARD),
    Mutant("a committed round is aborted", ROOM, "memory.round == order.round", "False", SHARD),
    Mutant(
        "a late persist's answer crosses terms",
        ROOM,
        "if order.term == self.term:",
        "if True:",
        SHARD,
    ),
    Mutant(
        "an order overtakes the load before it", ROOM, "if isinstance(order.body, NEED_A_VERSION):", "if False:", SHARD
    ),
    Mutant("what is being loaded is deleted", ROOM, ", self.versions.loading}", "}", SHARD),
    Mutant("room that is being made is no room", ROOM, "            if self.deleting:", "            if False:", SHARD),
    Mutant("poison is forgotten", ROOM, 'self.poison = f"{what} failed', 'self.reason = f"{what} failed', SHARD),
    Mutant(
        "a tombstone below its transfer",
        ROOM,
        "return (transfer.inc, transfer.seq) <= self",
        "return (transfer.inc, transfer.seq) < self",
        SHARD,
    ),
    Mutant("a list outlives its registration", ROOM, "self._list_of == came_under:", "True:", REGISTRATION),
    Mutant("heal drops what the list cannot know", ROOM, "if known.opened <= as_of and", "if", SHARD),
    # ---- pushes in
    Mutant(
        "an old epoch comes back to a push",
        ROOM,
        "if name.epoch <= known.epoch:",
        "if name.epoch < known.epoch:",
        RECEIVER,
    ),
    Mutant(
        "a chunk in another codec",
        ROOM,
        "if header.dtype is not stream.push.codec.dtype:",
        "if False:",
        RECEIVER,
    ),
    Mutant(
        "who has nothing to bring holds a turn", ROOM, "if stream.intake.idle:", "if stream.intake.complete:", STAGGERED
    ),
    Mutant("all of a push is asked for at once", ROOM, "now, link, stream.ready)", "now, link)", STAGGERED),
    Mutant("a pushed chunk's body is not checked", ROOM, "check_body(claim.header, claim.body)", "pass", RECEIVER),
    Mutant(
        "a wrong chunk is never asked again",
        ROOM,
        "stream.intake.mark_wrong(claim.chunk)",
        "stream.intake.drop_claim(claim.chunk)",
        RECEIVER,
    ),
    Mutant("drop does not wait for a copy", ROOM, "while push.copying:", "while False:", RECEIVER),
    Mutant(
        "a push stalls for ever",
        ROOM,
        "inf if silent_since is None else silent_since + stall_s",
        "inf",
        RECEIVER,
    ),
    Mutant(
        "a push waits for its last ranks for ever", ROOM, "return self.moved_at + self.gather_s", "return inf", RECEIVER
    ),
    Mutant(
        "who is not asked stalls",
        ROOM,
        "for s in self.streams.values() if s.intake.in_flight]",
        "for s in self.streams.values()]",
        RECEIVER,
    ),
    Mutant(
        "a push stalls before its ranks come", ROOM, "self.gather_s if self.streams else inf", "self.gather_s", RECEIVER
    ),
    Mutant("lanes of two pushes are not lined up", ROOM, "push.places = dict(enumerate(places))", "pass", RECEIVER),
    # ---- pulls out
    Mutant(
        "an old epoch comes back to a pull", ROOM, "name.epoch <= latest.epoch", "name.epoch < latest.epoch", SENDER
    ),
    Mutant("a pull of another version", ROOM, "if name.version != str(", "if None is str(", SENDER),
    Mutant("credit without bound", ROOM, "if asked > MOST_CHUNKS or nbytes", "if nbytes", SENDER),
    Mutant(
        "a question is lost while libzmq's books lag",
        ROOM,
        "stream.parked += chunks",
        "stream.parked += chunks[:1]",
        SENDER,
    ),
    Mutant("a reader that is not asked stalls", ROOM, "any(s.held for s in self.streams)", "True", SENDER),
    Mutant("what is owed counts from the last answer", ROOM, "if not job.stream.pull.owed:", "if False:", SENDER),
    Mutant("a source is let go at send", ROOM, "while self.held and self.held[0][0].done:", "while self.held:", SENDER),
    Mutant("a source is released while it is read", ROOM, "if pull.closed and pull.idle:", "if pull.closed:", SENDER),
    Mutant(
        "moved before its chunks have left",
        ROOM,
        "pull.former and not any(source.in_flight",
        "pull.former and any(True or source.in_flight",
        SENDER,
    ),
    Mutant("a pull stalls for ever", ROOM, "now - pull.moved_at >= ", "now - pull.moved_at >= 9 * ", SENDER),
    # ---- kernels
    Mutant("plain momentum for Nesterov's", OUTER, "(c * g + e * m)", "m", KERNELS),
    Mutant("momentum subtracts", OUTER, "a * momentum[i] + b * g", "a * momentum[i] - b * g", KERNELS),
    Mutant("a step uphill", OUTER, "theta[i] - lr", "theta[i] + lr", KERNELS),
    Mutant("a fold without its weight", OUTER, "weight * (a[i] - b[i])", "(a[i] - b[i])", KERNELS),
    Mutant("squares in fp32", OUTER, "x = np.float64(a[i])", "x = np.float32(a[i])", KERNELS),
    Mutant(
        "a fused multiply-add",
        OUTER,
        "@_compile_nogil()\ndef _apply_loop(",
        '@_compile_nogil(fastmath={"contract"})\ndef _apply_loop(',
        KERNELS,
    ),
    Mutant(
        "blocks of another size",
        OUTER,
        "SUMMED = 4096",
        "SUMMED = 8192",
        "equivalent: a bound of the cache; sums of squares are compared to 1e-12 and no bit of θ depends on it",
    ),
    # ---- memory
    Mutant(
        "one slot more than the sum", OUTER, "len(self._open) >= self.slots", "len(self._open) > self.slots", VERSIONS
    ),
    Mutant(
        "every older version is in excess",
        OUTER,
        "len(self.older_versions) - self._pinned)",
        "len(self.older_versions))",
        VERSIONS,
    ),
    Mutant(
        "any prepared version is flipped to",
        OUTER,
        "made is None or made.version != version or",
        "made is None or",
        VERSIONS,
    ),
    Mutant("a first push of any weight", OUTER, "if weight != 1.0 or not", "if False and not", VERSIONS),
    Mutant("a load over open slots", OUTER, "        if self._open:\n", "        if False:\n", VERSIONS),
    Mutant(
        "an unread version keeps its bank",
        OUTER,
        "for theta in [t for t in self.older if not t.pulls]:",
        "for theta in [t for t in self.older if not t.pulls and t.moving]:",
        VERSIONS,
    ),
    Mutant(
        "a bank is given back twice",
        OUTER,
        "if bank.holder is None:\n            raise",
        "if False:\n            raise",
        VERSIONS,
    ),
)
