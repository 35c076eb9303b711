"""`dips new`: the files that a new run begins with hold every key, and work as they stand."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands.new import CLUSTER, RUN, SHARED, read_template
from dips.config import ClusterFile, OnVersionSection, RunFile, Shared, load_cluster, load_run
from dips.errors import ConfigError
from dips.protocol.options import Options

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
    done = CliRunner().invoke(cli, ["new", str(directory), *(words or ["--bare"])])
    assert done.exit_code == 0, done.output
    return directory / RUN


def test_templates_load_as_they_stand(tmp_path: Path) -> None:
    """The three agree, mean the run of defaults, and name `dips init`'s model."""
    run, cluster = load_run(write_all(tmp_path / "my-run")), load_cluster(tmp_path / "my-run" / CLUSTER)
    assert run.shared.digest == cluster.shared.digest == Shared(run="my-run").digest
    assert (run.make_options().outer, run.make_options().penalty) == (Options().outer, Options().penalty)
    assert cluster.pace.aligned == 64 and cluster.master == run.master.listen
    assert run.slaves[0].initial_model == run.master.directory / "initial"


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
