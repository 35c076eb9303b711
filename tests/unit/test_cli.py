"""The words of `dips`: each does its work, and says what is wrong with the exit codes of errors.py."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from dips import __version__, cli, files
from dips.commands import demo
from dips.commands.export_lanes import VersionFile
from dips.errors import ConfigError, DipsError, FailedDisk, UnavailableMaster, treatment_of
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.store.files import read_parameters
from tests.disk_calls import DiskCalls
from tests.run_files import write_run_file
from tests.typed import type_dips

ROOT = Path(__file__).parents[2]
FACTORY = "torch_model_of_the_test:build"
MODULE = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
def half():
    return build().half()
def frozen():
    model = build()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model
def nothing():
    return 7
def empty():
    with torch.device("meta"):
        return build()
def all_frozen():
    return build().requires_grad_(False)
def wide(width):
    return torch.nn.Linear(width, 3)
model = build()
words = ["build"]
"""


@pytest.fixture(name="run_file")
def made_run_file(tmp_path: Path) -> Path:
    """A run file of two slaves."""
    return write_run_file(tmp_path, listen="127.0.0.1:1")


@pytest.fixture(name="factory")
def made_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the run file, and the current directory there."""
    (tmp_path / "torch_model_of_the_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "torch_model_of_the_test", raising=False)
    return FACTORY


def refused(*words: str) -> DipsError:
    """Run a word that fails; return its error."""
    with pytest.raises(DipsError) as raised:
        type_dips(*words)
    return raised.value


def init(run_file: Path, *words: str) -> str:
    return type_dips("init", "--config", str(run_file), *words)


@pytest.mark.parametrize(
    "word",
    [
        "demo",
        "init",
        "status",
        "export",
        "history",
        "plot",
        "verify",
        "new",
        "up",
        "stop",
        "logs",
        "set",
        "cluster quarantine",
        "cluster readmit",
        "recover",
        "drain",
        "rebalance",
        "rollback",
    ],
)
def test_help_teaches(word: str) -> None:
    """Every word says what it does and shows an example that stands on a line of its own."""
    text = type_dips(*word.split(), "--help")
    assert re.search(rf"^ +Example:\n +dips {word}", text, re.MULTILINE)


def test_version() -> None:
    """--version says it."""
    assert type_dips("--version") == f"dips {__version__}\n"


def test_init_by_factory(run_file: Path, factory: str) -> None:
    """A seeded factory makes the same model each time, another seed another; the files of the run are there."""
    text = init(run_file, "--factory", factory, "--seed", "5")
    assert "s0: " in text
    assert "19 parameters" not in text  # six tensors of 19 elements
    assert "6 parameters" in text
    path = run_file.parent / "m/initial/v0@r0"
    first = read_parameters(path)
    assert (run_file.parent / "m/ledger.sqlite").exists()
    init(run_file, "--factory", factory, "--seed", "5", "--force")
    again = read_parameters(path)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    init(run_file, "--factory", factory, "--seed", "6", "--force")
    assert any(not np.array_equal(first[name], tensor) for name, tensor in read_parameters(path).items())


def test_what_init_writes_is_private(run_file: Path, factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the run's secret, whatever the shell's umask."""
    before = os.umask(0o022)
    monkeypatch.setattr(files, "_given", -1)
    try:
        init(run_file, "--factory", factory)
    finally:
        os.umask(before)
    written = [path for path in (run_file.parent / "m").rglob("*") if path.is_file()]
    assert len(written) > 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}


