"""`Model`: the interface between executor and network. `load_model` loads a checkpoint.

This module decides how a checkpoint is opened. It does not know scheduling, sampling or requests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels
from gptmanager.kernels.capture.captured_step import Begin, StepCapture, ignore
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.reference import Ints, Kernels
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.checkpoint.tensor_sources import StateDict, TensorSource
from gptmanager.memory.kv_pool import KvPool, PageShape
from gptmanager.memory.slot_states import StateShape
from gptmanager.memory.weights import Weights
from gptmanager.models.attention_options import with_attention_options
from gptmanager.models.batch import Batch
from gptmanager.models.checkpoint_parts import as_floats, open_tensors, read_config
from gptmanager.models.decoder.network import CheckpointModel
from gptmanager.models.families import FAMILIES, place_tensors
from gptmanager.models.families.wrappers import MEDIA, PREFIXES, is_wrapper, text_config
from gptmanager.models.other_layouts import RearrangedTensors, in_expert_order
from gptmanager.models.parameters import (
    check_head_dtype,
    lookup_tables,
    matmul_matrices,
    parameter_shapes,
    quantized_parameters,
    wide_parameters,
)
from gptmanager.models.quantized.scheme import without_quantization
from gptmanager.models.quantized.source import QuantizedSource
from gptmanager.models.read_spec import read_spec
from gptmanager.models.spec import ModelSpec
from gptmanager.models.splits import rank_cuts
from gptmanager.ranks.collectives import Collectives
from gptmanager.ranks.layout import RankLayout

WeightsDtype = Literal["int8", "int4", "fp8", "file"]
_WITH_FORMATS = (SafetensorsFolder, QuantizedSource, RearrangedTensors)
Source = str | PathLike[str] | tuple[Mapping[str, Any], Mapping[str, Tensor]]


class Dimensions(Protocol):
    """The sizes that a manager needs to know about a model; a `ModelSpec` has them."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def page_shapes(spec: Dimensions) -> Sequence[PageShape]:
    """Return the page shape of each layer: the spec's `pages`, or one shape for all layers."""
    shapes: Sequence[PageShape] | None = getattr(spec, "pages", None)
    return shapes or (PageShape(spec.num_kv_heads, spec.head_dim),) * spec.num_layers


def state_shapes(spec: Dimensions) -> Sequence[StateShape]:
    """Return the shapes of a sequence's recurrent states: the spec's `states`, or none."""
    return getattr(spec, "states", ())


class Model(Protocol):
    """A network that reads and writes a paged KV cache."""

    @property
    def spec(self) -> Dimensions:
        """The sizes of the network that the rest of the library needs."""
        ...

    @property
    def nbytes(self) -> int:
        """The size in bytes of the tensors that the model holds."""
        ...

    def forward(self, batch: Batch, kv_pool: KvPool) -> Tensor:
        """Write the batch's keys and values to the pool.

        Return logits `[S, vocab]`, one row per element of `batch.sample_index`, in any floating
        dtype. The caller converts the logits to float32, and may change them in place.
        """
        ...


@runtime_checkable
class PlanningModel(Model, Protocol):
    """A model with steps that can be captured, for example as CUDA graphs, and replayed.

    If `plan` returns arrays for a captured step, `forward` must not wait for the device. A replay
    computes another batch from new values in the same tensors, so `forward` may read only the
    batch's tensors and the batch's `all_sampled`.
    """

    def plan(
        self, row_starts: Ints, kv_lengths: Ints, num_context_rows: int, fixed: int = 0
    ) -> tuple[Ints, ...]:
        """Return `Batch.plan` for these rows: how the attention kernels divide their work.

        The arguments are those of `Kernels.plan`. If `fixed` is given and the step cannot be
        captured, return ().
        """
        ...


@runtime_checkable
class CapturableModel(Model, Protocol):
    """A model with generation steps that can be captured on the CPU; see `StepCapture`.

    A captured step is replayed for other batches with the same number of rows.
    """

    def new_step_capture(self) -> StepCapture | None:
        """Return a new capture, or None if steps are not captured."""
        ...

    def forward_captured(
        self,
        batch: Batch,
        kv_pool: KvPool,
        capture: StepCapture,
        begin: Begin = ignore,
    ) -> Tensor:
        """Run `forward` on a batch with one sampled token per row and without optional tensors."""
        ...


def capturable(model: Model) -> CapturableModel | None:
    """Return the model if its class itself defines or inherits `forward_captured`, else None.

    A wrapper that forwards attributes with `__getattr__` gets None, because its `forward` may
    differ.
    """
    is_own = hasattr(type(model), "forward_captured")
    return model if is_own and isinstance(model, CapturableModel) else None


