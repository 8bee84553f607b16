"""`load_peft_adapter`: reads a LoRA adapter that PEFT saved, as two arrays for a request."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gptmanager.callbacks.adapters.peft_config import MERGE, PeftConfig
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError, quoted_path
from gptmanager.memory.checkpoint.safetensors_reader import FLOATS, SafetensorsCopy
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name
from gptmanager.models.checkpoint_parts import read_config
from gptmanager.models.decoder.lora_modules import lora_modules
from gptmanager.models.families import FAMILIES
from gptmanager.models.families.wrappers import without_wrapper
from gptmanager.models.read_spec import read_spec
from gptmanager.models.spec import ModelSpec
from gptmanager.request.adapter_modules import LORA_MODULE_IDS

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # which PEFT adds to the names of modules
# (this library's name of a parameter, the part of the parameter that a checkpoint's module fills)
# -> the module's ids in `lora_config`. If there are two ids, each gets half of the rows of B.
_IDS: Mapping[tuple[str, str | None], tuple[int, ...]] = {
    ours: tuple(LORA_MODULE_IDS[name] for name in names.split())
    for ours, names in {
        ("qkv", None): "attn_qkv",
        ("qkv", "by_head"): "attn_qkv",
        ("qkv", "q"): "attn_q",
        ("qkv", "k"): "attn_k",
        ("qkv", "v"): "attn_v",
        ("qkv", "gated_q"): "attn_q",
        ("out", None): "attn_dense",
        ("delta_in", "by_key"): "attn_qkv",
        ("delta_in", "inputs"): "attn_qkv",
        ("delta_in", "gate"): "linear_attn_z",
        ("delta_gates", "by_key"): "linear_attn_ba",
        ("delta_gates", "rates"): "linear_attn_b",
        ("delta_gates", "steps"): "linear_attn_a",
        ("delta_out", None): "attn_dense",
        ("short_in", None): "attn_qkv",
        ("short_out", None): "attn_dense",
        ("space_in", None): "attn_qkv",
        ("space_out", None): "attn_dense",
        **{
            (up, part): names
            for up in ("up", "shared_up")
            for part, names in (
                (None, "mlp_h_to_4h"),
                ("gate", "mlp_h_to_4h"),
                ("up", "mlp_gate"),
                ("gate_up", "mlp_h_to_4h mlp_gate"),
            )
        },
        ("down", None): "mlp_4h_to_h",
        ("shared_down", None): "mlp_4h_to_h",
    }.items()
}


def _module_ids(name: str | None) -> dict[str, tuple[int, ...]]:
    """Return a map from a family's module names to module ids; for all families if `name` is None.

    A module name has {} in place of the number of the layer. Each name is in the map with and
    without the family's prefix, and with each of its other prefixes.
    """
    found: dict[str, tuple[int, ...]] = {}
    # Llama is first in FAMILIES and last here: where families differ, a name means what it does
    # in Llama
    families = [*FAMILIES.values()][::-1] if name is None else [FAMILIES[name]]
    for family in families:
        for theirs, (ours, part) in family.tensors.items():
            own = ours.partition("|")[0], part  # parameters joined by "|" have the same ids
            if own in _IDS:
                plain = theirs.removeprefix(family.prefix)
                starts = "", *family.prefixes, theirs.removesuffix(plain)
                found |= {start + plain: _IDS[own] for start in starts}
    return found


class _Pair(NamedTuple):
    """The tensors A and B of a checkpoint's module, for one module id.

    If two module ids share a B, each uses half of its rows. The id of this pair uses `num_columns`
    rows of B, one per output, from row `first_column` on.
    """

    module: str
    rank: int
    input_width: int
    num_columns: int
    first_column: int = 0

    def name(self, part: str) -> str:
        return f"{_PREFIX}{self.module}.lora_{part}.weight"

    @property
    def num_elements(self) -> int:
        return self.rank * (self.input_width + self.num_columns)


def load_peft_adapter(
    folder: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return `lora_weights` float32 `[n, width]` and `lora_config` int32 `[n, 3]` of a PEFT folder.

    The folder has `adapter_config.json` and `adapter_model.safetensors`. A row of `lora_weights`
    has the A `[D, Hi]` of a module of rank D, then the module's B `[Ho, D]` times lora_alpha / D
    (rsLoRA: / sqrt(D)), and then zeros. A row of `lora_config` has the module id, the layer and the
    rank. Rows are sorted by layer and module id. The modules of attention, dense MLPs and shared
    experts of the library's model families are supported, by their names in transformers. For
    families without gates (Nemotron, Arcee, Jais 2), `mlp.up_proj` is only supported with `model`.

    If `model` is the folder of the model's checkpoint, the adapter must have modules of this model,
    with the model's widths. The manager itself refuses a request with rows that are too short for
    its model, but it cannot distinguish a row for a wider model from a row with padding.

    Raise ConfigError, which names the wrong entry, module or file, for an adapter that is not plain
    LoRA (DoRA, biases, embeddings, saved modules, other methods), for a module that is not
    supported, and for files that are broken or contradict each other. Patterns in the config are
    regular expressions, which are matched in a bounded number of steps.
    """
    path = Path(folder)
    if not os.path.isdir(path):
        raise ConfigError(f"{quoted_path(path)} is not a folder: pass a folder that PEFT saved")
    config = PeftConfig(path / _CONFIG)
    source = SafetensorsCopy(path, _TENSORS)
    where = quoted_path(path / _TENSORS)
    spec = None if model is None else read_spec(read_config(model))
    known = _module_ids(None if spec is None else spec.family)
    pairs = _find_pairs(where, source.describe(), config, known)
    if model is not None and spec is not None:
        _check_model(where, pairs, spec, quoted_path(Path(model)))
    rows = sorted(pairs)
    width = max(pair.num_elements for pair in pairs.values())
    try:
        if 4 * len(rows) * width > free_memory_bytes():  # the rows have one width
            raise MemoryError
        weights = np.zeros((len(rows), width), dtype=np.float32)
        by_module: dict[str, list[int]] = {}
        for row, key in enumerate(rows):
            by_module.setdefault(pairs[key].module, []).append(row)
        for numbers in by_module.values():
            a, b = (source.take(pairs[rows[numbers[0]]].name(it)).float().numpy() for it in "AB")
            for row in numbers:
                pair = pairs[rows[row]]
                own = b[pair.first_column : pair.first_column + pair.num_columns]
                weights[row, : a.size] = a.reshape(-1)
                # scaled in float64, so that each value is rounded once
                with np.errstate(over="ignore"):  # the manager refuses a request with infinities
                    scaled = own.astype(np.float64) * config.scale(pair.module)
                    weights[row, a.size : pair.num_elements] = scaled.reshape(-1)
    except MemoryError:
        raise ConfigError(f"{where}: no memory for {len(rows)} rows of {width} elements") from None
    config_rows = [(module_id, layer, pairs[layer, module_id].rank) for layer, module_id in rows]
    return weights, np.array(config_rows, dtype=np.int32)


