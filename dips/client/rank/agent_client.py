"""A training job's agent as its ranks see it: one question at a time by rank 0, each answer broadcast to all ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import cast

import torch
import torch.distributed as dist

from dips.client.ipc import messages
from dips.client.ipc.address import (
    AGENT,
    GREETING,
    PROOF,
    TAG,
    Address,
    OnThisHost,
    Seal,
    TokenClient,
    keep_alive,
    reach_socket,
)
from dips.client.ipc.messages import Answer, AskAgain, ErrorReply, Noted, Notice, Question, Stepped, TransferProgress
from dips.dataclass import replace
from dips.errors import (
    ConfigError,
    Denied,
    DipsError,
    LocalProtocolError,
    RemoteProtocolError,
    Unavailable,
    class_named,
)

# ---- agent connection -----------------------------------------------------------------------------------------------
# When the agent is gone (the connection is closed) training ends: no other process may act for this cluster. No torch.


GRACE_S = 30.0  # an agent that does not answer within poll_s plus this time is hung
CONNECT_S = 10.0  # timeout for connecting, handshake included
RETRY_S = 0.5


class AgentConnection:
    """An open connection to the agent."""

    def __init__(self, address: Address, poll_s: float) -> None:
        """Connect. Raises Unavailable if no agent answers, Denied if it is not this job's agent."""
        self._address = address
        self._seal: Seal | None = None
        self._silent = ""  # that the agent did not answer in time; "": it always did
        try:
            self._socket = _open_socket(address)
        except OSError as error:
            raise Unavailable(
                f"no agent answers: tried {address} (from {address.named_by}): {error.strerror or error}. Start this "
                f"script as `dips-client --config … -- …`; on another host than the agent's, name it in {AGENT}"
            ) from error
        if not isinstance(address, OnThisHost):
            try:
                self._seal = self._prove_token(address.token)
            except (OSError, DipsError) as error:
                self._socket.close()
                if isinstance(error, Unavailable):  # a peer with another token closes the connection without a message
                    raise Denied(
                        f"{address} (from {address.named_by}) closed the connection: is it the agent of this job, and "
                        "do both have the same token?"
                    ) from error
                if isinstance(error, DipsError):
                    raise
                raise Unavailable(f"{address} (from {address.named_by}) sent no greeting: {error}") from error
        self._socket.settimeout(poll_s + GRACE_S)

    @classmethod
    def connect_within(cls, address: Address, poll_s: float, within_s: float) -> AgentConnection:
        """Connect as the constructor, but retry for `within_s`: an agent may start later than its ranks."""
        until = time.monotonic() + within_s
        while True:
            try:
                return cls(address, poll_s)
            except Unavailable as error:
                if time.monotonic() >= until:
                    raise Unavailable(f"{error} (tried for {within_s:g} s)") from error
                time.sleep(RETRY_S)

    def receive_answer(self, question: str) -> messages.Answer:
        """Wait for the answer, which may be AskAgain; `question` is named in errors. Raises Unavailable if the agent is
        gone or does not answer in time; the connection is closed then, since a late answer would be taken for that to
        the next question.
        """
        try:
            head = self._receive_bytes(messages.LENGTH.size)
            body = self._receive_bytes(messages.body_length(head))
            if self._seal:
                self._seal.check_frame(head + body, self._receive_bytes(TAG))
        except OSError as error:
            self._silent = f"the agent at {self._address} does not answer: {error}"
            self.close()
            raise Unavailable(self._silent) from error
        answer = messages.decode_message(body)
        if not isinstance(answer, messages.Answer):
            raise RemoteProtocolError(f"the agent answered {type(answer).__name__} to {question}")
        return answer

    def send_message(self, message: messages.Question | messages.Notice) -> None:
        """Send a message without waiting for an answer. Raises Unavailable if the agent is gone."""
        frame = messages.encode_message(message)
        try:
            self._socket.sendall(frame + self._seal.tag_frame(frame) if self._seal else frame)
        except OSError as error:
            raise Unavailable(self._silent or f"the agent at {self._address} is gone: {error}") from error

    def wait_until_closed(self) -> None:
        """Block until the agent has closed the connection or its host is gone; for connections without messages."""
        try:
            self._socket.settimeout(None)
            self._socket.recv(1)
        except OSError:  # reset, closed by this side, or the keep-alive failed: closed in each case
            pass

    def close(self) -> None:
        """Close the connection, and unblock a thread in `wait_until_closed`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the agent has closed it already
            pass
        self._socket.close()

    def _prove_token(self, token: bytes) -> Seal:
        keep_alive(self._socket)
        client = TokenClient(token, self._receive_bytes(GREETING))
        self._socket.sendall(client.answer)
        return client.accept_proof(self._receive_bytes(PROOF))

    def _receive_bytes(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                raise Unavailable(f"the agent at {self._address} closed the connection")
            parts += part
        return bytes(parts)


def _open_socket(address: Address) -> socket.socket:
    if not isinstance(address, OnThisHost):
        return socket.create_connection((address.host, address.port), CONNECT_S)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.settimeout(CONNECT_S)
    try:
        with reach_socket(address.path) as near:
            unix.connect(near)
    except OSError:
        unix.close()
        raise
    return unix


# ---- step batch -----------------------------------------------------------------------------------------------------
# A message per step would cost more than the rest of `OuterLoop.step`. So steps are held until FLUSH_S have passed
# since the last that was sent; a step that itself took as long is sent at once. Any other message to the agent sends
# the held steps first (AgentClient), so that the agent has counted them when it answers. If a script pauses (for an
# evaluation), a thread sends them LATEST_S after the last step.
#
# A rank that dies loses the held steps. Nothing is settled wrongly by that: only the answer to a question freezes a
# push or fills a checkpoint, and no question overtakes a step. So the held steps were in no push, and their samples
# count as still to be trained, as all work since the last freeze does. Only the agent's count of lost tokens is too low
# by them.
#
# Pure: time is an argument, the rank's monotonic clock in seconds.


FLUSH_S = 0.2  # no visible delay, and the cost of a message is shared by all steps in this time
LATEST_S = 2 * FLUSH_S  # longer than FLUSH_S, or the thread would compete with a script that does not pause


class StepBatch:
    """Accumulates the steps of one attempt; keeps no list of them."""

    def __init__(self) -> None:
        self._steps = self._tokens = self._losses = 0
        self._loss_sum, self._finite = 0.0, True
        self._newest: Stepped | None = None  # its data ranges are valid for all held steps
        self._first_s = 0.0  # when the first held step ended
        self._last_s = -inf  # when the last reported step ended
        self._sent_s = -inf  # when the last sent step ended

    def is_apart(self, ended_s: float) -> bool:
        """Return whether steps that are held ended so long before this one that their mean time is no measure of it:
        send them first.
        """
        return ended_s - self._last_s >= FLUSH_S

    def add_step(self, step: Stepped, ended_s: float) -> bool:
        """Hold a step; return whether it is time to send."""
        if not self._steps:
            self._first_s = ended_s
        self._steps += 1
        self._tokens += step.tokens
        if step.loss is not None:
            self._loss_sum, self._losses = self._loss_sum + step.loss, self._losses + 1
        self._finite &= step.finite
        self._newest, self._last_s = step, ended_s
        return ended_s - self._sent_s >= FLUSH_S

    def due_s(self) -> float:
        """Return when the held steps must be sent even if no step follows; infinity if none is held."""
        return max(self._sent_s, self._first_s) + LATEST_S if self._steps else inf

    def take_steps(self, now: float) -> Stepped | None:
        """Return the held steps as one message to be sent now; None if there is none."""
        newest = self._newest
        if newest is None:
            return None
        merged = replace(
            newest,
            tokens=self._tokens,
            loss=self._loss_sum / self._losses if self._losses else None,
            finite=self._finite,
            steps=self._steps,
            losses=self._losses,
            span_s=self._last_s - self._first_s,
            ago_s=max(0.0, now - self._last_s),
        )
        self._steps = self._tokens = self._losses = 0
        self._loss_sum, self._finite, self._newest, self._sent_s = 0.0, True, None, self._last_s
        return merged


# ---- collectives ----------------------------------------------------------------------------------------------------
# The collectives of a training job: rank 0 talks to the agent, and its answers are broadcast to all ranks
# (docs/rationale.md#25).
#
# They run in a separate gloo group, so they never queue behind the training's collectives. Every rank makes the same
# calls in the same order. A job of one process needs no torch.distributed.


HOST = "cpu"  # named everywhere: torch.set_default_device may have made another one the script's default


class JobCollectives:
    """The collectives of one training job; every method but `close` is collective."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        """Create the group if torch.distributed is initialised; every rank must call this.

        deadline_s  how long a `barrier` waits for ranks that have not reached it
        """
        self._deadline = timedelta(seconds=deadline_s)
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=self._deadline) if self.world_size > 1 else None
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"this job has {os.environ['WORLD_SIZE']} ranks: call torch.distributed.init_process_group first"
            )

    def barrier(self, call: str) -> None:
        """Wait until all ranks have reached `call`, a method of OuterLoop that the training script calls.

        Raises LocalProtocolError after the deadline; on rank 0 it names the missing ranks.
        """
        if self._group is None:
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._deadline, wait_all_ranks=True)
        except RuntimeError as error:
            raise LocalProtocolError(
                f"not all {self.world_size} ranks reached {call} within {self._deadline.total_seconds():g} s: every "
                f"rank must call the outer loop alike, in the same order. {str(error).splitlines()[0]}"
            ) from error

    def broadcast(self, message: bytes | None) -> bytes:
        """Send rank 0's `message` to all ranks and return it; the others pass None."""
        if self._group is None:
            assert message is not None
            return message
        length = torch.tensor([0 if message is None else len(message)], device=HOST)
        dist.broadcast(length, 0, group=self._group)
        body = torch.empty(int(length[0]), dtype=torch.uint8, device=HOST)
        if message is not None:
            body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        dist.broadcast(body, 0, group=self._group)
        return bytes(body.numpy())

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message on all ranks, in rank order."""
        if self._group is None:
            return [message]
        lengths = self.all_sum([len(message) if r == self.rank else 0 for r in range(self.world_size)])
        padded = torch.frombuffer(bytearray(message.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=self._group)
        return [bytes(one[:length].numpy()) for one, length in zip(gathered, lengths, strict=True)]

    def exchange_tensors(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
        """Send each tensor of `sends` to its rank, and fill those of `receives` from theirs; return when all are
        complete.

        Every send needs a receive of the same number of elements; ranks with neither need not call this. The tensors
        are all on the host, or all on a device that `can_exchange` accepts.
        """
        moved = {tensor.device.type for tensor in (*sends.values(), *receives.values())}
        group = dist.group.WORLD if moved - {"cpu"} else self._group
        work = [dist.P2POp(dist.irecv, tensor, rank, group=group) for rank, tensor in sorted(receives.items())]
        work += [dist.P2POp(dist.isend, tensor, rank, group=group) for rank, tensor in sorted(sends.items())]
        for one in dist.batch_isend_irecv(work) if work else ():
            one.wait()

    def can_exchange(self, device: torch.device, wanted: bool) -> bool:
        """Return whether the job's own process group can move tensors on every rank's device, so that none go through
        the host.

        wanted  this rank will exchange tensors. If no rank will, the group is not used: its first use costs each rank a
                communicator with all ranks, hundreds of MB of device memory in a large job
        """
        if self._group is None:
            return False
        pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
        able = any(pair[0] == device.type != "cpu" and pair[-1] != "gloo" for pair in pairs)
        all_able, none_wants = self.all_min([int(able), int(not wanted)])
        if not all_able or none_wants:
            return False
        dist.all_reduce(torch.zeros(1, device=device))  # the first use of a group must be by all of its ranks
        return True

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks of each number."""
        return self._all_reduce(numbers, dist.ReduceOp.MIN)

    def all_sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum over all ranks of each number."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def number_ranks(self, included: bool) -> tuple[int, int]:
        """Number the `included` ranks from 0; return this rank's number (meaningless if not included) and their
        count.
        """
        present = [bool(told) for told in self.all_gather(b"\1" if included else b"")]
        return sum(present[: self.rank]), sum(present)

    def close(self) -> None:
        if self._group is not None:
            with suppress(ValueError):  # the script has destroyed the default group, and this one with it
                dist.destroy_process_group(self._group)
            self._group = None

    def _all_reduce(self, numbers: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device=HOST)
        dist.all_reduce(tensor, op=op, group=self._group)
        return [int(n) for n in tensor]


