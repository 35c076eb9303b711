"""What comes out of a run can be used: `dips.load` and a directory that `from_pretrained` reads, ties included."""

from __future__ import annotations

import sys
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dips
from dips.client.parallel import full_parameters
from dips.config import load_run
from dips.errors import ConfigError, CorruptSnapshot, DipsError
from dips.ids import GENESIS, VersionId
from dips.master.genesis import ledger_path, make_run
from dips.master.ledger import Ledger
from dips.outer_step import nesterov_step
from dips.protocol.manifest import Manifest
from dips.protocol.records import RoundReserved, ScoreHistory, VersionCommitted
from dips.store.files import write_version
from tests.run_files import write_run_file
from tests.typed import type_dips

TOKENS = torch.arange(12).view(1, 12)
V3 = VersionId(3, 4)


def build(tied: bool = True) -> LlamaForCausalLM:
    """A tiny Llama whose head is its embedding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def build_untied() -> LlamaForCausalLM:
    return build(tied=False)


def convert_to_nothing(theta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return theta


def build_plain() -> nn.Module:
    return nn.Linear(2, 2)


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(TOKENS).logits
    return result


class Exported:
    """A run whose slaves hold v3@r4 of a trained model."""

    def __init__(self, directory: Path, trained: nn.Module) -> None:
        self.file = write_run_file(directory)
        tensors = {name: t.detach().numpy() for name, t in full_parameters(trained)[0].items()}
        row = make_run(load_run(self.file), {n: np.zeros_like(t) for n, t in tensors.items()}, wall=lambda: 0.0)
        manifest = Manifest.from_json(row.manifest)
        for name, layers in row.placement:
            path = directory / name / str(V3)
            path.mkdir(parents=True)
            theta = [np.concatenate([tensors[p.name].ravel() for p in manifest.layers[i].parameters]) for i in layers]
            flat = [array for t in theta for array in (t, np.zeros_like(t))]
            write_version(path, ("r", name, 1), V3, manifest, layers, flat)

    def commit(self, version: VersionId, parent: VersionId, durable: bool) -> None:
        """Write a version's row."""
        step, history = nesterov_step(1.0, 0.7, 0.8), ScoreHistory((), ())
        row = VersionCommitted(version, parent, durable, (), (), step, 1.0, False, (), (), history, 0.0)
        with closing(Ledger.open(ledger_path(load_run(self.file)))) as ledger:
            ledger.write_records([RoundReserved(version.round, 0.0), row])

    def export(self, output: Path, *words: str, version: VersionId | None = V3) -> str:
        asked = [] if version is None else ["--version", str(version)]
        return type_dips("export", "--config", str(self.file), "--output", str(output), *asked, *words)


@pytest.fixture(name="trained", scope="module")
def trained_model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    return build()


@pytest.fixture(name="exported")
def made_run(tmp_path: Path, trained: LlamaForCausalLM) -> Exported:
    return Exported(tmp_path, trained)


def test_the_directory_is_read_by_from_pretrained(
    exported: Exported, trained: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Bit for bit the trained model's logits, with its configuration; the head is the embedding, one tensor."""
    assert str(V3) in exported.export(tmp_path / "hf", "--format", "hf", "--factory", f"{__name__}:build")
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o700, "for its owner"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits_of(model), logits_of(trained))
    assert model.config.num_hidden_layers == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert not list(tmp_path.glob(".unfinished*"))


