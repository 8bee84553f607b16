"""`load`: loads the checkpoint of a manager, natively or through transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from gptmanager.arguments import at_least
from gptmanager.assembly.provider_options import is_foreign
from gptmanager.config import OptionalParams
from gptmanager.errors import ConfigError, quoted
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized
from gptmanager.lifecycle.callables import ordinary
from gptmanager.lifecycle.log import logger
from gptmanager.models.checkpoint_parts import is_quantized
from gptmanager.models.decoder.network import CheckpointModel
from gptmanager.models.hf.loading import Prepare, load_with_transformers
from gptmanager.models.hf.network import TransformersModel
from gptmanager.models.hf.sizes import uses_transformers
from gptmanager.models.model import (
    Dimensions,
    Model,
    WeightsDtype,
    check_float64,
    check_fp8,
    load_model,
)
from gptmanager.models.spec import ModelSpec
from gptmanager.ranks.collectives import Collectives

Check = Callable[[Dimensions], None]
# the sizes that the spec of a Model must have -> the least value of each
_SIZES = {
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "num_layers": 0,
    "num_kv_heads": 1,
    "head_dim": 1,
}


def load(
    source: Any,
    params: OptionalParams,
    kernels: Kernels,
    device: torch.device,
    bodies: Sequence[Callable[[int], None]] = (),
    collectives: Collectives | None = None,
    check: Check = lambda spec: None,
) -> Model:
    """Load the checkpoint `source`, or return `source` if it is a model. Else raise ConfigError.

    `bodies` are functions to compile, in addition to the kernels' own functions. With several
    ranks, each rank passes its `collectives` and loads its part of the checkpoint.

    `check` may raise ConfigError. If `source` is a model, `check` is called with the model's spec.
    For a checkpoint that is loaded natively, it is called with the spec before the weights are
    read. It is not called for a model that transformers loads.
    """
    if not isinstance(source, (str, os.PathLike, tuple)):
        model = _own_model(source, params)
        check(model.spec)
        return model

    def prepare(dtype: torch.dtype, quantized: Collection[Quantized]) -> None:
        kernels.warm_up(dtype, quantized, bodies, params.on_progress)

    if _uses_transformers(source, params) and not isinstance(source, tuple):
        _refuse_for_transformers(params, collectives)
        return _through_transformers(Path(source), params, kernels, device, prepare)
    quantized = not isinstance(source, tuple) and is_quantized(source)

    def check_and_prepare(spec: ModelSpec, quantized: Collection[Quantized]) -> None:
        check(spec)
        prepare(spec.dtype, quantized)

    loaded = load_model(
        source if isinstance(source, tuple) else Path(source),
        kernels=kernels,
        device=device,
        dtype=params.dtype,
        weights_dtype=_weights_dtype(params, kernels, quantized),
        head_dtype=params.head_dtype,
        max_seq_len=params.max_seq_len,
        attention_window=params.kv_cache_config.max_attention_window,
        sink=params.kv_cache_config.sink_token_length or 0,
        kv_cache_dtype=torch.float8_e4m3fn if params.kv_cache_config.dtype else None,
        on_progress=params.on_progress,
        collectives=collectives,
        prepare=check_and_prepare,
    )
    kind = "natively, from quantized weights" if quantized else "natively"
    named = "the given tensors" if isinstance(source, tuple) else source
    _log(named, kind, loaded.weights.matrices, loaded.spec.dtype)
    return loaded


def _through_transformers(
    source: Path,
    params: OptionalParams,
    kernels: Kernels,
    device: torch.device,
    prepare: Prepare,
) -> Model:
    weights_dtype = None if params.weights_dtype == "none" else params.weights_dtype
    check_fp8(weights_dtype, kernels)

    def check_and_prepare(dtype: torch.dtype, quantized: Collection[Quantized]) -> None:
        check_float64(dtype, weights_dtype, kernels, device)
        prepare(dtype, quantized)

    found = load_with_transformers(
        source,
        kernels,
        device=device,
        dtype=params.dtype,
        weights_dtype=weights_dtype,
        head_dtype=params.head_dtype,
        max_seq_len=params.max_seq_len,
        on_progress=params.on_progress,
        prepare=check_and_prepare,
    )
    _log(source, "through transformers", found.matrices, found.spec.dtype)
    return found


def matrices_of(model: Model) -> Sequence[Matrix]:
    """Return the matrices of a model that `load` has read from a checkpoint, else ()."""
    if isinstance(model, CheckpointModel):
        return model.weights.matrices
    return model.matrices if isinstance(model, TransformersModel) else ()


def _own_model(source: Any, params: OptionalParams) -> Model:
    spec, forward = getattr(source, "spec", None), getattr(source, "forward", None)
    if spec is None or not callable(forward) or isinstance(source, type):
        raise ConfigError(
            f"model_path = {source!r} is neither a checkpoint folder, nor a GGUF file, nor a Model "
            "(an object with spec, nbytes and forward), nor a pair (config dict, state dict)"
        )
    _refuse_for_models(params)
    ordinary("Model.forward", forward)
    at_least(0, "Model.nbytes", getattr(source, "nbytes", None))
    for name, least in _SIZES.items():
        at_least(least, f"Model.spec.{name}", getattr(spec, name, None))
    model: Model = source
    return model


def _uses_transformers(source: Any, params: OptionalParams) -> bool:
    """Return whether a checkpoint is loaded through transformers."""
    if isinstance(source, tuple):
        if params.model_backend == "transformers":
            raise ConfigError("OptionalParams.model_backend = 'transformers' needs a folder")
        return False
    return uses_transformers(source, params.model_backend)


def _weights_dtype(
    params: OptionalParams, kernels: Kernels, quantized: bool
) -> WeightsDtype | None:
    """Return the option `weights_dtype`, or its default; None keeps matrices unquantized.

    The default is "file" if the checkpoint is `quantized`, the kernels are for the CPU, and the
    option `dtype` is not set either: floats would be larger and slower, and no more exact than the
    checkpoint. Otherwise the default is None.
    """
    if params.weights_dtype == "none":
        return None
    is_asked = params.weights_dtype is not None or params.dtype is not None
    if is_asked or not quantized or not isinstance(kernels, CpuKernels):
        return params.weights_dtype
    return "file"


def _log(source: Any, kind: str, matrices: Sequence[Matrix], dtype: torch.dtype) -> None:
    """Log how a checkpoint was loaded, and how its matrices are stored."""
    in_4_bits = sum(isinstance(it, Int4Matrix) for it in matrices)
    in_8_bits = sum(isinstance(it, PackedMatrix) and it.scales is not None for it in matrices)
    in_8_bits -= in_4_bits
    others = len(matrices) - in_4_bits - in_8_bits
    name = str(dtype).removeprefix("torch.")
    counts = [(in_4_bits, "4 bits"), (in_8_bits, "8 bits"), (others, name)]
    stored = ", ".join(f"{count} in {what}" for count, what in counts if count)
    logger.info("%s is loaded %s; matrices: %s", source, kind, stored or "none")


def _refuse_for_transformers(params: OptionalParams, collectives: Collectives | None) -> None:
    """Raise ConfigError for options that need a native model."""
    cache = params.kv_cache_config
    for name, value in (
        ("parallel_config", None if collectives is None else params.parallel_config),
        ("deterministic", params.deterministic or None),
        ("kv_cache_config.max_attention_window", cache.max_attention_window),
        ("kv_cache_config.dtype", cache.dtype),
        ("linear_provider", params.linear_provider),
    ):
        if value is not None:
            raise ConfigError(
                f"OptionalParams.{name} = {quoted(value)} is refused with a model that "
                "transformers computes: leave the default, or use an architecture that "
                "model_backend = 'native' computes"
            )


def _refuse_for_models(params: OptionalParams) -> None:
    """Raise ConfigError for options that need a model loaded by the manager."""
    provider = params.attention_provider
    if params.kv_cache_config.max_attention_window is not None:
        raise ConfigError(
            "KvCacheConfig.max_attention_window has no effect on a Model object, which defines its "
            "own attention"
        )
    for name, value in (
        ("OptionalParams.dtype", params.dtype),
        ("OptionalParams.weights_dtype", params.weights_dtype),
        ("OptionalParams.head_dtype", params.head_dtype),
        ("KvCacheConfig.dtype", params.kv_cache_config.dtype),
        ("OptionalParams.attention_provider", provider if is_foreign(provider) else None),
        ("OptionalParams.linear_provider", params.linear_provider),
    ):
        if value is not None:
            raise ConfigError(f"{name} = {quoted(value)} has no effect on a Model object")
