"""`dips new`: the files that a new run begins with hold every key, and work as they stand."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import BaseModel
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.new import CLUSTER, RUN, SHARED, read_template
from dips.config import ClusterFile, OnVersionSection, RunFile, Shared, load_cluster, load_run
from dips.errors import ConfigError, LocalProtocolError
from dips.protocol.options import Options
from tests.typed import type_dips

COMMENTED = re.compile(r"^( *)# ( *[a-z_]+:(?: .*)?)$", re.MULTILINE)
MODELS = {RUN: RunFile, SHARED: Shared, CLUSTER: ClusterFile}


def with_all_keys(name: str) -> Any:
    """A template with every commented key put in."""
    return yaml.safe_load(COMMENTED.sub(r"\1\2", read_template(name)))


def sections_of(annotation: Any) -> list[type]:
    """The sections that a key's type names, within a tuple or a union too."""
    found = [annotation] if isinstance(annotation, type) else []
    return [
        t
        for a in (*found, *(s for arg in get_args(annotation) for s in sections_of(arg)))
        for t in [a]
        if is_dataclass(t) or (isinstance(t, type) and issubclass(t, BaseModel))
    ]


def keys_of(section: Any) -> dict[str, Any]:
    """The keys of a section of the configuration, with their types."""
    if is_dataclass(section):
        from typing import get_type_hints

        hints = get_type_hints(section)
        return {field.name: hints[field.name] for field in fields(section)}
    return {name: field.annotation for name, field in section.model_fields.items()}


def missing_keys(section: Any, shown: Any, path: str) -> list[str]:
    """The keys of a section that its template does not show."""
    shown = shown[0] if isinstance(shown, list) else shown
    if not isinstance(shown, dict):
        return []
    missing = [f"{path}{key}" for key in keys_of(section) if key not in shown]
    for key, annotation in keys_of(section).items():
        for inner in sections_of(annotation):
            missing += missing_keys(inner, shown.get(key), f"{path}{key}.")
    return missing


@pytest.mark.parametrize("name", MODELS)
def test_every_key_is_in_its_template(name: str) -> None:
    """A key that is added to the configuration is shown to whoever begins, those of `shared` too."""
    assert not missing_keys(MODELS[name], with_all_keys(name), "")


def test_keys_of_sections_that_are_null_by_default_are_told() -> None:
    """Their template shows them in a comment."""
    assert not [key for key in OnVersionSection.model_fields if not re.search(rf"\b{key}: ", read_template(RUN))]


def test_a_key_that_no_template_shows_is_found() -> None:
    """The walk goes down: into sections, lists of them, and the options of the Coordinator."""
    run, shared = with_all_keys(RUN), with_all_keys(SHARED)
    del run["master"]["timing"]["window"], run["slaves"][0]["slots"]
    del shared["outer"]["clip"]["relative"]
    assert set(missing_keys(RunFile, run, "")) == {
        "master.timing.window", "slaves.slots",
    }  # fmt: skip
    assert missing_keys(Shared, shared, "") == ["outer.clip.relative"]


def write_all(directory: Path, *words: str) -> Path:
    type_dips("new", str(directory), *(words or ["--bare"]))
    return directory / RUN


def test_templates_load_as_they_stand(tmp_path: Path) -> None:
    """The three agree, mean the run of defaults under the directory's name, and name `dips init`'s model."""
    run, cluster = load_run(write_all(tmp_path / "Two Hosts")), load_cluster(tmp_path / "Two Hosts" / CLUSTER)
    assert run.shared.digest == cluster.shared.digest == Shared(run="two-hosts").digest
    assert (run.make_options().outer, run.make_options().penalty) == (Options().outer, Options().penalty)
    assert cluster.pace.aligned == 64 and cluster.master == run.master.listen
    assert run.slaves[0].initial_model == run.master.directory / "initial"


@pytest.mark.parametrize(
    ("name", "listen"),
    [("2026-11-29", "127.0.0.1:7800"), ("7", "127.0.0.1:1"), ("on", "[::1]:7800"), ("a b", "host:0")],
)
def test_a_name_or_address_is_text_whatever_yaml_takes_it_for(tmp_path: Path, name: str, listen: str) -> None:
    """A directory that is named by its date, or an address of IPv6, made files that every other command refused."""
    told = type_dips("new", str(tmp_path / name), "--listen", listen)
    assert told.endswith(f"next: cd {shlex.quote(str(tmp_path / name))} && dips up -- python train.py\n")
    shared = yaml.safe_load((tmp_path / name / SHARED).read_text())
    run, cluster = (yaml.safe_load((tmp_path / name / file).read_text()) for file in (RUN, CLUSTER))
    assert shared["run"] == name.replace(" ", "-")
    assert {run["master"]["listen"], cluster["master"], *(slave["master"] for slave in run["slaves"])} == {listen}


