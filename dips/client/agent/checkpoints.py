"""What a cluster's own checkpoint must hold of the outer loop, and how a trainer takes it up again (why.md 36, 37).

A checkpoint is right for the cluster as long as no push of it was settled since: then θ, progress and data ranges of
the checkpoint are what the run still waits for, and resuming is exact. If one was settled since, what the checkpoint
would train again is in the global model already: it is healed by a pull, and said so. So is one that was saved while a
push was out (its frozen copy is gone), or whose ranges others have been given meanwhile.
"""

from __future__ import annotations

from dips.client.agent.account import Portion
from dips.client.agent.actions import AskMaster, SyncPhase
from dips.client.agent.outer_sync import Talk
from dips.client.ipc.messages import Answer, AskAgain, ErrorReply, Healed, Resume, Resumed, Saved
from dips.ids import VersionId
from dips.protocol.events import RangesRequested

RANGES_AT_ONCE = 2  # leased together: the one needed, and one so that the next is here before it is asked for


class Checkpoints(Talk):
    """Save and take up."""

    def _save(self) -> Saved:
        """The cluster's progress as it stands between two inner steps."""
        portion, book = self.account.carried, self.ranges
        serving = () if book.serving is None else (book.serving,)
        return Saved(
            self._identity.cluster,
            str(self.base),
            self.settled,
            self.phase is not SyncPhase.RESTING and self.phase is not SyncPhase.CLOSING,
            portion.tokens,
            portion.inner_steps,
            portion.ranges,
            portion.loss_sum,
            portion.losses,
            (*serving, *book.waiting),
            self._pace.since_push,
        )

    def _resume(self, q: Resume) -> Answer:
        """Take up a checkpoint, before the first inner step of a trainer that has its pull behind it."""
        saved = q.saved
        if self.phase is not SyncPhase.RESTING or self._ranges_asked:
            return AskAgain(self.reason)
        if self.account.carried.inner_steps or self.base is None:
            return ErrorReply("LocalProtocolError", "load_state_dict comes before the first inner step")
        if why := self._overtaken(saved):
            return self._heal(why)
        claims = (*saved.ranges, *saved.ahead)
        here = {*self.ranges.waiting} | ({self.ranges.serving} if self.ranges.serving is not None else set())
        missing = tuple(r for r in claims if r not in here)
        if missing and self._claimed != claims:
            self._claimed = claims
            self._ask_ranges(missing)
            return AskAgain("the master is asked for the checkpoint's data ranges")
        self._claimed = ()
        if missing:
            return self._heal(f"data ranges {missing[:5]} of the checkpoint belong to others by now")
        self._take_up_saved(saved)
        return Resumed(self.reason, self._pace.look_in(self._now) or 1)

    def _overtaken(self, saved: Saved) -> str:
        """Why the checkpoint is not what the run waits for; empty if it is."""
        if saved.cluster != self._identity.cluster:
            return f"the checkpoint is of cluster {saved.cluster}"
        if saved.pending:
            return "it was saved while a push was out, whose merge is lost"
        if saved.settled != self.settled:
            return f"{self.settled - saved.settled} pushes of {saved.cluster} were settled since it was saved"
        return ""

    def _heal(self, why: str) -> Healed:
        self._pull_due = True
        self._mark("checkpoint_healed", reason=why)
        return Healed(why)

    def _take_up_saved(self, saved: Saved) -> None:
        self.base = VersionId.parse(saved.base)
        self.account.lost -= min(saved.tokens, self.account.lost)  # of this very life: they are not lost after all
        portion = Portion(saved.tokens, saved.inner_steps, saved.ranges, saved.loss_sum, saved.losses)
        self.account.carried = portion
        self.ranges.resume(saved.ranges, saved.ahead)
        self._pace.resume(saved.since_push)
        self.reason = f"resumed on {self.base} with {saved.inner_steps} inner steps since its last push"
        self._mark("checkpoint_resumed", base=saved.base, tokens=saved.tokens, inner_steps=saved.inner_steps)

    def _ask_ranges(self, claims: tuple[int, ...] = ()) -> None:
        """Ask for more data ranges, or for named ones."""
        self._ranges_asked, self._ranges_seq = True, self._ranges_seq + 1
        self._ranges_event = RangesRequested(
            0, self._identity.cluster, self.inc, self._ranges_seq, len(claims) or RANGES_AT_ONCE, claims
        )
        self._out.append(AskMaster("ranges", -self._ranges_seq, self._ranges_event, 0.0))