def test_init_by_file(run_file: Path, factory: str) -> None:
    """A file gives the numbers, alone or with a factory that says what the model is."""
    shapes = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (3,), "1.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}
    path = run_file.parent / "start.safetensors"
    save_file({name: np.full(shape, 2.0, np.float32) for name, shape in shapes.items()}, path)
    init(run_file, "--model", str(path), "--factory", factory)
    manifest = json.loads((run_file.parent / "m/initial/v0@r0/manifest.json").read_text())
    assert [p[0] for layer in manifest["layers"] for p in layer["parameters"]] == sorted(shapes)
    assert all((t == 2.0).all() for t in read_parameters(run_file.parent / "m/initial/v0@r0").values())
    init(run_file, "--model", str(path), "--force")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to begin from"),
        (["--factory", "torch_model_of_the_test"], "expected MODULE:FUNCTION"),
        (["--factory", "no_such_module:build"], "No module named 'no_such_module'"),
        (["--factory", "torch_model_of_the_test:bild"], "has no attribute 'bild'"),
        (["--factory", "torch_model_of_the_test:nothing"], "expected a torch.nn.Module, got int"),
        (["--factory", "torch_model_of_the_test:empty"], "expected parameters with values; 0.weight is on meta"),
        (["--factory", "torch_model_of_the_test:all_frozen"], "expected parameters that train; all 6 are frozen"),
        (["--factory", ":build"], "expected MODULE:FUNCTION, got ':build'"),
        (["--factory", "torch_model_of_the_test:"], "expected MODULE:FUNCTION"),
        (["--factory", ".torch_model_of_the_test:build"], "expected MODULE:FUNCTION"),
        (["--factory", "torch_model_of_the_test:words"], "expected a function, got a list"),
        (["--factory", "torch_model_of_the_test:model"], "expected a function that returns the model, got the model"),
        (
            ["--factory", "torch_model_of_the_test:wide"],
            "is called without arguments: missing a required argument: 'width'",
        ),
        (["--factory", "torch_model_of_the_test:half"], "expected parameters in float32"),
        (["--model", "no-such-file"], "no-such-file: expected a safetensors file"),
        (["--model", "dips.yaml"], "dips.yaml: expected a safetensors file"),
    ],
)
def test_init_refuses(run_file: Path, factory: str, words: list[str], message: str) -> None:
    """What no model can be made of is named; nothing is written."""
    error = refused("init", "--config", str(run_file), *words)
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert not (run_file.parent / "m").exists()


def test_init_file_and_factory_must_agree(run_file: Path, factory: str) -> None:
    """A file of another model than the factory's is refused, with the first difference."""
    path = run_file.parent / "start.safetensors"
    save_file({"0.weight": np.zeros((3, 2), np.float32)}, path)
    error = refused("init", "--config", str(run_file), "--model", str(path), "--factory", factory)
    assert "0.bias is only in the factory's module" in str(error)
    init(
        run_file, "--factory", "torch_model_of_the_test:frozen"
    )  # a version's directory, as a slave's, is held likewise
    version = str(run_file.parent / "m/initial/v0@r0")
    error = refused("init", "--config", str(run_file), "--model", version, "--factory", factory, "--force")
    assert "v0@r0: parameters differ from the factory's; 0.bias is only in the factory's module" in str(error)


def test_frozen_parameters_are_not_part_of_the_run(run_file: Path, factory: str) -> None:
    """requires_grad of the factory's module tells, also which part of a file is meant; without one, patterns do."""
    path, made = run_file.parent / "start.safetensors", run_file.parent / "m/initial/v0@r0"
    shapes = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (3,), "1.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}
    save_file({name: np.full(shape, 2.0, np.float32) for name, shape in shapes.items()}, path)
    init(run_file, "--factory", "torch_model_of_the_test:frozen")
    assert sorted(read_parameters(made)) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    init(run_file, "--factory", "torch_model_of_the_test:frozen", "--model", str(path), "--force")
    assert {name: float(t.min()) for name, t in read_parameters(made).items()} == dict.fromkeys(list(shapes)[2:], 2.0)
    init(run_file, "--model", str(path), "--trainable", "0.*", "--trainable", "*.bias", "--force")
    assert sorted(read_parameters(made)) == ["0.bias", "0.weight", "1.bias", "2.bias"]
    error = refused("init", "--config", str(run_file), "--model", str(path), "--trainable", "lora*", "--force")
    assert "--trainable: no parameter's name matches lora*" in str(error)


