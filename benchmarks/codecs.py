"""What lossy codecs save, cost and change: bytes, speed of spelling, error of the outer step.

Three clusters train the demo's model, small, each on its own text, for 20 outer steps (mean of the differences,
Nesterov 0.7/0.8, no clip, so that nothing hides an error; the inner learning rate falls to a tenth). *Error in a
round*: of the averaged pseudo-gradient against the exact one, on the same trajectory. *Error of the sum*: of all that
has been averaged after the last round; error feedback keeps it at one round's, without it what a codec always rounds
the same way is lost for good. *Bytes*: of one round of a cluster that holds the version before, counted on its
connection (wire_bytes.py). Speeds are of one thread, a chunk at a time, in bytes of fp32. What whole runs learn that
train on what the codecs brought is in codec_losses.py.
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
from benchmarks.wire_bytes import bytes_of_round
from dips.codecs import PULL_CODECS, Codec
from dips.demo import data
from dips.demo.model import Decoder, Shape, loss_of
from dips.outer import kernels
from dips.outer.updates import Update, count_blocks
from dips.outer_step import nesterov_numbers, returned_share
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.quantisers import QUANTISERS, Codes
from dips.slave.sender import cut_updates
from dips.wire.chunks import LayerLayout, decode_body, encode_body, put_body, put_pulled, split_chunks
from dips.wire.frame import Range, range_type

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Mean = Callable[[list[F32]], F32]  # the clusters' differences → the average that the slaves would have

SHAPE = Shape(width=64, layers=2, heads=2, hidden=176, context=128)
CLUSTERS, INNER_STEPS, SEQUENCES, LENGTH = 3, 10, 8, 128
INNER_LR, OUTER_LR, MOMENTUM = 3e-3, 0.7, 0.8
LEAST_LR = 0.1  # of INNER_LR, at the end
NUDGE = 1e-3  # of each element of θ at the begin, times a normal number: another start that is as good
LOSSY = tuple(codec for codec in Codec if codec.lossy)
WAYS = tuple((codec, codec if codec in PULL_CODECS else Codec.INT8) for codec in LOSSY)  # push, pull
MOST_BYTES = {(Codec.INT8, Codec.INT8): 2.1, (Codec.INT4, Codec.INT8): 1.6}  # of a round, a parameter
NUMEL = 16 << 20  # of the counted round


@dataclass
class CodecChannel:
    """One cluster's way to the slaves; a reference of dips/client/rank/feedback.py in three lines."""

    codec: Codec
    feedback: bool
    owed: F32 | float = 0.0

    def bring(self, difference: F32) -> F32:
        carried = np.asarray(difference + self.owed, np.float32)
        brought = decode_body(self.codec, encode_body(self.codec, carried), carried.size)
        self.owed = carried - brought if self.feedback else 0.0
        return brought


def average(channels: list[CodecChannel], differences: list[F32]) -> F32:
    """The mean of what arrives, in fp64 so that only the codec errs."""
    arrived = [channel.bring(d).astype(np.float64) for channel, d in zip(channels, differences, strict=True)]
    return np.asarray(np.mean(arrived, axis=0), np.float32)


def channels(codec: Codec, feedback: bool) -> list[CodecChannel]:
    return [CodecChannel(codec, feedback) for _ in range(CLUSTERS)]


@dataclass
class Shadow:
    """A codec beside an exact run: what it would have averaged of the same differences."""

    mean: Mean
    rounds: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # over the exact one's
    along: list[float] = field(default_factory=list)  # how much of the exact one is in it
    exact: F64 | float = 0.0
    brought: F64 | float = 0.0

    def watch(self, differences: list[F32]) -> None:
        exact, brought = average(channels(Codec.FP32, False), differences), self.mean(differences)
        self.rounds.append(relative(brought.astype(np.float64), exact.astype(np.float64)))
        wide, wide_brought = exact.astype(np.float64), brought.astype(np.float64)
        self.norms.append(float(np.linalg.norm(wide_brought) / np.linalg.norm(wide)))
        self.along.append(float(wide_brought @ wide / (wide @ wide)))
        self.exact, self.brought = self.exact + wide, self.brought + wide_brought

    @property
    def of_sum(self) -> float:
        return relative(self.brought, self.exact)


def relative(value: F64 | float, exact: F64 | float) -> float:
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


