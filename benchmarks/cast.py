"""What all ends of an ablation agree on: the model, where its layers lie, which part each rank holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Self

import numpy as np

from dips.codecs import Codec
from dips.protocol.manifest import BYTES_PER_PARAMETER, Layer, Manifest, Parameter
from dips.wire.chunks import Piece, split_chunks
from dips.wire.frame import Range, encode_ranges

RUN, SINC, CHUNK_BYTES, WAIT_S = "ablation", 1, 1 << 20, 120.0


@dataclass(frozen=True, slots=True)
class Cast:
    """`numel` elements in `layers` equal layers, dealt to the slaves in turn; each rank holds its share of each."""

    slaves: int
    ranks: int  # of one cluster
    layers: int
    numel: int
    codec: Codec = Codec.FP32

    @classmethod
    def parse(cls, text: str) -> Self:
        told = json.loads(text)
        return cls(**{**told, "codec": Codec[told["codec"].upper()]})

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def manifest(self) -> Manifest:
        size = self.numel // self.layers
        return Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (size,)),)) for i in range(self.layers)))

    @property
    def nbytes(self) -> int:
        """Of the parameters, in memory."""
        return BYTES_PER_PARAMETER * self.numel

    @property
    def wire_bytes(self) -> int:
        """Of a push, as it travels."""
        share = self.share(0)
        return self.ranks * sum(chunk.nbytes for layer in range(self.layers) for chunk in self.chunks(layer, share))

    def held_by(self, slave: int) -> tuple[int, ...]:
        """Layers of a slave."""
        return tuple(range(slave, self.layers, self.slaves))

    def share(self, rank: int) -> Range:
        """What a rank holds of each layer."""
        size = self.numel // self.layers // self.ranks
        return Range(0, 0, rank * size, size)

    def pieces(self, rank: int, value: float) -> list[Piece]:
        """A rank's arrays."""
        _, _, offset, length = self.share(rank)
        return [Piece(i, 0, offset, length, np.full(length, value, np.float32)) for i in range(self.layers)]

    def chunks(self, layer: int, share: Range) -> list[Range]:
        """How a share of a layer travels."""
        codec = self.codec
        whole = encode_ranges(codec.dtype, [Range(layer, 0, share.offset, share.length)])
        return list(split_chunks(whole, codec.chunk_bytes(CHUNK_BYTES)))


TURNS, RANDOM = "turns", "random"  # orders of asking: as it is, and any, to compare it with


def random_order(count: int, salt: str) -> tuple[int, ...]:
    """Return 0 … count − 1 shuffled, the same for the same salt."""
    return tuple(sorted(range(count), key=lambda i: (blake2b(f"{salt}/{i}".encode()).digest(), i)))