def test_a_run_is_not_made_twice(run_file: Path, factory: str) -> None:
    """A ledger that is there is kept unless --force says otherwise."""
    init(run_file, "--factory", factory)
    assert "--force" in str(refused("init", "--config", str(run_file), "--factory", factory))
    (run_file.parent / "s1" / "v3@r4").mkdir(parents=True)
    told = init(run_file, "--factory", factory, "--force")
    assert f"empty these first, they hold snapshots of a former run: {run_file.parent}/s1\n" in told


def test_history_of_a_new_run(run_file: Path, factory: str) -> None:
    """A run without rounds has an empty history; a directory without a ledger is named so."""
    refused("history", "--config", str(run_file))
    init(run_file, "--factory", factory)
    assert "rounds" in type_dips("history", "--config", str(run_file))
    assert type_dips("history", "--config", str(run_file), "--json") == ""


def test_export_of_version_zero(run_file: Path, factory: str) -> None:
    """The head of a new run is the initial model; a version that is not there, or is none, is refused."""
    init(run_file, "--factory", factory)
    out = run_file.parent / "out.safetensors"
    words = ("export", "--config", str(run_file), "--output", str(out))
    assert type_dips(*words).startswith("wrote v0@r0")
    initial = read_parameters(run_file.parent / "m/initial/v0@r0")
    assert all(np.array_equal(initial[name], tensor) for name, tensor in load_file(out).items())
    assert "snapshot" in str(refused(*words, "--version", "v1@r1"))
    assert "version '12': expected one as `dips history` names it" in str(refused(*words, "--version", "12"))


@pytest.mark.parametrize("words", [["--mirror", "--recover"], ["--mirror", "--no-kill"], ["--recover", "--no-kill"]])
def test_a_demo_loses_one_thing(words: list[str]) -> None:
    """Two of them contradict each other; nothing is started."""
    error = CliRunner().invoke(cli.cli, ["demo", *words]).exception
    assert isinstance(error, ConfigError) and "expected at most one of them" in str(error)