def test_two_exports_do_not_write_to_one_place(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second export of one output removed what the first one had written, which put the second's in its place half
    full.
    """
    places, save = list[Path](), LlamaForCausalLM.save_pretrained

    def note_place(model: LlamaForCausalLM, place: Path) -> None:
        places.append(place)
        save(model, place)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", note_place)
    for _ in range(2):
        exported.export(tmp_path / "hf", "--format", "hf", "--factory", f"{__name__}:build")
        (tmp_path / "hf").rename(tmp_path / f"hf-{len(places)}")
    assert len(set(places)) == 2 and {place.parent.parent for place in places} == {tmp_path}


def test_a_head_that_is_on_no_disk_yet_is_not_looked_for(exported: Exported, tmp_path: Path) -> None:
    """With `durability: async`, or where a disk has no room, snapshots follow the head: the newest one is written,
    and never the first model for want of one.
    """
    exported.commit(VersionId(1, 1), GENESIS, durable=False)
    with pytest.raises(ConfigError, match="no version of the run is on all disks yet: take its head v1@r1 with"):
        exported.export(tmp_path / "model.safetensors", version=None)
    exported.commit(V3, VersionId(1, 1), durable=True)
    exported.commit(VersionId(4, 5), V3, durable=False)
    said = exported.export(tmp_path / "model.safetensors", version=None)
    assert f"v4@r5 is not on all disks yet: taking {V3}" in said
    assert f"wrote {V3} to" in said


def test_like_another_directory(exported: Exported, trained: LlamaForCausalLM, tmp_path: Path) -> None:
    """The configuration is read from a directory, whose tokenizer is copied; its weights are not needed. The output may
    lie in a directory that is not there yet, or be an empty one.
    """
    like = tmp_path / "like"
    torch.manual_seed(8)
    build().save_pretrained(like)
    (like / "model.safetensors").unlink()
    (like / "tokenizer.json").write_text("{}")
    new, empty = tmp_path / "deep" / "hf", tmp_path / "empty"
    empty.mkdir()
    for directory in (new, empty):
        exported.export(directory, "--format", "hf", "--like", str(like))
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(directory)), logits_of(trained))
        assert (directory / "tokenizer.json").read_text() == "{}"


def test_load_fills_a_plain_module(exported: Exported, trained: LlamaForCausalLM, tmp_path: Path) -> None:
    """The version's name comes back; a model in another precision takes the same numbers."""
    exported.export(tmp_path / "model.safetensors")
    model = build()
    assert dips.load(model, tmp_path / "model.safetensors") == str(V3)
    assert torch.equal(logits_of(model), logits_of(trained))
    half = build().to(torch.bfloat16)
    dips.load(half, str(tmp_path / "model.safetensors"))
    assert torch.equal(half.lm_head.weight, trained.lm_head.weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "hf"], "of what model"),
        (["--format", "hf", "--factory", "a:b", "--like", "x"], "of what model"),
        (["--format", "hf", "--factory", "a:b", "--convert", "a:c"], "of what model"),
        (["--format", "hf", "--convert", "convert"], "--convert: expected MODULE:FUNCTION"),
        (["--format", "hf", "--convert", f"{__name__}:absent"], "--convert .*absent"),
        (["--format", "hf", "--convert", f"{__name__}:convert_to_nothing"], "expected a PreTrainedModel .* got dict"),
        (["--format", "hf", "--convert", "dips.demo.llama:convert"], "cannot convert this version: KeyError"),
        (["--format", "onnx"], "expected safetensors or hf"),
        (["--format", "hf", "--factory", f"{__name__}:build_plain"], "PreTrainedModel"),
        (["--format", "hf", "--factory", f"{__name__}:build_untied"], "missing: lm_head.weight"),
        (["--format", "hf", "--like", "nowhere"], "expected a directory with config.json"),
    ],
)
def test_what_is_no_such_model_is_refused(exported: Exported, tmp_path: Path, words: list[str], message: str) -> None:
    """Said before anything is written."""
    with pytest.raises(ConfigError, match=message):
        exported.export(tmp_path / "hf", *words)
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".unfinished*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factory", "mymodle:build"], "--factory mymodle:build: No module named 'mymodle'"),
        (["--convert", f"{__name__}:absent"], "--convert .*absent"),
        (["--like", "nowhere"], "expected a directory with config.json"),
        (["--factory", f"{__name__}:build"], "there is there and not empty: name a new directory"),
        (["--factory", f"{__name__}:build_untied"], "--output: . has no name of its own: name a new directory"),
    ],
)
def test_what_is_wrong_is_told_before_a_version_is_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Not behind the hour that a large version takes, which was thrown away."""
    monkeypatch.chdir(tmp_path)
    (output := Path("there")).mkdir()
    if words[-1] == f"{__name__}:build":
        (output / "x").touch()
    if words[-1] == f"{__name__}:build_untied":
        monkeypatch.chdir(output)
        output = Path()
    asked = ["export", "--master", "127.0.0.1:1", "--output", str(output), "--format", "hf"]
    with pytest.raises(ConfigError, match=message):
        type_dips(*asked, *words)


def test_without_transformers_it_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback, behind the export of the whole version."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    asked = ["export", "--master", "127.0.0.1:1", "--output", str(tmp_path / "hf"), "--format", "hf"]
    with pytest.raises(ConfigError, match=r"--format hf needs transformers here .*: pip install 'di-ps"):
        type_dips(*asked, "--like", "x")


def test_an_export_overwrites_no_directory(exported: Exported, tmp_path: Path) -> None:
    """What lies there belongs to somebody."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        exported.export(tmp_path / "hf", "--format", "hf", "--factory", f"{__name__}:build")
    with pytest.raises(ConfigError, match="hf/x/y: cannot be written: File exists; name another path"):
        exported.export(tmp_path / "hf" / "x" / "y", "--format", "hf", "--factory", f"{__name__}:build")