class PulledVersions:
    """The slaves' outer step, and what the clusters have of it after their pulls."""

    def __init__(self, theta: F32, codec: Codec) -> None:
        numel = theta.size
        self._codec, self._momentum, self.theta = codec, np.zeros_like(theta), theta.copy()
        self._whole, layout = Range(0, 0, 0, numel), Manifest((Layer("all", (Parameter("all", (numel,)),)),))
        self._layout = LayerLayout(layout, (0,))
        codes: Codes = np.zeros(numel, QUANTISERS[codec].codes if codec.lossy else np.uint8)
        steps = {0: np.zeros(count_blocks(numel), np.float32)} if codec.block else {}
        self._update = Update(codec, {0: codes}, steps)

    def step(self, difference: F32) -> None:
        """Take the outer step, and pull it."""
        acc, after = -difference, np.empty_like(self.theta)
        kernels.apply(self.theta, acc, self._momentum, 1.0, OUTER_LR, nesterov_numbers(MOMENTUM), after, 0)
        if not self._codec.lossy:
            self.theta = after
        else:
            back = returned_share(OUTER_LR, nesterov_numbers(MOMENTUM))
            steps = self._update.steps.get(0, np.zeros(0, np.float32))
            kernels.round_update(self._codec, self.theta, after, acc, back, self._update.codes[0], steps)
            self._pull()
            assert self.theta.tobytes() == after.tobytes(), "a pull is not the version"
        self._momentum = acc

    def _pull(self) -> None:
        whole = range_type(self._codec.update_dtype, 1)(*self._whole)
        for chunk in split_chunks([whole], 1 << 20):
            cut = slice(chunk.offset, chunk.offset + chunk.length)
            put_pulled(chunk, cut_updates(self._layout, (self._update,), chunk), self.theta[cut])


def train(
    mean: Mean,
    rounds: int,
    watch: Callable[[list[F32]], None] = lambda _: None,
    pull: Codec = Codec.FP32,
    seed: int = 0,
    start: int = 0,
) -> float:
    """Take `rounds` outer steps; return the validation loss, nats per byte. `start` 0: the seed's θ, others near."""
    torch.manual_seed(seed)
    model, corpus = Decoder(SHAPE), data.load_corpus(1)
    if start:
        drawn = np.random.default_rng(start).standard_normal(flat(model).size).astype(np.float32)
        load(model, flat(model) * (1 + np.float32(NUDGE) * drawn))
    served = PulledVersions(flat(model), pull)
    states = [torch.optim.AdamW(model.parameters(), lr=INNER_LR).state_dict() for _ in range(CLUSTERS)]
    for round_ in range(rounds):
        differences = []
        for cluster in range(CLUSTERS):
            load(model, served.theta)
            optimizer = torch.optim.AdamW(model.parameters(), lr=INNER_LR)
            optimizer.load_state_dict(states[cluster])
            for group in optimizer.param_groups:
                group["lr"] = INNER_LR * (1 - (1 - LEAST_LR) * round_ / rounds)
            inner_steps(model, optimizer, corpus, (seed * rounds + round_) * CLUSTERS + cluster)
            states[cluster] = optimizer.state_dict()
            differences.append(flat(model) - served.theta)
        watch(differences)
        served.step(mean(differences))
    load(model, served.theta)
    with torch.no_grad():
        return float(loss_of(model, torch.from_numpy(corpus.validation_sample(256, LENGTH).astype("int64"))))


def inner_steps(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: data.Corpus, number: int) -> None:
    for step, batch in enumerate(corpus.batches(number, SEQUENCES, LENGTH)):
        if step == INNER_STEPS:
            return
        optimizer.zero_grad()
        loss_of(model, torch.from_numpy(batch.astype("int64"))).backward()
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
    for codec in LOSSY:
        works[f"encode {codec}"] = partial(repeat, partial(encode_body, codec, x))
        works[f"decode and add {codec}"] = partial(repeat, partial(put_body, codec, encode_body(codec, x), slot))
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

    train(partial(average, channels(Codec.FP32, False)), rounds, watch)
    for (name, feedback), shadow in shadows.items():
        what = f"{name}, {'with' if feedback else 'without'} feedback"
        bench.row(f"error in a round, {what}", float(np.median(shadow.rounds)), "")
        bench.row(
            f"error of the sum, {what}",
            shadow.of_sum,
            "",
            against="without" if feedback else "",
            of=shadows[name, False].of_sum if feedback else None,
            least=2.0 if feedback else None,
            less=True,
        )
        if feedback:  # what an outer learning rate, a clip or a gate would see
            norm, along = (float(np.mean(shares)) for shares in (shadow.norms, shadow.along))
            bench.note(f"{name} with feedback: {norm:.4f} of the exact norm, {along:.5f} of the exact sum in it")
    bytes_of_rounds(bench)


def bytes_of_rounds(bench: Bench) -> None:
    """A push and the pull after it, on the wire."""
    numel = NUMEL // 16 if bench.quick else NUMEL
    plain = sum(bytes_of_round(Codec.FP32, Codec.FP32, numel))
    bench.row("bytes of a round, fp32 both ways", plain, "B")
    for push, pull in WAYS:
        total, most = sum(bytes_of_round(push, pull, numel)), MOST_BYTES.get((push, pull))
        least = None if most is None else plain / most
        name = f"bytes of a round, {push} pushes and {pull} pulls"
        bench.row(name, total, "B", against="fp32", of=plain, least=least, less=True)


if __name__ == "__main__":
    main("codecs", __doc__, measure)
