"""Kubernetes' own schemas, strictly, for several versions; custom resources by the models that their projects publish.

A kind without schema or model is an error: nothing is passed over.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pydantic
from pydantic.alias_generators import to_camel

from tests.deploy.kubectl import Manifest

VERSIONS = ("1.32", "1.34", "1.37")
MODELS = {  # (API version, kind) → the published model
    ("cert-manager.io/v1", "ClusterIssuer"): ("cloudcoil.models.cert_manager.v1", "ClusterIssuer"),
    ("policy.cert-manager.io/v1alpha1", "CertificateRequestPolicy"): (__name__, "CertificateRequestPolicy"),
    ("monitoring.coreos.com/v1", "PodMonitor"): ("cloudcoil.models.prometheus_operator.v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"): ("cloudcoil.models.prometheus_operator.v1", "PrometheusRule"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): ("kubeflow_trainer_api.models", "JobsetV1alpha2JobSet"),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): ("kubeflow_trainer_api.models", "TrainerV1alpha1TrainJob"),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): (
        "kubeflow_trainer_api.models", "TrainerV1alpha1TrainingRuntime",
    ),
}  # fmt: skip
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", alias_generator=to_camel)


class _Names(_Strict):
    required: bool = False
    values: list[str]


class _Allowed(_Strict):
    dns_names: _Names
    usages: list[str]


class _PrivateKey(_Strict):
    algorithm: str


class _Constraints(_Strict):
    max_duration: str
    private_key: _PrivateKey


class _IssuerRef(_Strict):
    name: str
    kind: str
    group: str


class _Matching(_Strict):
    match_names: list[str]


class _Selector(_Strict):
    issuer_ref: _IssuerRef
    namespace: _Matching


class _PolicySpec(_Strict):
    allowed: _Allowed
    constraints: _Constraints
    selector: _Selector


class CertificateRequestPolicy(_Strict):
    """Of approver-policy, as its documentation describes what we use: no package of models has it."""

    api_version: str
    kind: str
    metadata: dict[str, Any]
    spec: _PolicySpec


def find_invalid(objects: list[Manifest]) -> Iterator[str]:
    """What schemas and models refuse, a line each."""
    for manifest in objects:
        kind = manifest["apiVersion"], manifest["kind"]
        which = f"{kind[1]} {manifest['metadata']['name']}"
        found = _by_model(manifest, *MODELS[kind]) if kind in MODELS else _by_schema(manifest)
        yield from (f"{which}: {line}" for line in found)


def _by_schema(manifest: Manifest) -> Iterator[str]:
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            yield f"Kubernetes {version} has no {manifest['apiVersion']} {manifest['kind']}, and schemas.py no model"
        except kubernetes_validate.ValidationError as error:
            yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"


def _by_model(manifest: Manifest, module: str, name: str) -> Iterator[str]:
    model: type[pydantic.BaseModel] = getattr(importlib.import_module(module), name)
    try:
        model.model_validate(manifest, extra="forbid")  # the API server would drop what it does not know without a word
    except pydantic.ValidationError as error:
        yield from (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors() if not _is_quantity(e))


def _is_quantity(error: Any) -> bool:
    """The models take a quantity only as an object of theirs, never as it is written: it is read here."""
    return "ResourceQuantity" in error["msg"] and bool(QUANTITY.fullmatch(str(error["input"])))