def check_all_ranks(holds: bool) -> bool:
    """Return whether `holds` is true on every rank of the job, over the script's own process group. Collective."""
    found = [holds]
    if dist.is_initialized():
        found = [False] * dist.get_world_size()
        dist.all_gather_object(found, holds)
    return all(found)


# ---- agent client ---------------------------------------------------------------------------------------------------
# `ask_agent` and `ask_until_answered` are collective. Each AskAgain reaches all ranks: no collective outlasts a poll.
# Inner steps may be held back briefly (StepBatch); no other message overtakes them. If a script pauses, a thread
# of rank 0 sends the steps that are held.


class AgentClient:
    """All ranks' access to their agent; rank 0 connects at the first question."""

    def __init__(self, collectives: JobCollectives, agent: Address, poll_s: float) -> None:
        self._collectives, self._agent, self._poll_s = collectives, agent, poll_s
        self._connection: AgentConnection | None = None
        self._step_batch = StepBatch()
        self._sending = threading.Lock()  # guards the batch and the socket, so that messages are not interleaved
        self._holding, self._closed = threading.Event(), threading.Event()
        self._flusher: threading.Thread | None = None

    def ask_until_answered(self, question: Question) -> Answer:
        """Repeat the question until the agent's answer is not AskAgain; return it on all ranks. Collective."""
        while isinstance(answer := self.ask_agent(question), AskAgain):
            pass
        return answer

    def ask_agent(self, question: Question) -> Answer:
        """Return the agent's answer to rank 0's question on all ranks; an error is raised on all ranks alike.
        Collective.
        """
        message = messages.encode_message(self._ask_agent(question)) if self._collectives.rank == 0 else None
        answer = cast(Answer, messages.decode_message(self._collectives.broadcast(message)[messages.LENGTH.size :]))
        if isinstance(answer, ErrorReply):
            raise (class_named(answer.error) or DipsError)(answer.message)
        return answer

    def notify_agent(self, notice: Notice) -> None:
        """Send a message that has no answer; does nothing on ranks other than 0."""
        if self._connection:
            self._send_message(self._connection, notice)

    def report_step(self, step: Stepped, ended_s: float) -> None:
        """Send an inner step, batched or alone; `ended_s` is on the monotonic clock. Does nothing on ranks other than
        0.
        """
        if not self._connection:
            return
        with self._sending:
            if self._step_batch.is_apart(ended_s):
                self._send_steps(self._connection)
            if self._step_batch.add_step(step, ended_s):
                self._send_steps(self._connection)
                return
        if not self._holding.is_set():
            self._holding.set()
            self._start_flusher(self._connection)

    def report_progress(self, attempt: int, moved: int, total: int, idle_s: float) -> str:
        """Report a transfer's progress to the agent; return why to end it, or "" to continue. Returns "" on ranks other
        than 0.

        idle_s  seconds since this rank has moved all its bytes
        """
        if not self._connection:
            return ""
        try:
            answer = self._exchange(self._connection, TransferProgress(attempt, moved, total, idle_s))
        except DipsError as error:  # the other ranks wait in a collective: the transfer must fail there, on all ranks
            return str(error)
        return "" if isinstance(answer, Noted) else getattr(answer, "reason", str(answer))

    def disconnect(self) -> None:
        """Close the connection without a message: the agent then ends the attempt."""
        self._closed.set()
        self._holding.set()
        if self._connection:
            self._connection.close()

    def _ask_agent(self, question: Question) -> Answer:
        try:
            if self._connection is None:
                self._connection = AgentConnection(self._agent, self._poll_s)
            return self._exchange(self._connection, question)
        except DipsError as error:
            return ErrorReply(type(error).__name__, str(error))

    def _exchange(self, connection: AgentConnection, question: Question) -> Answer:
        self._send_message(connection, question)
        return connection.receive_answer(type(question).__name__)

    def _send_message(self, connection: AgentConnection, message: Question | Notice) -> None:
        with self._sending:
            self._send_steps(connection)
            connection.send_message(message)

    def _send_steps(self, connection: AgentConnection) -> None:
        steps = self._step_batch.take_steps(time.monotonic())
        if steps is not None:
            connection.send_message(steps)

    # ---- a script that pauses ----------------------------------------------------------------------------------------

    def _start_flusher(self, connection: AgentConnection) -> None:
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_steps, args=(connection,), name="steps", daemon=True)
            self._flusher.start()

    def _flush_steps(self, connection: AgentConnection) -> None:
        """Send held steps that no further step sends, LATEST_S after they were due; runs in a thread of rank 0."""
        while self._holding.wait() and not self._closed.wait(LATEST_S):
            with self._sending:
                try:
                    if self._step_batch.due_s() <= time.monotonic():
                        self._send_steps(connection)
                except DipsError:  # the agent is gone: the script's next message raises this where it can be handled
                    return
                if self._step_batch.due_s() == inf:  # nothing is held
                    self._holding.clear()
