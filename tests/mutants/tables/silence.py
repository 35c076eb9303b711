"""Mutants of what travels in fewer bits, what 16 bits round away, and what would fail without a word."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ALIGNMENT, OUTER = "dips/protocol/alignment.py", "dips/outer/updates.py"
TABLE, RANGES = "dips/codecs.py", "dips/wire/chunks.py"
REMAINDERS = "dips/client/parallel/remainders.py"
UNDO, LAZY = "dips/client/rank/undo_watch.py", "dips/client/parallel/lazy.py"
SLAVE, BODIES = "dips/slave", "dips/wire/bodies.py"

PACE = "tests/unit/protocol/test_bites_alignment.py tests/unit/protocol/test_alignment.py"
SPELT, STEPPED = "tests/unit/wire/test_updates.py", "tests/unit/outer/test_updates.py"
MOVED = "tests/unit/client/parallel/test_moved_memory.py"
REPLICA, REPLICAS = "dips/client/rank/replica_check.py", "tests/unit/client/rank/test_replica_check.py"
TRANSFERS, RANKS = "dips/client/rank/shard_transfer.py", "tests/integration/test_client_ranks.py"
KEPT, KEPT_TESTS = "dips/client/rank/kept_weights.py", "tests/unit/client/rank/test_kept_weights.py"
LOOP = "tests/unit/client/rank/test_outer_loop.py"
WATCHED, LATER = "tests/unit/client/rank/test_undo_watch.py", "tests/unit/client/parallel/test_lazy.py"
STEPS = "tests/unit/wire/test_bites_bodies.py tests/unit/slave/test_bites_receiver.py"

MUTANTS = (
    # ---- steps that are not finite
    Mutant(
        "steps of a push are put unseen",
        SLAVE,
        "bodies.check_steps(push.codec, claim.body, claim.chunk.length)",
        "pass",
        STEPS + " tests/unit/slave/test_hostile_wire.py",
    ),
    Mutant("a push with a wrong step is asked again", SLAVE, 'wrong.reason == "step":', "False:", STEPS),
    Mutant(
        "a chunk with a wrong step keeps its room",
        SLAVE,
        '"step":\n                stream.intake.drop_claim(claim.chunk)',
        '"step":',
        "tests/unit/slave/test_hostile_wire.py",
    ),
    Mutant(
        "a push that ends at a step is not counted",
        SLAVE,
        "case FrameRefused(reason):\n                    self._counters.add_refused(reason)",
        "case FrameRefused(reason):\n                    pass",
        "tests/integration/test_flow.py::test_a_difference_that_is_not_finite_ends_its_push_at_the_slave",
    ),
    Mutant("negative steps are taken", BODIES, "(steps >= 0) & ", "(steps == steps) & ", STEPS),
    Mutant("infinite steps are taken", BODIES, " & (steps <= _LARGEST / (codec.largest + 1))", "", STEPS),
    # ---- aligned pace
    Mutant(
        "others' windows hold a slow link back for ever",
        ALIGNMENT,
        ">= MOST_PERIODS * self.period_s:",
        ">= inf * self.period_s:",
        PACE,
    ),
    Mutant("one missed window is enough", ALIGNMENT, "MOST_PERIODS = 2", "MOST_PERIODS = 1", PACE),
    # ---- updates as they travel
    Mutant(
        "a range in one block takes the next one's step",
        BODIES,
        "min(-chunk.offset % codec.block, chunk.length) if codec.block else 0",
        "0",
        SPELT,
    ),
    Mutant("the second update is the first again", BODIES, "[number * each : (number + 1) * each]", "[:each]", SPELT),
    Mutant(
        "a block that is begun has no step",
        TABLE,
        "codec.count_blocks(begins + length)",
        "codec.count_blocks(length)",
        SPELT,
    ),
    Mutant(
        "an unknown encoding is parameters",
        RANGES,
        'raise BadFrame("message", f"chunks of {depth} updates of dtype {number} are not known")',
        "return Range",
        SPELT,
    ),
    Mutant("two updates count as one", RANGES, "return (self.depth or 1) * self", "return self", SPELT),
    # ---- updates as they are kept
    Mutant(
        "the newest update is written over",
        OUTER,
        "self._buffers.append(made)",
        "self._buffers.insert(0, made)",
        STEPPED,
    ),
    Mutant("an update that is being written is offered", OUTER, "made.version = made.parent = None", "pass", STEPPED),
    Mutant(
        "an aborted update stays open",
        OUTER,
        'came to nothing."""\n        self._writing = None',
        'came to nothing."""',
        STEPPED,
    ),
    Mutant("a chain repeats its last update", OUTER, "version = last.parent\n", "pass\n", STEPPED),
    Mutant(
        "a chain is longer than its parameters", OUTER, "len(chain) < self.codec.updates", "len(chain) < 9", STEPPED
    ),
    Mutant("updates stay with a pull that is over", OUTER, "update.pulls.discard(pull)", "pass", STEPPED),
    Mutant("slow readers' versions have no buffer", OUTER, "max(WRITTEN, pinned)", "WRITTEN", STEPPED),
    # ---- what 16 bits round away
    Mutant(
        "a merge keeps the last pull's remainder",
        "dips/client/parallel/copies.py",
        "rounded.copy_(block, non_blocking=True)",
        "pass",
        MOVED,
    ),
    Mutant(
        "what masters hold is added again",
        REMAINDERS,
        "self._of.pop(copy.key, None)  # its masters, made",
        "pass  # its masters, made",
        MOVED,
    ),
    Mutant(
        "a checkpoint brings no remainders back",
        REMAINDERS,
        "remainder.copy_(part.view(remainder.shape))",
        "pass",
        MOVED,
    ),
    Mutant("a checkpoint without remainders keeps others", REMAINDERS, "remainder.zero_()", "pass", MOVED),
    Mutant(
        "remainders of another layout are taken",
        REMAINDERS,
        "saved is None or saved.numel() !=",
        "saved is None or 0 >",
        MOVED,
    ),
    # ---- ranks that are taken for replicas
    Mutant("replicas are not compared", TRANSFERS, "        self._replica_check.check_push()\n", "", RANKS),
    Mutant("replicas are compared once", REPLICA, "% EVERY == 0", "== 0", REPLICAS),
    Mutant("replicas of other ranks are not told apart", REPLICA, "_key(ranks): views", "0: views", REPLICAS),
    Mutant("rounding ends the job", REPLICA, "else COARSE_ROUNDING", "else ROUNDING", REPLICAS),
    Mutant("a small difference is named first", REPLICA, "-one.share / one.limit", "one.share / one.limit", REPLICAS),
    Mutant(
        "ranks' own buffers are replicas",
        "dips/client/parallel/plan.py",
        " and not is_shared_buffer(",
        " or is_shared_buffer(",
        REPLICAS,
    ),
    Mutant(
        "a checksum copies a whole parameter",
        "dips/client/parallel/checksum.py",
        "device.block_items // COPIES",
        "1 << 40",
        REPLICAS,
    ),
    # ---- who undoes a pull
    Mutant(
        "kept weights are not looked for",
        "dips/client/rank/outer_loop.py",
        "self._kept_weights.check_optimizers()",
        "pass",
        LOOP,
    ),
    Mutant(
        "kept weights are looked for once", KEPT, "if number >= EARLY and number % EVERY:", "if number:", KEPT_TESTS
    ),
    Mutant("masters in copies are passed over", KEPT, "list(_pair_copies(optimizer, ours, known))", "[]", KEPT_TESTS),
    Mutant("known masters end the job", KEPT, "if id(one[2]) not in known:", "if True:", KEPT_TESTS),
    Mutant("a function's masters end the job", KEPT, "if not self._adapter.hides_masters:", "if True:", KEPT_TESTS),
    Mutant("drifted slow weights pass", KEPT, "alike > ALIKE_BY_NAME", "alike > 0.99999", KEPT_TESTS),
    Mutant("a step counter is a weight", KEPT, "LEAST_ELEMENTS = 32", "LEAST_ELEMENTS = 0", KEPT_TESTS),
    Mutant("ASGD's mean is warned of", KEPT, " and key not in HARMLESS", "", KEPT_TESTS),
    Mutant("quantized moments are sampled", KEPT, " and type(_find_local(tensor)) in PLAIN", "", KEPT_TESTS),
    Mutant("ones are masters of ones", KEPT, "LEAST_VALUES = 4", "LEAST_VALUES = 1", KEPT_TESTS),
    Mutant("a matrix undone counts as a norm", UNDO, "sum(sample.view.numel() for", "sum(1 for", WATCHED),
    Mutant("training is taken for undoing", UNDO, "LEFT_OVER = 0.05", "LEFT_OVER = 2.0", WATCHED),
    Mutant(
        "a step is not told from an undone pull", UNDO, " - sample.before - sample.step)", " - sample.before)", WATCHED
    ),
    Mutant(
        "one parameter by chance ends the job",
        UNDO,
        "if 2 * _sum_elements(undone) > _sum_elements(moved):",
        "if undone:",
        WATCHED,
    ),
    Mutant(
        "what no pull moved is evidence",
        UNDO,
        "[sample for sample in self._samples if _was_moved(sample)]",
        "self._samples",
        WATCHED,
    ),
    Mutant("what no optimizer stepped is compared", UNDO, " or optimizer_steps == self._optimizer_steps", "", WATCHED),
    Mutant(
        "later steps are compared, too",
        UNDO,
        "        self._compares = False\n        moved",
        "        moved",
        WATCHED,
    ),
    Mutant("a lazy install is sampled before it came", UNDO, ".difference(pending)", "", WATCHED),
    Mutant("nobody hears where a lazy install has come to", LAZY, "self.on_installed(names)", "pass", LATER),
)