@pytest.mark.parametrize(
    ("words", "way", "kill"),
    [
        ([], "kept", True),
        (["--mirror"], "mirrored", True),
        (["--recover"], "unmirrored", True),
        (["--no-kill"], "kept", False),
    ],
)
def test_a_demo_is_started_as_typed(words: list[str], way: str, kill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code is the command's."""
    asked: dict[str, object] = {}
    monkeypatch.setattr("dips.demo.run.run_demo", lambda **options: asked.update(options) or 1)
    assert CliRunner().invoke(cli.cli, ["demo", *words]).exit_code == 1
    assert (asked["way"], asked["kill"], asked["secure"]) == (way, kill, False)


def test_a_demo_without_its_packages_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install; a module of ours that is missing is no such thing."""
    monkeypatch.delitem(sys.modules, "dips.demo.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="the demo needs the package matplotlib"):
        demo._of_the_demo("plots")
    with pytest.raises(ModuleNotFoundError, match=r"dips\.demo\.nowhere"):
        demo._of_the_demo("nowhere")


def test_status_of_nobody(run_file: Path) -> None:
    """A master that does not answer is named with its address; exit code 69."""
    error = refused("status", "--config", str(run_file))
    assert isinstance(error, UnavailableMaster)
    assert "127.0.0.1:1" in str(error)
    assert treatment_of(error).exit_code == 69


@pytest.mark.parametrize("words", [[], ["--config", "dips.yaml", "--master", "127.0.0.1:1"]])
def test_status_asks_one(words: list[str]) -> None:
    """Whom to ask must be said, once."""
    assert "one of them" in str(refused("status", *words))


def test_an_error_leaves_as_message_advice_and_code(tmp_path: Path) -> None:
    """The process of a word that fails prints the error, which says what to do, and ends with its code."""
    words = [sys.executable, "-m", "dips.cli", "history", "--config", str(tmp_path / "dips.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: {tmp_path}/dips.yaml: cannot be read")
    assert done.stderr.count("\n") == 1, "a file's own message says what to do: no advice follows"


@pytest.mark.parametrize(
    "words",
    [
        ("certs", "init", "OUT", "--run", "r"),
        ("data", "build", "-o", "OUT", "--ranges", "1", "--tokenizer", "bytes", "--source", "a=taken"),
        ("new", "OUT", "--bare"),
        ("study", "--template", "OUT"),
        ("trace", ".", "-o", "OUT"),
    ],
    ids=lambda words: words[0],
)
def test_what_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A file stands where a directory should be: one sentence with the output, what came and what to do."""
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("some words")
    mark = {"at": 1, "run": "r", "role": "master", "who": "master", "kind": "term_begins", "term": 1}
    Path("timeline.jsonl").write_text(json.dumps(mark) + "\n")
    done = CliRunner().invoke(cli.cli, [word.replace("OUT", "taken/out") for word in words])
    assert isinstance(done.exception, ConfigError), done.exception
    assert "taken/out" in (told := str(done.exception))
    assert "cannot be written: Not a directory; name another path, or make this one writable" in told


@pytest.mark.parametrize(
    "words",
    [
        ("trace", ".", "-o"),
        ("export", "--master", "127.0.0.1:1", "-o"),
        ("follow", "--master", "127.0.0.1:1", "-o"),
    ],
    ids=lambda words: words[0],
)
def test_a_directory_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """It has no name to write beside (`.`), or the file would have been renamed over it when all had come: it is told
    before.
    """
    monkeypatch.chdir(tmp_path)
    mark = {"at": 1, "run": "r", "role": "master", "who": "master", "kind": "term_begins", "term": 1}
    Path("timeline.jsonl").write_text(json.dumps(mark) + "\n")
    Path("there").mkdir()
    for output in (".", "there"):
        done = CliRunner().invoke(cli.cli, [*words, output])
        assert isinstance(done.exception, ConfigError), done.exception
        assert f"{output}: cannot be written: Is a directory; name another path" in str(done.exception)


def test_what_cannot_be_begun_is_told_and_what_another_has_begun_stays(tmp_path: Path) -> None:
    """A file in the place of a directory was told as a traceback, of the removal of what was not begun; and a second
    export of one output removed what the first one was writing.
    """
    (tmp_path / "taken").write_text("some words")
    (anothers := tmp_path / ".unfinished-model").write_text("a version")
    VersionFile(tmp_path / "model").close()
    assert anothers.read_text() == "a version"
    file = VersionFile(tmp_path / "taken" / "model")
    with pytest.raises(ConfigError, match="taken/model: cannot be written: "), closing(file):
        file.make_room("r", VersionId(1, 1), Manifest.from_shapes([("w", (1,))]))


def test_what_another_process_writes_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export beside a follower of the same output put the follower's file in its place, half full: zeros, which a
    reader takes for the model.
    """
    manifest, output = Manifest.from_shapes([("w", (2,))]), tmp_path / "model"
    first, second = VersionFile(output), VersionFile(output)
    first.make_room("r", VersionId(1, 1), manifest)[:] = 1.0
    room = second.make_room("r", VersionId(1, 1), manifest)
    with pytest.raises(ConfigError, match="model: cannot be written: another process writes to it, too"):
        first.publish()
    first.close()
    assert not output.exists()
    room[:] = 2.0
    disk = DiskCalls(tmp_path, monkeypatch)
    second.publish()
    assert disk.calls == ["fsync .unfinished-model", "rename .unfinished-model model", "fsync ."], "before all else"
    assert load_file(output)["w"].tolist() == [2.0, 2.0] and [output] == list(tmp_path.iterdir())
    second.make_room("r", VersionId(2, 2), manifest)
    second.close()
    assert [output] == list(tmp_path.iterdir()), "a pull that fails leaves no second model on the disk"


def test_a_full_disk_is_no_wrong_name(tmp_path: Path) -> None:
    """The end is that of a failed disk: to name another file would not help."""
    with pytest.raises(FailedDisk, match="full: cannot be written: No space left"), files.explain_unwritable("full"):
        Path("/dev/full").write_text("a")