def _find_pairs(
    where: str,
    tensors: Mapping[str, TensorInfo],
    config: PeftConfig,
    known: Mapping[str, tuple[int, ...]],
) -> dict[tuple[int, int], _Pair]:
    """Return a map from (layer, module id) to a pair of tensors; check names, shapes, dtypes."""
    modules: dict[tuple[int, int], str] = {}
    keys: dict[str, list[tuple[int, int]]] = {}
    for name, info in tensors.items():
        module, layer, ids = _read_name(where, name, known)
        keys[module] = [(layer, module_id) for module_id in ids]
        for key in keys[module]:
            if modules.setdefault(key, module) != module:
                raise ConfigError(
                    f"{where}: {module} and {modules[key]} are the same module of layer {layer}"
                )
        if info.dtype not in FLOATS.values() or len(info.shape) != 2 or 0 in info.shape:
            raise ConfigError(
                f"{where}: {name} is {info.dtype} {list(info.shape)}: it must be a matrix of one "
                f"of {[*FLOATS.values()]}"
            )
    if not modules:
        raise ConfigError(f"{where} has no tensors")
    pairs: dict[tuple[int, int], _Pair] = {}
    for module, own in keys.items():
        pair = _pair(where, tensors, module, config)
        size, rest = divmod(pair.num_columns, len(own))
        if rest:
            raise ConfigError(
                f"{where}: {pair.name('B')} has {pair.num_columns} rows, which must be an even "
                "number: the two halves belong to two matrices"
            )
        for number, key in enumerate(own):
            pairs[key] = pair._replace(num_columns=size, first_column=number * size)
    return pairs