def load_model(
    source: Source,
    *,
    kernels: Kernels | None = None,
    device: torch.device | str = "cpu",
    dtype: str | torch.dtype | None = None,
    max_seq_len: int | None = None,
    attention_window: int | None = None,
    sink: int = 0,
    kv_cache_dtype: torch.dtype | None = None,
    weights_dtype: WeightsDtype | None = None,
    head_dtype: Quantized | None = None,
    on_progress: ProgressCallback | None = None,
    collectives: Collectives | None = None,
    prepare: Callable[[ModelSpec, Collection[Quantized]], object] | None = None,
) -> CheckpointModel:
    """Load a checkpoint: a Hugging Face folder, a GGUF file, or (config dict, state dict).

    `kernels` are by default the CPU's; `device` "cuda" needs a `CudaKernels`. `dtype` is by default
    the config's, or float32 if the config has none; float64 is only for the CPU. `max_seq_len` is
    by default `max_position_embeddings`. `attention_window` limits the window of each layer: the
    number of positions that a token sees, including its own. The first `sink` positions are visible
    in addition. `kv_cache_dtype` is float8_e4m3fn for KV cache pages of this dtype, otherwise None.
    `weights_dtype` quantizes the matrices of matmuls except routers. "int8", and on GPUs "fp8",
    have one scale per row. "int4" has a float16 scale for each group of 32 columns; the output
    matrix then has `head_dtype` (by default "int8"). An embedding that is not the output matrix
    is quantized only if it is in the checkpoint, too. "file" is "int4" for matrices with 4 bits in
    the checkpoint, else "int8". With "int4" or "file", 4-bit groups of the checkpoint are kept as
    they are. `on_progress` is called as `OptionalParams` describes. `collectives` communicates with
    the other ranks, if any; each rank reads only its share of the weights. `prepare` is called
    before weights are read, with the spec and the formats of quantization.

    Raise ConfigError that names the argument, config field or tensor that cannot be used. The peak
    memory is the final weights plus a sixteenth of them, or plus a matrix that must be read whole.
    """
    kernels = kernels or _cpu_kernels(device)
    _check_weights_dtype(weights_dtype, head_dtype, kernels, device)
    layout = RankLayout() if collectives is None else collectives.layout
    config, tensors = _opened(source)
    spec = read_spec(config, dtype=dtype, max_seq_len=max_seq_len, tensors=tensors.describe())
    _check_dtypes(spec, weights_dtype, kernels, device)
    spec = with_attention_options(spec, attention_window, sink, kv_cache_dtype)
    kept_groups = _group_kinds(tensors, kernels) if weights_dtype in ("int4", "file") else set()
    quantized = quantized_parameters(spec, weights_dtype, head_dtype)
    if prepare is not None:
        prepare(spec, {*quantized.values(), *kept_groups})
    weights = Weights(
        **_parts(spec, layout),
        **_naming(spec, config),
        device=device,
        new_matrix=functools.partial(kernels.new_matrix, device=device),
        quantized=quantized,
        lookups=dict.fromkeys(lookup_tables(spec) if quantized else (), "int8"),
        kept_groups=kept_groups,
    )
    _load(weights, tensors, on_progress)
    return CheckpointModel(spec, weights, kernels, device, collectives)


def _opened(source: Source) -> tuple[Mapping[str, Any], TensorSource]:
    """Return a checkpoint's config, and the source of its tensors."""
    if isinstance(source, tuple):
        config, state_dict = _check_pair(source)
        return without_quantization(config), as_floats(config, StateDict(state_dict))
    return read_config(source), open_tensors(source)


def _load(weights: Weights, tensors: TensorSource, on_progress: ProgressCallback | None) -> None:
    """Load the weights, and close the source.

    MLX stacks experts, and renames or transposes tensors of some families. If files that MLX has
    written do not have the tensors of the network, the error names MLX as the reason.
    """
    if isinstance(tensors, _WITH_FORMATS) and "mlx" in tensors.formats:
        try:
            weights.check(tensors)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. MLX has written these files, and stores this family in another way: "
                "pass the model from which they were made"
            ) from error
    weights.load(tensors, on_progress=on_progress)
    tensors.close()


