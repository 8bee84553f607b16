"""`load_peft_adapter`: the adapter in a folder that PEFT has saved, as tensors of a request."""

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
from gptmanager.memory.checkpoint_files import read_object
from gptmanager.memory.tensor_sources import FLOATS, SafetensorsFolder, TensorInfo, tensor_name
from gptmanager.models.families import FAMILIES
from gptmanager.models.lora_modules import lora_modules
from gptmanager.models.read_spec import read_spec
from gptmanager.request.adapter import LORA_MODULE_IDS

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PIECE_BYTES = 64 << 20
_PREFIX = "base_model.model."  # what PEFT puts before the names of modules
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
    """A module's name in any family, with {} for its layer, with and without its prefix -> id."""
    found = {}
    for family in FAMILIES.values():
        for theirs, ours in family.tensors.items():
            if ours in _IDS:
                found[theirs] = found[theirs.removeprefix(family.prefix)] = _IDS[ours]
    return found


class _Pair(NamedTuple):
    """The tensors of a module by their names in the file, and their shapes."""

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
    """`lora_weights` float32 `[n, width]` and `lora_config` int32 `[n, 3]` of a PEFT folder.

    The folder holds `adapter_config.json` and `adapter_model.safetensors`. A row is A `[D, Hi]` and
    then B `[Ho, D]` times lora_alpha / D (rsLoRA: / sqrt(D)), with the rank D of its module,
    padded with zeros. Rows ascend by layer and module id. Modules are those of the families that
    the library has, by the names of transformers. No model is needed: a request whose rows are too
    short for its model is refused. But one of a wider model looks like a row with padding: give the
    checkpoint's folder as `model` to have all widths compared.

    ConfigError, which names what was found, for anything but plain LoRA (DoRA, biases, embeddings,
    saved modules, other methods), other modules, and files that are broken or contradict each
    other. Patterns of the config are regular expressions, matched in a bounded number of steps.
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
            # times the scale in float64, so that it is rounded once
            with np.errstate(over="ignore"):  # the request's check tells
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
    """(layer, module id) -> its tensors, whose names, shapes and dtypes are checked."""
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
                f"{where}: {name} is {info.dtype} {list(info.shape)}: a matrix of one of "
                f"{[*FLOATS.values()]} is needed"
            )
    if not modules:
        raise ConfigError(f"{where} holds no tensors")
    return {key: _pair(where, tensors, module, config) for key, module in modules.items()}


def _check_widths(where: str, pairs: Mapping[tuple[int, int], _Pair], model: Path) -> None:
    """ConfigError for an adapter of a model with other widths."""
    modules = lora_modules(read_spec(read_object(model / "config.json")))
    for (_, module_id), pair in pairs.items():
        module = modules.get(module_id)  # one that the model has not is told with the request
        own = pair.input_width, pair.num_columns
        if module is not None and own != (module.input_width, module.num_columns):
            raise ConfigError(
                f"{where} is of another model: its {pair.module} takes {own[0]} inputs and gives "
                f"{own[1]} outputs, in {quoted_path(model)} these are {module.input_width} and "
                f"{module.num_columns}"
            )


def _pair(where: str, tensors: Mapping[str, TensorInfo], module: str, config: PeftConfig) -> _Pair:
    pair = _Pair(module, config.rank(module), 0, 0)
    for part, other in ("AB", "BA"):
        if pair.name(part) not in tensors:
            raise ConfigError(f"{where}: {pair.name(other)} is there, but no {pair.name(part)}")
    config.check_target(module)
    (rank, input_width), (num_columns, inner) = (tensors[pair.name(p)].shape for p in "AB")
    if not rank == inner == pair.rank:
        raise ConfigError(
            f"{where}: {pair.name('A')} has shape {[rank, input_width]} and lora_B "
            f"{[num_columns, inner]}, but by {_CONFIG} the rank of {module} is {pair.rank}"
        )
    return pair._replace(input_width=input_width, num_columns=num_columns)


def _read_name(where: str, name: str, known: Mapping[str, int]) -> tuple[str, tuple[int, int]]:
    """The name of a tensor's module in the base model, and its layer and module id."""
    found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_[AB]\.weight", name)
    if found is None:
        raise ConfigError(
            f"{where}: {tensor_name(name)} is no part of a plain LoRA adapter: only "
            f"{_PREFIX}<module>.lora_A.weight and lora_B.weight are"
        )
    module = found[1]
    layer = re.search(r"\.(0|[1-9]\d{0,4})\.", module)
    if layer is not None:
        module_id = known.get(f"{module[: layer.start()]}.{{}}.{module[layer.end() :]}")
        if module_id is not None:
            return module, (int(layer[1]), module_id)
    ends = sorted({name.partition("{}.")[2] for name in known})
    raise ConfigError(
        f"{where}: {tensor_name(module)} is no module that an adapter may change: needed is one of "
        f"{ends} of a layer"
    )


def _read(source: SafetensorsFolder, name: str) -> npt.NDArray[np.float32]:
    shape = source.describe()[name].shape
    whole = torch.empty(shape, dtype=torch.float32)
    for start, piece in source.pieces(name, _PIECE_BYTES):
        whole[start : start + len(piece)] = piece
    array: npt.NDArray[np.float32] = whole.numpy()
    return array
