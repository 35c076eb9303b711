"""A mixture of experts of 250,000 parameters, and as many layers as a run may have: every message has its place."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from dips.client.ipc.messages import MOST_BYTES, ManifestSent, PullNow, encode_message
from dips.errors import ConfigError, CorruptManifest
from dips.ids import PullId, PushId, VersionId
from dips.master import genesis
from dips.master.genesis import manifest_of
from dips.master.waiting import BYTES_PER_LAYER, propose_run
from dips.outer_step import OuterStep
from dips.protocol import manifest
from dips.protocol.effects import Apply, Commit, Fold, Grant, Hold, Order, RankKeys, Registered, SlaveAddress
from dips.protocol.enums import LayerUnit
from dips.protocol.events import ManifestOffered, Measured
from dips.protocol.grouping import PLAIN_GROUPING, Grouping
from dips.protocol.manifest import MAX_JSON_BYTES, MOST_LAYERS, Manifest
from dips.protocol.rank_keys import KEY_CHARS, MOST_FLIP_KEYS
from dips.transport.limits import MASTER_LIMITS, SLAVE_LIMITS
from dips.wire.messages import MAX_INTEGER, MAX_MESSAGE_BYTES, from_proto, to_proto
from dips.wire.packed_manifest import MOST_PACKED, pack_manifest, unpack_manifest

V1 = VersionId(1, 1)
BLOCKS, EXPERTS = 128, 651


def expert_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """250,000 parameters: the experts of each block stand one by one, as in a checkpoint of transformers."""
    yield "model.embed_tokens.weight", (129_280, 7168)
    for block in range(BLOCKS):
        layer = f"model.layers.{block}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{layer}.self_attn.{name}.weight", (7168, 7168)
        yield f"{layer}.mlp.gate.weight", (EXPERTS, 7168)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                yield f"{layer}.mlp.experts.{expert}.{name}.weight", (2048, 7168)
            yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (7168, 2048)


@pytest.fixture(scope="module")
def large() -> Manifest:
    return Manifest.from_shapes(expert_shapes())


def test_a_model_of_250_000_parameters_travels(large: Manifest) -> None:
    """From rank 0 to its agent, on to the master, from `dips seed`, and to slaves: each time in one message."""
    packed, text = pack_manifest(large), large.to_json()
    assert sum(len(layer.parameters) for layer in large.layers) > 250_000 and len(text) < MAX_JSON_BYTES
    assert len(encode_message(ManifestSent("7", packed))) < MOST_BYTES
    offered = to_proto(ManifestOffered("west", large.digest, packed)).SerializeToString()
    assert len(offered) < MASTER_LIMITS.request_bytes
    assert unpack_manifest(packed, large.digest) == text
    registered = to_proto(Registered(1, 1, Hold(), V1, tuple(range(129)), ("0" * 32,) * 129, text))
    assert registered.ByteSize() < MASTER_LIMITS.request_bytes
    assert from_proto(registered, Registered).manifest == text


def test_a_model_of_250_000_parameters_is_seeded(large: Manifest) -> None:
    """Begin brings what was measured of each layer, too; what that takes is known beforehand."""
    tensors = {f"m{i}.w": np.ones(1, np.float32) for i in range(300)}
    small = propose_run(tensors, PLAIN_GROUPING)
    others = len(small.packed) + len(small.digest) + 16
    assert to_proto(small).ByteSize() < others + BYTES_PER_LAYER * 300 < to_proto(small).ByteSize() + 1024
    assert len(pack_manifest(large)) + BYTES_PER_LAYER * len(large.layers) < MOST_PACKED


def test_what_one_message_does_not_bring_is_begun_where_the_master_is() -> None:
    """Each module a layer: their digests and norms take more than 1 MiB."""
    tensors = {f"m{i}.w": np.ones(1, np.float32) for i in range(25_000)}
    with pytest.raises(ConfigError, match=r"measured of its 25000 layers, take more .* make the run by `dips init`"):
        propose_run(tensors, PLAIN_GROUPING)


def test_a_run_has_so_many_layers_at_most() -> None:
    """More are refused when the run is made, and in every manifest that comes."""
    tensors = {f"m{i}.w": np.zeros(1, np.float32) for i in range(4)}
    text = Manifest.from_shapes((name, (1,)) for name in tensors).to_json()
    with (
        mock.patch.object(genesis, "MOST_LAYERS", 3),
        pytest.raises(ConfigError, match=r"shared\.layers: expected at most 3 layers, got 4: `block` makes fewer"),
    ):
        manifest_of(tensors, Grouping(LayerUnit.MODULE))
    with (
        mock.patch.object(manifest, "MOST_LAYERS", 3),
        pytest.raises(CorruptManifest, match="expected at most 3 layers, got 4"),
    ):
        Manifest.from_json(text)


def test_all_that_grows_with_ranks_has_its_place() -> None:
    """A flip for a hundred clusters of 256 ranks was more than a slave takes: each round ended with all slaves lost."""
    clusters, ranks = 1_000, MOST_FLIP_KEYS // 1_000 + 1
    pulls = tuple(PullId(f"{number:064d}", MAX_INTEGER, MAX_INTEGER) for number in range(clusters))
    body = Commit(V1, pulls, (RankKeys(("k" * KEY_CHARS,) * ranks),) * clusters)
    assert to_proto(Order("s", 1, 1, 1, body, 10.0)).ByteSize() < SLAVE_LIMITS.request_bytes


def test_all_that_grows_with_layers_has_its_place() -> None:
    """One slave with all layers that a run may have: its orders, its answers and what ranks are told of it."""
    numbers, layers = (1 / 3,) * MOST_LAYERS, tuple(range(MOST_LAYERS))
    push = PushId("west", 1, 1)
    for body in (Fold(1, push, 1.0, numbers), Apply(1, V1, OuterStep(numbers, 0.7, 0.9, 1.0, 1.0, 0.9))):
        assert to_proto(Order("s", 1, 1, 1, body, 10.0)).ByteSize() < SLAVE_LIMITS.request_bytes, type(body)
    assert to_proto(Measured(numbers, True, numbers)).ByteSize() < MAX_MESSAGE_BYTES
    digests = tuple(f"{layer:032x}" for layer in layers)
    assert to_proto(Registered(1, 1, Hold(), V1, layers, digests, "")).ByteSize() + MOST_BYTES < MAX_MESSAGE_BYTES
    grant = Grant(V1, (SlaveAddress("s", 1, ("h:1",), layers),), 60.0)
    assert len(encode_message(PullNow(1, 1, grant, 0.5))) < MOST_BYTES