def _naming(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Weights` for the names and the order of a checkpoint's tensors."""
    family, wraps = FAMILIES[spec.family], is_wrapper(config)
    ignored = _either(family.ignored, MEDIA) if wraps else family.ignored
    num_further = text_config(config).get("num_nextn_predict_layers")
    if isinstance(num_further, int) and num_further > 0:  # layers for multi-token prediction
        first = len(spec.layers)
        numbers = "|".join(map(str, range(first, first + min(num_further, 8))))
        ignored = _either(ignored, re.compile(rf"(^|\.)layers\.({numbers})\."))
    return {
        "prefix": family.prefix,
        "prefixes": {**family.prefixes, **(PREFIXES if wraps else {})},
        "ignored": ignored,
        "as_source": lambda tensors: in_expert_order(config, StateDict(tensors)),
    }


def _parts(spec: ModelSpec, layout: RankLayout) -> dict[str, Any]:
    """Return the arguments of `Weights` for parameters: shapes, places, dtypes, the rank's cuts."""
    return {
        "shapes": parameter_shapes(spec),
        "places": functools.partial(place_tensors, spec),
        "dtype": spec.dtype,
        "matrices": matmul_matrices(spec),
        "wide": wide_parameters(spec),
        "cuts": rank_cuts(spec, layout),
    }


def _group_kinds(tensors: TensorSource, kernels: Kernels) -> set[Quantized]:
    """Return the kinds of 4-bit groups in the checkpoint that these kernels support."""
    found = {info.groups for info in tensors.describe().values()}
    return {kind for kind in kernels.group_kinds if kind in found}


def _either(*patterns: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern.pattern})" for pattern in patterns))


def check_fp8(weights_dtype: str | None, kernels: Kernels) -> None:
    """Raise ConfigError for weights in 8-bit floats if the kernels do not support them."""
    if weights_dtype == "fp8" and "fp8" not in kernels.quantized_kinds:
        raise ConfigError(
            f"weights_dtype = 'fp8' is refused with kernels = {type(kernels).__name__}: 8-bit "
            "floats need a CUDA device of compute capability 8.9 or later; 'int8' is for CPUs and "
            "for older devices"
        )


def _check_weights_dtype(
    weights_dtype: str | None,
    head_dtype: str | None,
    kernels: Kernels,
    device: torch.device | str,
) -> None:
    check_head_dtype(weights_dtype, head_dtype)
    if weights_dtype is None:
        return
    given = f"weights_dtype = {weights_dtype!r}"
    if weights_dtype not in get_args(WeightsDtype):
        raise ConfigError(f"{given} must be one of {get_args(WeightsDtype)} or None")
    if torch.device(device).type != "cpu" and isinstance(kernels, CpuKernels):
        raise ConfigError(
            f"{given} is refused with device = {str(device)!r} and kernels = CpuKernels"
        )
    check_fp8(weights_dtype, kernels)
    if not _kinds(weights_dtype) <= {*kernels.quantized_kinds}:
        have = ", ".join(kernels.quantized_kinds) or "none"
        raise ConfigError(
            f"{given} is refused with kernels = {type(kernels).__name__}: they have matmuls for "
            f"{have}"
        )


def _check_dtypes(
    spec: ModelSpec, weights_dtype: str | None, kernels: Kernels, device: torch.device | str
) -> None:
    """Raise ConfigError for dtypes that the kernels do not support for this model."""
    check_float64(spec.dtype, weights_dtype, kernels, device)
    _check_experts(spec, weights_dtype, kernels)


def check_float64(
    dtype: torch.dtype, weights_dtype: str | None, kernels: Kernels, device: torch.device | str
) -> None:
    """Raise ConfigError if `dtype` is float64 and float64 is not supported."""
    if dtype is not torch.float64:
        return
    refused = ""
    if torch.device(device).type != "cpu":
        refused = f"device = {str(device)!r}: only the CPU supports it"
    elif not kernels.has_float64:
        refused = f"kernels = {type(kernels).__name__}: they do not support it"
    elif weights_dtype is not None:
        refused = f"weights_dtype = {weights_dtype!r}: its matmuls compute at most in float32"
    if refused:
        raise ConfigError(f"dtype = 'float64' is refused with {refused}")


def _check_experts(spec: ModelSpec, weights_dtype: str | None, kernels: Kernels) -> None:
    has_experts = any(layer.experts is not None for layer in spec.layers)
    if has_experts and not _kinds(weights_dtype) <= {*kernels.expert_kinds}:
        raise ConfigError(
            f"weights_dtype = {weights_dtype!r} is refused with kernels = "
            f"{type(kernels).__name__}: this model has experts, which they multiply in "
            f"{', '.join(kernels.expert_kinds)}"
        )
    for experts in (layer.experts for layer in spec.layers):
        if experts is not None:
            kernels.check_routing(experts.count, experts.routing)


def _kinds(weights_dtype: str | None) -> set[str]:
    """Return the formats in which `weights_dtype` may store matrices."""
    if weights_dtype is None:
        return set()
    return {"int8", "int4"} if weights_dtype == "file" else {weights_dtype}


def _cpu_kernels(device: torch.device | str) -> Kernels:
    if torch.device(device).type != "cpu":
        raise ConfigError(
            f"kernels = None is refused with device = {str(device)!r}: None means the CPU kernels"
        )
    return CpuKernels()


def _check_pair(source: tuple[Any, ...]) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    if len(source) != 2 or not all(isinstance(part, Mapping) for part in source):
        kinds = ", ".join(type(part).__name__ for part in source)
        raise ConfigError(
            f"model_path = ({kinds}): must be a folder, a GGUF file or (config dict, state dict)"
        )
    return source
