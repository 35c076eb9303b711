"""What lossy pushes save, cost and change: bytes, speed of spelling, error of the outer step, loss of a small model.

Three clusters train the demo's model, small, each on its own text, for 20 outer steps (mean of the differences,
Nesterov 0.7/0.8, no clip, so that nothing hides an error). *Error in a round*: of the averaged pseudo-gradient against
the exact one, on the same trajectory. *Error of the sum*: of all that has been averaged after the last round; error
feedback keeps it at one round's, without it what a codec always rounds the same way is lost for good. *Loss*: of whole
runs that train on what the codec brought, one seed: a look, not a comparison of optimizers. Speeds are of one thread, a
chunk at a time, in bytes of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.harness import Bench, main
from dips.demo import data
from dips.demo.model import Decoder, Shape, loss_of
from dips.outer import reference
from dips.wire.codecs import CODECS, Codec

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Mean = Callable[[list[F32]], F32]  # the clusters' differences → the average that the slaves would have

SHAPE = Shape(width=64, layers=2, heads=2, hidden=176, context=128)
CLUSTERS, INNER_STEPS, SEQUENCES, LENGTH = 3, 10, 8, 128
INNER_LR, OUTER_LR, MOMENTUM = 3e-3, 0.7, 0.8
LOSSY = ("bf16", "int8")


@dataclass
class CodecChannel:
    """One cluster's way to the slaves; a reference of client/feedback.py in three lines."""

    codec: Codec
    feedback: bool
    owed: F32 | float = 0.0

    def bring(self, difference: F32) -> F32:
        carried = np.asarray(difference + self.owed, np.float32)
        brought = self.codec.decode(self.codec.encode(carried), carried.size)
        self.owed = carried - brought if self.feedback else 0.0
        return brought


def average(channels: list[CodecChannel], differences: list[F32]) -> F32:
    """The mean of what arrives, in fp64 so that only the codec errs."""
    arrived = [channel.bring(d).astype(np.float64) for channel, d in zip(channels, differences, strict=True)]
    return np.asarray(np.mean(arrived, axis=0), np.float32)


def channels(name: str, feedback: bool) -> list[CodecChannel]:
    return [CodecChannel(CODECS[name], feedback) for _ in range(CLUSTERS)]


@dataclass
class Shadow:
    """A codec beside an exact run: what it would have averaged of the same differences."""

    mean: Mean
    rounds: list[float] = field(default_factory=list)
    exact: F64 | float = 0.0
    brought: F64 | float = 0.0

    def watch(self, differences: list[F32]) -> None:
        exact, brought = average(channels("fp32", False), differences), self.mean(differences)
        self.rounds.append(relative(brought.astype(np.float64), exact.astype(np.float64)))
        self.exact, self.brought = self.exact + exact.astype(np.float64), self.brought + brought.astype(np.float64)

    @property
    def of_sum(self) -> float:
        return relative(self.brought, self.exact)


def relative(value: F64 | float, exact: F64 | float) -> float:
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def train(mean: Mean, rounds: int, watch: Callable[[list[F32]], None] = lambda _: None) -> float:
    """Take `rounds` outer steps; return the validation loss, nats per byte."""
    torch.manual_seed(0)
    model, corpus = Decoder(SHAPE), data.load_corpus(1)
    theta = flat(model)
    momentum = np.zeros_like(theta)
    states = [torch.optim.AdamW(model.parameters(), lr=INNER_LR).state_dict() for _ in range(CLUSTERS)]
    for round_ in range(rounds):
        differences = []
        for cluster in range(CLUSTERS):
            load(model, theta)
            optimizer = torch.optim.AdamW(model.parameters(), lr=INNER_LR)
            optimizer.load_state_dict(states[cluster])
            inner_steps(model, optimizer, corpus, round_ * CLUSTERS + cluster)
            states[cluster] = optimizer.state_dict()
            differences.append(flat(model) - theta)
        watch(differences)
        acc, after = -mean(differences), np.empty_like(theta)
        reference.apply(theta, acc, momentum, 1.0, OUTER_LR, MOMENTUM, after)
        theta, momentum = after, acc
    load(model, theta)
    with torch.no_grad():
        return float(loss_of(model, torch.from_numpy(corpus.validation_sample(64, LENGTH).astype("int64"))))


def inner_steps(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: data.Corpus, number: int) -> None:
    for step, batch in enumerate(corpus.batches(number, SEQUENCES, LENGTH)):
        if step == INNER_STEPS:
            return
        optimizer.zero_grad()
        loss_of(model, torch.from_numpy(batch.astype("int64"))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def flat(model: nn.Module) -> F32:
    return np.asarray(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy())


def load(model: nn.Module, theta: F32) -> None:
    nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), model.parameters())


def speeds(bench: Bench) -> None:
    """Encoding and decode-and-add of one chunk of 1 MiB, beside a copy of it."""
    x = (1e-3 * np.random.default_rng(0).standard_normal(1 << 18)).astype(np.float32)
    slot, again = np.zeros_like(x), range(50)

    def repeat(work: Callable[[], object]) -> None:
        for _ in again:
            work()

    works = {"copy": partial(repeat, partial(np.copyto, slot, x))}
    for name in LOSSY:
        codec = CODECS[name]
        works[f"encode {name}"] = partial(repeat, partial(codec.encode, x))
        works[f"decode and add {name}"] = partial(repeat, partial(codec.put, codec.encode(x), slot))
    took = bench.together(works)
    moved = x.nbytes * len(again)
    for name in [n for n in works if n != "copy"]:
        bench.row(name, moved / took[name], "B/s", against="copy", of=moved / took["copy"])


def measure(bench: Bench) -> None:
    rounds = 5 if bench.quick else 20
    speeds(bench)
    shadows = {(n, f): Shadow(partial(average, channels(n, f))) for n in LOSSY for f in (False, True)}
    bench.say(f"{rounds} outer steps in fp32, the codecs in its shadow")

    def watch(differences: list[F32]) -> None:
        for shadow in shadows.values():
            shadow.watch(differences)

    exact = train(partial(average, channels("fp32", False)), rounds, watch)
    bench.row("loss fp32", exact, "nats")
    for (name, feedback), shadow in shadows.items():
        what = f"{name}, {'with' if feedback else 'without'} feedback"
        bench.say(f"{rounds} outer steps in {what}")
        loss = train(partial(average, channels(name, feedback)), rounds)
        bench.row(f"error in a round, {what}", float(np.median(shadow.rounds)), "")
        bare = shadows[name, False].of_sum if feedback else None
        bench.row(
            f"error of the sum, {what}",
            shadow.of_sum,
            "",
            against="without" if feedback else "",
            of=bare,
            least=2.0 if feedback else None,
            less=True,
        )
        bench.row(f"loss {what}", loss, "nats", against="fp32", of=exact, least=0.98 if feedback else None, less=True)
    for name in LOSSY:
        piece = CODECS[name].range(0, 0, 0, 1 << 18)
        bench.row(f"bytes of a push, {name}", piece.nbytes / piece.length, "B", against="fp32", of=4.0, less=True)


if __name__ == "__main__":
    main("codecs", __doc__, measure)