def test_what_is_no_address_is_not_written(tmp_path: Path) -> None:
    """It made files that every other command refused, and that `dips new` would not write again."""
    with pytest.raises(ConfigError, match=r"expected an address like 127\.0\.0\.1:7800, got '7800'"):
        type_dips("new", str(tmp_path / "run"), "--listen", "7800")
    assert not (tmp_path / "run").exists()


def test_commented_keys_show_defaults(tmp_path: Path) -> None:
    """Putting every key in changes nothing."""
    place = tmp_path / "my-run"
    plain = load_run(write_all(place)), load_cluster(place / CLUSTER)
    for name in MODELS:
        (place / name).write_text(COMMENTED.sub(r"\1\2", read_template(name)))
    whole = load_run(place / RUN), load_cluster(place / CLUSTER)
    assert whole == plain


def test_templates_overwrite_nothing(tmp_path: Path) -> None:
    """What is there belongs to somebody."""
    write_all(tmp_path)
    (tmp_path / RUN).unlink()
    done = CliRunner().invoke(cli, ["new", str(tmp_path)])
    assert isinstance(done.exception, ConfigError) and "shared.yaml" in str(done.exception)
    assert not (tmp_path / RUN).exists()


# ---- the example -----------------------------------------------------------------------------------------------------

alone = pytest.mark.filterwarnings("ignore:schedule\\(\\) follows:UserWarning")  # there is no run whose target it has


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module train.py as `dips new` writes it, alone and with a smaller model; `made` is what it trained."""
    write_all(tmp_path / "new", "--listen", "127.0.0.1:1")

    def load(name: str) -> Any:
        spec = spec_from_file_location(name, tmp_path / "new" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # train.py imports model.py by its name
        spec.loader.exec_module(module)
        return module

    model, threads = load("model"), torch.get_num_threads()
    model.WIDTH, model.HEADS, model.LAYERS, model.LENGTH = 16, 1, 1, 16
    train = load("train")
    made = train.made = []
    for name in ("build", "OuterLoop", "schedule"):
        make = getattr(train, name)
        monkeypatch.setattr(train, name, lambda *args, make=make: made.append(make(*args)) or made[-1])
    monkeypatch.setenv("DIPS_ALONE", "1")
    monkeypatch.setattr(train, "SHOW_EVERY", 10)
    torch.set_num_threads(2)
    yield train
    torch.set_num_threads(threads)


def play(example: Any, monkeypatch: pytest.MonkeyPatch, batches: Any, *words: str) -> None:
    """Run the script on these batches, on one thread as it says."""
    monkeypatch.setattr(example, "draw_batches", lambda text, seed: batches)
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    torch.manual_seed(1)
    example.main()
    assert torch.get_num_threads() == 1


@alone
def test_the_example_learns(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss falls on a text that repeats itself, it says so now and then, and leaves nothing open."""
    (tmp_path / "text").write_bytes(b"over and over. " * 20)
    draw = example.draw_batches
    for _ in range(2):
        batches = islice(draw(example.read_text(tmp_path / "text"), 1), 41)
        play(example, monkeypatch, batches, str(tmp_path / "text"), "--lr", "0.02", "--seed", "2")
    shown = re.findall(r"step (\d+)  loss (\S+)", capsys.readouterr().out)
    assert [int(step) for step, _ in shown] == [0, 10, 20, 30, 40] * 2
    losses = [float(loss) for _, loss in shown]
    assert losses[0] == pytest.approx(5.5, abs=0.2) and losses[4] < losses[0] / 2
    _, outer, rate, *_ = example.made
    assert rate.last_epoch == 41, "the learning rate follows each step"
    with pytest.raises(LocalProtocolError, match="this OuterLoop is closed"):
        outer.step(local_tokens=1)


@alone
def test_a_step_of_the_example_is_of_one_batch(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient, of norm 1 at most: none is left of the batch before."""
    batches = [torch.full((2, 17), byte) for byte in (7, 9)]
    play(example, monkeypatch, iter(batches), "--lr", "0")
    model, text = example.made[0], batches[-1]
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = torch.autograd.grad(loss, parameters)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    assert norm > 1.5
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / norm, rtol=1e-3, atol=1e-6)


def test_the_examples_model_begins_small(example: Any) -> None:
    """So that its first loss is that of a guess; its norms are left as they are."""
    model = example.build()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name
        elif "norm" in name and name.endswith("weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_the_example_reads_what_it_is_given(example: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc")
    assert example.read_text(tmp_path / "text").tobytes() == b"abc"
    source = example.read_text(None)
    assert len(source) == example.MOST_BYTES and b"import" in source.tobytes()
