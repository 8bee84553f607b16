"""Metadata, configuration and statistics of the server and its models, in Triton's JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptmanager import __version__
from gptmanager.server.settings import ServerSettings
from gptmanager.server.triton.inference import VERSION, Inference, Model
from gptmanager.server.triton.tensors import TensorSpec

EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "statistics",
)


def server_metadata() -> dict[str, Any]:
    """Return the name, the version and the extensions of the server."""
    return {"name": "gptmanager", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(model: Model) -> dict[str, Any]:
    """Return the versions and the tensors of a model. Each shape begins with -1 for the batch."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": model.backend,
        "inputs": [_metadata(spec) for spec in model.inputs.values()],
        "outputs": [_metadata(spec) for spec in model.outputs.values()],
    }


def _metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.dims]}


def model_config(model: Model, inference: Inference, settings: ServerSettings) -> dict[str, Any]:
    """Return the fields of Triton's ModelConfig that apply to this server."""
    return {
        "name": model.name,
        "platform": "",
        "backend": model.backend,
        "max_batch_size": inference.max_rows,
        "input": [_input(spec) for spec in model.inputs.values()],
        "output": [
            {"name": spec.name, "data_type": _data_type(spec), "dims": list(spec.dims)}
            for spec in model.outputs.values()
        ],
        "instance_group": [{"name": f"{model.name}_0", "kind": _kind(settings), "count": 1}],
        "parameters": {
            key: {"string_value": value} for key, value in _parameters(inference, settings).items()
        },
        "model_transaction_policy": {"decoupled": True},
    }


def _input(spec: TensorSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": spec.name,
        "data_type": _data_type(spec),
        "dims": list(spec.dims),
        "optional": spec.is_optional,
    }
    if spec.is_scalar:
        found["reshape"] = {"shape": []}
    elif -1 in spec.dims:
        found["allow_ragged_batch"] = True
    return found


def _data_type(spec: TensorSpec) -> str:
    return "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"


def _kind(settings: ServerSettings) -> str:
    return "KIND_GPU" if (settings.params.device or "").startswith("cuda") else "KIND_CPU"


def _parameters(inference: Inference, settings: ServerSettings) -> Mapping[str, str]:
    params = settings.params
    return {
        "gpt_model_type": settings.manager.model_type.name.lower(),
        "gpt_model_path": settings.name,
        "batch_scheduler_policy": settings.manager.scheduler.capacity_scheduler_policy.name.lower(),
        "max_beam_width": str(settings.max_beam_width),
        "enable_kv_cache_reuse": str(inference.reuses_blocks).lower(),
        "enable_chunked_context": str(bool(params.enable_chunked_context)).lower(),
        "exclude_input_in_output": str(settings.manager.params.exclude_input_in_output).lower(),
    }


def index(inference: Inference) -> list[dict[str, Any]]:
    """Return the name, the version and the state of each model."""
    state = "READY" if inference.is_ready else "UNAVAILABLE"
    return [
        {"name": name, "version": VERSION, "state": state, "reason": ""}
        for name in inference.models
    ]


def statistics(inference: Inference, name: str = "", version: str = "") -> dict[str, Any]:
    """Return the statistics of one model, or of all. Raise ApiError (404) for an unknown model."""
    models = [inference.find(name, version)] if name else inference.models.values()
    return {"model_stats": [inference.statistics[model.name].as_json() for model in models]}
