"""Mutants of agent and ranks (dips/client)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AGENT, RANK, PARALLEL = "dips/client/agent", "dips/client/rank", "dips/client/parallel"
MERGE = "tests/unit/client/parallel/test_merge.py"
REPLICAS = "tests/unit/client/parallel/test_replicas.py"
REPORTS = "tests/unit/client/rank/test_step_reports.py"
MOVED = "tests/unit/client/parallel/test_moved_memory.py"
TRANSFER = "tests/unit/client/rank/test_transfer.py tests/unit/client/rank/test_shard_transfer.py"
RESTARTS = "tests/unit/client/agent/test_restarts.py"
ERRORS = "tests/unit/client/agent/test_error_tail.py"
FEEDBACK = "tests/unit/client/rank/test_feedback.py"
FRAGMENTS = "tests/unit/client/rank/test_fragments.py"
OVERLAP, PACE = "tests/unit/client/agent/test_overlap.py", "tests/unit/client/agent/test_pace.py"
RANKS = "tests/unit/client/rank/test_background_transfer.py tests/unit/client/rank/test_outer_steps.py"
WIRE, MASTER = "dips/wire", "dips/master"
DESK = "tests/unit/master/test_manifest_desk.py"
IPC, PARALLEL = "dips/client/ipc", "dips/client/parallel"
PACKED = "tests/unit/wire/test_packed_manifest.py"
PLAN = "tests/unit/client/parallel/test_plan_twins.py"
BUFFERS = "tests/unit/client/parallel/test_shared_buffers.py"
GATHERED = "tests/unit/client/parallel/test_rank_layout.py"
HEARTBEATS = "tests/unit/client/agent/test_heartbeats.py tests/unit/client/agent/test_membership.py"

LAZY, DOORS = "tests/unit/client/parallel/test_lazy.py", "tests/unit/client/test_doors.py"
READER = "tests/unit/data/test_reader.py"
DEVICES = "tests/unit/client/parallel/test_devices.py"
OPTIMIZERS = "tests/unit/client/rank/test_inner_optimizers.py"
LATE = "tests/unit/client/parallel/test_late_device.py"
PARTS = "tests/unit/client/agent/test_parts.py"

MUTANTS = (
    # ---- crashes
    Mutant("the same crash is tried for ever", AGENT, "len(newest) == SAME_CRASHES", "False", RESTARTS),
    Mutant("a crash after a step ends the agent", AGENT, "crash.stepped or", "", RESTARTS),
    Mutant("crashes count for a life", AGENT, "while s.crashes[0].at <", "while 0 >", RESTARTS),
    Mutant("torchrun's last line is shown", AGENT, "if not found[1].startswith(OF_TORCHRUN)", "", ERRORS),
    # ---- what a rank believes of what it pulls
    Mutant(
        "a pulled chunk's body is not checked",
        RANK,
        "except BadFrame:\n            return 0",
        "except BadFrame:\n            pass",
        TRANSFER,
    ),
    Mutant("a wrong chunk of a pull is never asked again", RANK, "intake.mark_wrong(", "intake.drop_claim(", TRANSFER),
    # ---- error feedback
    Mutant(
        "error feedback is never settled", RANK, "elif self._seq and accepted == self._seq:", "elif False:", FEEDBACK
    ),
    Mutant(
        "error feedback settles what came to nothing",
        RANK,
        "self._seq and accepted == self._seq",
        "self._seq",
        FEEDBACK,
    ),
    Mutant("what is owed is never sent", RANK, "host += owed", "host += 0 * owed", FEEDBACK),
    Mutant("another incarnation pays what is owed", RANK, "if inc != self._inc:", "if False:", FEEDBACK),
    Mutant("what is owed and contained is sent twice", RANK, "if self._contained:", "if False:", FEEDBACK),
    # ---- fragments
    Mutant("ranks that train on look at once", AGENT, "return (look + max(look, ", "return (max(look, ", OVERLAP),
    Mutant("a look between fragments counts twice", AGENT, "(interval - look)", "interval", OVERLAP),
    Mutant("who looks late has a slow link", AGENT, " - max(0.0, idle_s))", ")", OVERLAP),
    Mutant(
        "aligned fragments go by the own H",
        AGENT,
        "if self._aligned and self._round else own",
        "if False else own",
        PACE,
    ),
    Mutant("long rounds make longer ones", AGENT, "min(own, self._round)", "self._round", PACE),
    Mutant(
        "a late fragment is offered whatever it holds",
        RANK,
        "if reason := stagger.prepare_fragment(stagger.gate.open):",
        "if (reason := stagger.prepare_fragment(stagger.gate.open)) and False:",
        FRAGMENTS,
    ),
    Mutant(
        "a late fragment is offered as it was",
        RANK,
        "self._freeze_layers(request, self._fragments[number], keep=True)",
        "pass",
        FRAGMENTS,
    ),
    Mutant(
        "differences are to a base of two versions", RANK, "None if self._lacking else version", "version", FRAGMENTS
    ),
    Mutant("a pull that broke between fragments is whole", RANK, "merging.merged > 0", "False", FRAGMENTS),
    Mutant("a merge goes all the way", PARALLEL, "np.float32(self.alpha)", "np.float32(1.0)", FRAGMENTS),
    # ---- what would train on wrongly
    Mutant(
        "a model that is not finite is pushed",
        RANK,
        "return EndedTransfer(TransferResult(False, reason, 0, diverged=True))",
        "pass",
        TRANSFER,
    ),
    Mutant(
        "an optimizer keeps the moments of a diverged model",
        RANK,
        "optimizer.state = defaultdict(dict)",
        "pass",
        "tests/unit/client/rank/test_inner_optimizers.py",
    ),
    Mutant(
        "what a diverged model has trained is carried",
        AGENT,
        "(s.account.lose_frozen())\n    lose_work(s)",
        "(())",
        "tests/unit/client/agent/test_divergence.py",
    ),
    # ---- data ranges
    Mutant("a part that is settled is trained again", AGENT, "self.begun[begun.number] = begun", "pass", PARTS),
    Mutant("what is left of a range is used up", AGENT, "kept = {*left}", "kept = set[int]()", PARTS),
    Mutant(
        "lost ranges stay with their trainer",
        AGENT,
        "if lost and s.range_requests",
        "if False and s.range_requests",
        PARTS,
    ),
    Mutant("the end of the data hides what is left", AGENT, "    if s.ranges.served:\n", "    if False:\n", PARTS),
    Mutant(
        "what 16 bits round away is lost",
        PARALLEL,
        "piece_part(target).add_(remainder)",
        "piece_part(target).add_(0)",
        MOVED,
    ),
    Mutant("a merge that is not finite counts", PARALLEL, "return check.is_finite", "return True", MERGE),
    Mutant("a merge is done twice", PARALLEL, "self._kept.drop_copies(copies)", "pass", MERGE),
    Mutant("a merge rounds twice", PARALLEL, "block.add_(view)", "block.copy_(block.to(view.dtype)).add_(view)", MERGE),
    Mutant("each rank of a group is sent its own", PARALLEL, " and target == group[0]", "", REPLICAS),
    Mutant("memory is mapped without its token", PARALLEL, " == token:", " is not None:", REPLICAS),
    Mutant("losses wait for ever", RANK, " or len(self._waiting) > MOST_WAITING", "", REPORTS),
    Mutant(
        "masters that were made since are not found",
        PARALLEL,
        "if not moved:",
        "if True:",
        MOVED,
    ),
    Mutant(
        "an undone pull is passed over",
        RANK,
        "return left < LEFT_OVER * distance",
        "return False",
        "tests/unit/client/rank/test_undo_watch.py",
    ),
    # ---- among ranks, and at the agent
    Mutant("ranks move different transfers", RANK, "[self._seq, -self._seq, int(", "[0, 0, int(", RANKS),
    Mutant("a torn model is whole after the next failure", RANK, "torn and not ", "torn and False and not ", RANKS),
    Mutant("an old term's answer is believed by the agent", AGENT, " or answer.term < ", " or None is ", HEARTBEATS),
    Mutant("an answer to an old incarnation is believed by the agent", AGENT, "if inc != ", "if None is ", HEARTBEATS),
    Mutant("a refusal that heals ends the agent", AGENT, ">= max(HEAL_S, s.settings.heartbeat_s)", ">= 0", HEARTBEATS),
    Mutant("refusals add up over answers", AGENT, "s.heartbeats.refused_since = None", "pass", HEARTBEATS),
    Mutant(
        "each refused question hurries a heartbeat",
        AGENT,
        "if s.heartbeats.refused_since is None:",
        "if True:",
        HEARTBEATS,
    ),
    Mutant("an old term's Join is believed by the agent", AGENT, "if result.term < ", "if None is ", HEARTBEATS),
    Mutant(
        "claims that are not to be had end the data",
        AGENT,
        "result.exhausted and not s.range_requests.claimed",
        "result.exhausted",
        "tests/unit/client/agent/test_checkpoints.py",
    ),
    Mutant(
        "a cluster at its bound waits without a push",
        AGENT,
        "s.ranges.hold_back()",
        "pass",
        "tests/unit/client/agent/test_end_of_data.py",
    ),
    Mutant(
        "what an attempt was told is for the next",
        AGENT,
        "s.ranges.exhausted, s.ranges.held_back, requests.ended_at, requests.rest_again_at = False, 0, None, 0.0",
        "s.ranges.exhausted, requests.ended_at, requests.rest_again_at = False, None, 0.0",
        "tests/unit/client/agent/test_end_of_data.py",
    ),
    # ---- the manifest, and the plan of a large job
    Mutant("models are compared all at once", MASTER, "if self._reading or begun", "if begun", DESK),
    Mutant("models are compared all the time", MASTER, "now + REST * (now - begun)", "now", DESK),
    Mutant(
        "a model of any size is compared",
        MASTER,
        "max(LEAST_BYTES, TIMES * len(text.encode()))",
        "MAX_JSON_BYTES",
        DESK,
    ),
    Mutant(
        "models are compared on the loop",
        MASTER,
        "await asyncio.to_thread(self._find_differences, offered)",
        "self._find_differences(offered)",
        DESK,
    ),
    Mutant("another manifest than the announced is taken", WIRE, "if found != digest:", "if False:", PACKED),
    Mutant("a torn manifest is taken", WIRE, "not inflate.eof or", "False and", PACKED),
    Mutant("a manifest that unpacks to too much is taken", WIRE, "len(text) > most:", "False:", PACKED),
    Mutant(
        "an older attempt's manifest is compared",
        AGENT,
        "if message.process != s.trainer.process:\n        return ErrorReply(",
        "if False:\n        return ErrorReply(",
        "tests/unit/client/agent/test_membership.py",
    ),
    Mutant("loads that decide are left out", PARALLEL, " or not counted.isdisjoint(cut.candidates)]", "]", PLAN),
    Mutant("loads that depend on others stand alone", PARALLEL, "bool(more)", "False", PLAN),
    Mutant(
        "a piece's exchange is another rank's",
        PARALLEL,
        "cut.exchanges[begin, end, mover]",
        "cut.exchanges[begin, end, 0]",
        PLAN,
    ),
    Mutant("buffers of integers are shared", PARALLEL, "if not buffer.dtype.is_floating_point:", "if False:", BUFFERS),
    Mutant(
        "a pattern that names nothing is taken",
        "dips/protocol/manifest.py",
        "if not any(fnmatchcase(name, pattern) for name in buffers)",
        "if False",
        BUFFERS,
    ),
    Mutant(
        "an expert has the number that its rank gives it",
        PARALLEL + "/megatron_names.py",
        "first + int(found[1])",
        "int(found[1])",
        "tests/integration/test_experts.py",
    ),
    Mutant("lists of names never travel", PARALLEL + "/rank_layout.py", "if len(first) > 1:", "if False:", GATHERED),
    # ---- what a device does late
    Mutant(
        "a pull is exchanged on the stream that nobody waits for",
        PARALLEL + "/host.py",
        "with self._device.ordered_copies():  # the stream for whose end the exchange waits",
        "if True:",
        LATE,
    ),
    Mutant(
        "what a peer sent is read before it is there",
        PARALLEL + "/exchange.py",
        "_unpack_batch(arrived[peer], batch)\n            self._device.synchronize()",
        "_unpack_batch(arrived[peer], batch)",
        LATE,
    ),
    Mutant("no forward waits for its layer", PARALLEL, "self._device.wait_for_event(event,", "dict(event=event,", LATE),
    Mutant("what rounding took is not sent to others", PARALLEL, "part.add_(addend.to(part.device))", "pass", LATE),
    Mutant(
        "transit grows with the ranks",
        PARALLEL,
        "transit_items // ranks.world_size",
        "transit_items",
        "tests/unit/client/parallel/test_exchange.py",
    ),
    Mutant(
        "a pull begins over a lazy install",
        RANK,
        "finish_install()  # it may still",
        "pending  # it may still",
        TRANSFER,
    ),
    Mutant(
        "what is not open arrives",
        RANK,
        "for number in range(self.open) if",
        "for number in range(self.count) if",
        FRAGMENTS,
    ),
    # ---- what a device must be told
    Mutant(
        "a refusal stays the runtime's last error",
        PARALLEL,
        "    with suppress(RuntimeError):\n        launch()\n",
        "",
        DEVICES,
    ),
    Mutant("a fork copies the shard", PARALLEL, "pages.madvise(mmap.MADV_DONTFORK)", "pass", DEVICES),
    Mutant("a loss is converted on its way", PARALLEL, ".reshape(()).float()", ".reshape(())", DEVICES),
    Mutant("a communicator is made for nothing", RANK, "if not all_able or none_wants:", "if not all_able:", DEVICES),
    Mutant(
        "no rank wants to exchange",
        PARALLEL,
        "PartExchange(exchange, self._device, wanted)",
        "PartExchange(exchange, self._device, False)",
        LATE,
    ),
    Mutant(
        "a graph's moments are left to it",
        RANK,
        'known and any(group.get("capturable") for group in',
        "any(False for group in",
        OPTIMIZERS,
    ),
    Mutant("a graph's gradients are left to it", RANK, "and parameter in fixed:", "and False:", OPTIMIZERS),
    Mutant(
        "a captured step counts",
        RANK,
        "        self.steps = 0\n        if self._followed",
        "        if self._followed",
        OPTIMIZERS,
    ),
    Mutant(
        "a document's skipped tokens are read again",
        "dips/data/reader.py",
        "[start + skipped : start",
        "[start : start",
        READER,
    ),
    Mutant("a row ends with its first document", "dips/data/reader.py", "while filled < len(row):", "if True:", READER),
    # ---- found by chance: random mutants that survived
    Mutant("a pull's last word is not sent", RANK, 'FLUSH_MS if self.kind == "pull" else 0', "0", TRANSFER),
    Mutant("frames are read without a poll for ever", RANK, "return count == BATCH", "return count != BATCH", TRANSFER),
    Mutant(
        "a replaced merge leaves its hooks",
        PARALLEL,
        "self._pending = {}\n        self._remove_hooks()",
        "self._pending = {}",
        LAZY,
    ),
    Mutant(
        "what is gathered is another parameter",
        PARALLEL,
        "self.reshard()\n        for part in self._parts:\n            for path, parameter",
        "for part in self._parts:\n            for path, parameter",
        MOVED,
    ),
    Mutant(
        "a model is walked over twice",
        PARALLEL,
        "tensors = list(self._adapter.local_tensors())",
        "tensors = list(self._adapter.local_tensors()) and list(self._adapter.local_tensors())",
        MOVED,
    ),
    Mutant(
        "a feed marks its first step",
        "dips/client/data.py",
        "        outer.mark_ranges(self._cutter.numbers_left)  #",
        "        #",
        DOORS,
    ),
    Mutant(
        "an incarnation that lives is not told",
        AGENT,
        'end_transfer(s, "the master took up this incarnation again")',
        "pass",
        HEARTBEATS,
    ),
    Mutant(
        "an outer state is saved without an optimizer",
        "dips/client/transformers.py",
        "self.outer is None or args.save_only_model",
        "self.outer is None",
        "tests/unit/client/test_trainer.py",
    ),
)
