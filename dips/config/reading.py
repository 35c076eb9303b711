"""Reads a file and checks what the files have in common: types, names, and that plain text stays on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dips.config.section import host_port, is_loopback
from dips.errors import ConfigError
from dips.ids import check_name

Model = TypeVar("Model", bound=BaseModel)
MERGE = "tag:yaml.org,2002:merge"  # of the key `<<`
TOO_DEEP = "expected keys below keys a few levels deep, got more than can be read"


def load_file(path: Path, model: type[Model]) -> Model:
    raw = read_yaml(path)
    shared = raw.get("shared")
    if isinstance(shared, str):
        try:
            raw["shared"] = read_yaml(path.parent / shared)
        except ConfigError as error:
            raise ConfigError(f"{path}: shared: {error}") from error
    _refuse_section(path, raw, model)
    _refuse_other_kind(path, raw, model)
    try:
        return model.model_validate(_resolve_paths(raw, path.absolute().parent))
    except ConfigError as error:  # from __post_init__ of an options class
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:  # an anchor that holds itself
        raise ConfigError(f"{path}: {TOO_DEEP}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_invalid(error)}") from error


def _refuse_section(path: Path, raw: dict[str, Any], model: type[Model]) -> None:
    """Raise ConfigError if the file is a `shared` section in the place of a file that names one."""
    field = model.model_fields.get("shared")
    section: Any = None if field is None else field.annotation  # the class of `shared`
    if section is None or not raw or not raw.keys() <= section.model_fields.keys():
        return
    raise ConfigError(
        f"{path}: this is a `shared` section: name it in a run file and in each cluster file, as in `shared: "
        f"{path.name}`; `dips new` writes all three"
    )


def _refuse_other_kind(path: Path, raw: dict[str, Any], model: type[Model]) -> None:
    """Raise ConfigError if the file is a run file in the place of a cluster file, or the reverse."""
    known, of_run, of_cluster = model.model_fields, "slaves" in raw, "cluster" in raw
    if of_run and not of_cluster and "slaves" not in known:
        raise ConfigError(
            f"{path}: this is a run file: expected a cluster file, which names one training cluster; `dips new` writes "
            "both, as dips.yaml and cluster.yaml"
        )
    if of_cluster and not of_run and "cluster" not in known:
        raise ConfigError(
            f"{path}: this is a cluster file: expected the run file, dips.yaml; a command that asks "
            f"the master takes `--master {raw.get('master', 'HOST:PORT')}` instead"
        )


def is_cluster_file(path: Path) -> bool:
    """Return whether a file is a cluster file, by its keys; any other is read as a run file and rejected there."""
    return "cluster" in read_yaml(path)


def list_files(path: Path) -> tuple[Path, ...]:
    """Return the file and the file that its `shared` names; only the file itself if it cannot be read."""
    try:
        shared = read_yaml(path).get("shared")
    except ConfigError:
        return (path,)
    return (path, path.parent / shared) if isinstance(shared, str) else (path,)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML's own loader takes the last one, without a word. Of two `<<`
    it merges both.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known = dict[str, yaml.ScalarNode]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if known.setdefault(key.value, key) is not key:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the file's keys. Raises ConfigError for any invalid content, since running daemons read files again."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (it is a SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{path}: expected UTF-8, got byte 0x{byte:02x} at offset {error.start}") from error
    # The others: an invalid date, a path with a NUL, a value that is not what its tag says (`!!bool x`).
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {TOO_DEEP}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {type(raw).__name__}")
    return raw


_PATH_KEYS = frozenset(
    {
        "directory",
        "initial_model",
        "token",
        "http_token",
        "mirror",
        "tensorboard",
        "tls",
    }
)


def _is_path(key: str, value: Any) -> bool:
    return key in _PATH_KEYS and isinstance(value, str) and "://" not in value


def _resolve_paths(raw: Any, base: Path) -> Any:
    """Make relative paths relative to the file that contains them, so that a daemon may start anywhere; URLs stay.

    They are absolute then, since a directory keeps the path of its mirror, to know it again.
    """
    if isinstance(raw, dict):
        return {k: _resolve_path(k, v, base) if _is_path(k, v) else _resolve_paths(v, base) for k, v in raw.items()}
    return [_resolve_paths(v, base) for v in raw] if isinstance(raw, list) else raw


def _resolve_path(key: str, value: str, base: Path) -> str:
    if value.startswith(("~", "$")):  # else a directory of that name is made beside the file
        told = f"{key}: expected a path, in which no ~ and no variable is filled in, got {value!r}"
        raise ConfigError(f"{told}; release 0.1.0 took it for ./{value}: write that if a run lies there")
    return str(base / value)


EXPECTED = {  # by pydantic's name of a problem, the value in words of YAML
    "int_type": "a whole number, in digits",
    "int_parsing": "a whole number, in digits",  # YAML reads 1e9 as text
    "int_from_float": "a whole number, in digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text, in quotes where YAML reads a number or date",
    "tuple_type": "a list",
    "dict_type": "keys and their values",
    "model_type": "keys and their values",
    "dataclass_type": "keys and their values",
}


def explain_invalid(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"{key}: unknown key (misspelt, or of another version?)")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing, and it has no default")
        else:
            expected = EXPECTED.get(problem["type"])
            said = f"expected {expected}" if expected else problem["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {said}, got {problem.get('input')!r}")
    return "; ".join(lines)


def check_names(path: Path, names: list[tuple[str, str]]) -> None:
    for name, what in names:
        try:
            check_name(name, what)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def check_transport(path: Path, secured: bool, addresses: list[tuple[str, str]]) -> None:
    """Allow plain text on this machine only (docs/architecture.md#security)."""
    for key, address in addresses:
        try:
            host, _ = host_port(address)
        except ConfigError as error:
            raise ConfigError(f"{path}: {key}: {error}") from error
        if not secured:
            require_loopback(path, key, host, address)


def require_loopback(path: Path, key: str, host: str, told: str) -> None:
    """Refuse a host that is not this machine; `told` is the value of the key."""
    if not is_loopback(host):
        raise ConfigError(f"{path}: {key}: plain text (`tls: off`) is allowed on loopback only, got {told!r}")