@pytest.mark.parametrize("version", [None, V3])
def test_snapshots_of_another_run_are_not_exported(
    exported: Exported, tmp_path: Path, version: VersionId | None
) -> None:
    """The directories are those of the run before it, whose name the run file had: with a ledger or without."""
    exported.file.write_text(exported.file.read_text().replace("run: r", "run: q"))
    ledger_path(load_run(exported.file)).unlink()
    with pytest.raises(ConfigError, match=r"s0/v3@r4: expected a version of run q as in .*dips.yaml, got one of run r"):
        exported.export(tmp_path / "model.safetensors", version=version)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": None}, ConfigError, "missing: weight"),
        ({"extra": torch.zeros(1)}, ConfigError, "unknown: extra"),
        (
            {"weight": torch.zeros(2, 3)},
            ConfigError,
            r"weight: expected F32 of shape \(2, 2\), got F32 of shape \(2, 3\)",
        ),
        ({"weight": torch.zeros(2, 2).half()}, ConfigError, "got F16"),
        ({"bias": torch.tensor([0.0, float("nan")])}, CorruptSnapshot, "bias: not all numbers are finite"),
    ],
)
def test_load_is_strict(
    tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[DipsError], message: str
) -> None:
    """Another model, another precision, broken numbers: refused, and the model stays as it is."""
    tensors = {"weight": torch.ones(2, 2), "bias": torch.ones(2)} | change
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "m.safetensors")
    model = nn.Linear(2, 2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(error, match=message):
        dips.load(model, tmp_path / "m.safetensors")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_load_names_what_is_no_file(tmp_path: Path) -> None:
    """A file that is not there, or is torn, or a directory, of which `No such device` would have been said."""
    with pytest.raises(ConfigError, match="no such file"):
        dips.load(nn.Linear(2, 2), tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").write_bytes(b"torn")
    with pytest.raises(CorruptSnapshot, match="no whole safetensors file"):
        dips.load(nn.Linear(2, 2), tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=f"{tmp_path}: is a directory; one of `--format hf` is for from_pretrained"):
        dips.load(nn.Linear(2, 2), tmp_path)


def test_a_model_that_is_frozen_for_inference_is_filled(tmp_path: Path) -> None:
    """As is one of adapters, by what the file holds of it; what that lacks is told, since nothing says what trains."""
    model = nn.Linear(2, 2).requires_grad_(False)
    save_file({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}, tmp_path / "m.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dips.load(model, tmp_path / "m.safetensors")
    assert torch.equal(model.weight, torch.full((2, 2), 3.0)) and not model.bias.any()
    save_file({"weight": torch.full((2, 2), 4.0)}, tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match=r"m\.safetensors does not hold bias, which stay as the model has them"):
        dips.load(model, tmp_path / "m.safetensors")
    assert torch.equal(model.weight, torch.full((2, 2), 4.0))
    with pytest.raises(ConfigError, match="unknown: weight"):
        dips.load(nn.Sequential(model), tmp_path / "m.safetensors")


def test_frozen_parameters_stay_the_modules_own(tmp_path: Path) -> None:
    """A run that shares adapters alone has only these in its file."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    bias = model.bias.clone()
    save_file({"weight": torch.full((2, 2), 3.0)}, tmp_path / "m.safetensors")
    assert dips.load(model, tmp_path / "m.safetensors") is None
    assert torch.equal(model.weight, torch.full((2, 2), 3.0)) and torch.equal(model.bias, bias)
