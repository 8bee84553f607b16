"""`load_peft_adapter`: reads an adapter that PEFT saved in a folder, as tensors of a request."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gptmanager.callbacks.adapters.peft_config import PeftConfig
from gptmanager.errors import ConfigError, quoted_path
from gptmanager.memory.tensor_sources import FLOATS, SafetensorsFolder, TensorInfo, tensor_name
from gptmanager.models.checkpoint_parts import read_config
from gptmanager.models.families import FAMILIES
from gptmanager.models.lora_modules import lora_modules
from gptmanager.models.read_spec import read_spec
from gptmanager.request.adapter import LORA_MODULE_IDS

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PIECE_BYTES = 64 << 20
_PREFIX = "base_model.model."  # which PEFT adds to the names of modules
_IDS: Mapping[tuple[str, str | None], int] = {
    ours: LORA_MODULE_IDS[name]
    for ours, name in {
        ("qkv", None): "attn_qkv",
        ("qkv", "q"): "attn_q",
        ("qkv", "k"): "attn_k",
        ("qkv", "v"): "attn_v",
        ("out", None): "attn_dense",
        ("up", None): "mlp_h_to_4h",
        ("up", "gate"): "mlp_h_to_4h",
        ("up", "up"): "mlp_gate",
        ("down", None): "mlp_4h_to_h",
    }.items()
}


def _module_ids() -> dict[str, int]:
    """Return a module's name in any family -> its id.

    Names have {} in place of the layer, and are listed with and without the family's prefix.
    """
    found = {}
    for family in FAMILIES.values():
        for theirs, ours in family.tensors.items():
            if ours in _IDS:
                found[theirs] = found[theirs.removeprefix(family.prefix)] = _IDS[ours]
    return found


class _Pair(NamedTuple):
    """The tensors A and B of a module: their names in the file, and their shapes."""

    module: str
    rank: int
    input_width: int
    num_columns: int

    def name(self, part: str) -> str:
        return f"{_PREFIX}{self.module}.lora_{part}.weight"

    @property
    def num_elements(self) -> int:
        return self.rank * (self.input_width + self.num_columns)


def load_peft_adapter(
    folder: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return `lora_weights` float32 `[n, width]` and `lora_config` int32 `[n, 3]` of a PEFT folder.

    The folder has `adapter_config.json` and `adapter_model.safetensors`. A row is A `[D, Hi]` and
    then B `[Ho, D]` times lora_alpha / D (rsLoRA: / sqrt(D)), with the rank D of its module,
    padded with zeros. Rows are sorted by layer and module id. All modules of the library's model
    families are supported, by their names in transformers. `model` is optional: the manager refuses
    a request with rows that are too short for its model. But a row of a wider model looks like a
    row with padding, so pass the checkpoint's folder as `model` to have all widths compared.

    Raise ConfigError, which quotes the entry, for everything except plain LoRA (DoRA, biases,
    embeddings, saved modules, other methods), for other modules, and for files that are broken or
    contradict each other. Patterns of the config are regular expressions, which are matched in a
    bounded number of steps.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{quoted_path(path)} is not a folder: pass a folder that PEFT saved")
    config = PeftConfig(path / _CONFIG)
    source = SafetensorsFolder(path, _TENSORS)
    where = quoted_path(path / _TENSORS)
    pairs = _find_pairs(where, source.describe(), config)
    if model is not None:
        _check_widths(where, pairs, Path(model))
    rows = sorted(pairs)
    width = max(pair.num_elements for pair in pairs.values())
    try:
        weights = np.zeros((len(rows), width), dtype=np.float32)
        for row, key in enumerate(rows):
            pair = pairs[key]
            a, b = (_read(source, pair.name(part)) for part in "AB")
            weights[row, : a.size] = a.reshape(-1)
            # scaled in float64, so that each value is rounded once
            with np.errstate(over="ignore"):  # the manager refuses a request with infinities
                scaled = b.astype(np.float64) * config.scale(pair.module)
                weights[row, a.size : pair.num_elements] = scaled.reshape(-1)
    except MemoryError:
        raise ConfigError(f"{where}: no memory for {len(rows)} rows of {width} elements") from None
    finally:
        source.close()
    config_rows = [(module_id, layer, pairs[layer, module_id].rank) for layer, module_id in rows]
    return weights, np.array(config_rows, dtype=np.int32)


def _find_pairs(
    where: str, tensors: Mapping[str, TensorInfo], config: PeftConfig
) -> dict[tuple[int, int], _Pair]:
    """Return (layer, module id) -> its tensors, with checked names, shapes and dtypes."""
    known = _module_ids()
    modules: dict[tuple[int, int], str] = {}
    for name, info in tensors.items():
        module, key = _read_name(where, name, known)
        if modules.setdefault(key, module) != module:
            raise ConfigError(
                f"{where}: {module} and {modules[key]} are the same module of layer {key[0]}"
            )
        if info.dtype not in FLOATS.values() or len(info.shape) != 2 or 0 in info.shape:
            raise ConfigError(
                f"{where}: {name} is {info.dtype} {list(info.shape)}: it must be a matrix of one "
                f"of {[*FLOATS.values()]}"
            )
    if not modules:
        raise ConfigError(f"{where} has no tensors")
    return {key: _pair(where, tensors, module, config) for key, module in modules.items()}


def _check_widths(where: str, pairs: Mapping[tuple[int, int], _Pair], model: Path) -> None:
    """Raise ConfigError for an adapter of a model with other widths."""
    modules = lora_modules(read_spec(read_config(model)))
    for (_, module_id), pair in pairs.items():
        module = modules.get(module_id)  # None: the manager refuses the request
        own = pair.input_width, pair.num_columns
        if module is not None and own != (module.input_width, module.num_columns):
            raise ConfigError(
                f"{where} is for another model: its {pair.module} has {own[0]} inputs and "
                f"{own[1]} outputs, in {quoted_path(model)} it has {module.input_width} and "
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


def _read_name(where: str, name: str, known: Mapping[str, int]) -> tuple[str, tuple[int, int]]:
    """Return the name of a tensor's module in the base model, and its layer and module id."""
    found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_[AB]\.weight", name)
    if found is None:
        raise ConfigError(
            f"{where}: {tensor_name(name)} does not belong to a plain LoRA adapter, which has only "
            f"{_PREFIX}<module>.lora_A.weight and lora_B.weight"
        )
    module = found[1]
    layer = re.search(r"\.(0|[1-9]\d{0,4})\.", module)
    if layer is not None:
        module_id = known.get(f"{module[: layer.start()]}.{{}}.{module[layer.end() :]}")
        if module_id is not None:
            return module, (int(layer[1]), module_id)
    ends = sorted({name.partition("{}.")[2] for name in known})
    raise ConfigError(
        f"{where}: {tensor_name(module)} is not supported: a module must be one of {ends} of a "
        "layer"
    )


def _read(source: SafetensorsFolder, name: str) -> npt.NDArray[np.float32]:
    shape = source.describe()[name].shape
    whole = torch.empty(shape, dtype=torch.float32)
    for start, piece in source.pieces(name, _PIECE_BYTES):
        whole[start : start + len(piece)] = piece
    array: npt.NDArray[np.float32] = whole.numpy()
    return array