def _check_model(
    where: str, pairs: Mapping[tuple[int, int], _Pair], spec: ModelSpec, model: str
) -> None:
    """Raise ConfigError if the model does not have a module of the adapter, or has other widths."""
    modules = lora_modules(spec)
    for (layer, module_id), pair in pairs.items():
        known = modules.get(module_id)
        module = None if known is None or layer >= spec.num_layers else known.of(layer)
        if module is None:
            raise ConfigError(f"{where} is for another model: {model} does not have {pair.module}")
        own = pair.input_width, pair.num_columns
        if own != (module.input_width, module.num_columns):
            raise ConfigError(
                f"{where} is for another model: its {pair.module} has {own[0]} inputs and "
                f"{own[1]} outputs, but in {model} it has {module.input_width} and "
                f"{module.num_columns}"
            )


def _pair(where: str, tensors: Mapping[str, TensorInfo], module: str, config: PeftConfig) -> _Pair:
    pair = _Pair(module, config.rank(module), 0, 0)
    for part, other in ("AB", "BA"):
        if pair.name(part) not in tensors:
            raise ConfigError(f"{where} has {pair.name(other)}, but not {pair.name(part)}")
    config.check_target(module)
    (rank, input_width), (num_columns, inner) = (tensors[pair.name(p)].shape for p in "AB")
    if not rank == inner == pair.rank:
        raise ConfigError(
            f"{where}: {pair.name('A')} has shape {[rank, input_width]} and lora_B "
            f"{[num_columns, inner]}, but in {_CONFIG} the rank of {module} is {pair.rank}"
        )
    return pair._replace(input_width=input_width, num_columns=num_columns)


def _read_name(
    where: str, name: str, known: Mapping[str, tuple[int, ...]]
) -> tuple[str, int, tuple[int, ...]]:
    """Return the name of a tensor's module in the base model, its layer, and its module ids."""
    found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_[AB]\.weight", name)
    if found is None:
        raise ConfigError(
            f"{where}: {tensor_name(name)} does not belong to a plain LoRA adapter, which has only "
            f"{_PREFIX}<module>.lora_A.weight and lora_B.weight: {MERGE}"
        )
    module = found[1]
    layer = re.search(r"\.(0|[1-9]\d{0,4})\.", module)
    if layer is not None:
        in_base = f"{module[: layer.start()]}.{{}}.{module[layer.end() :]}"
        ids = known.get(in_base, known.get(without_wrapper(in_base)))
        if ids is not None:
            return module, int(layer[1]), ids
    if re.search(r"\.experts\b", module):
        raise ConfigError(
            f"{where}: {tensor_name(module)} is not supported: an adapter may change attention, "
            f"dense MLPs and shared experts, not the experts that a router chooses: {MERGE}"
        )
    ends = sorted({name.partition("{}.")[2] for name in known})
    raise ConfigError(
        f"{where}: {tensor_name(module)} is not supported: a module must be one of {ends} of a "
        f"layer; {MERGE}"
    )
