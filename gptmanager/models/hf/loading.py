"""Loads a checkpoint folder through transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError, error_summary, quoted
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.tensor_checks import refuse_tensors
from gptmanager.models.checkpoint_parts import gguf_checkpoint, is_quantized, read_config
from gptmanager.models.hf.library import knows, load_transformers_library
from gptmanager.models.hf.network import TransformersModel
from gptmanager.models.read_spec import read_dtype

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# Prefixes of the tensors of a text model in a multimodal checkpoint -> those of the model alone
_OF_TEXT_MODEL = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
Prepare = Callable[[torch.dtype, Collection[Quantized]], object]


def load_with_transformers(
    folder: Path,
    kernels: Kernels,
    *,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    weights_dtype: Quantized | None = None,
    head_dtype: Quantized | None = None,
    max_seq_len: int | None = None,
    on_progress: ProgressCallback | None = None,
    prepare: Prepare | None = None,
) -> TransformersModel:
    """Load a folder of safetensors files of a model architecture that transformers has.

    Of a multimodal model, only its text model is loaded, if transformers has it as a model of its
    own. The network is loaded on the CPU, and then moved to `device`. `kernels` must be for this
    device. `prepare` is called before the weights are loaded, with the dtype of the network and the
    quantizations of its matrices. Raise ConfigError for any other folder, and for an architecture
    that attention over pages cannot compute. Code of the folder is never run.
    """
    library = load_transformers_library()
    _check_folder(folder)
    own_dtype = read_dtype(read_config(folder), dtype)
    if prepare is not None:
        prepare(own_dtype, {it for it in (weights_dtype, _head(weights_dtype, head_dtype)) if it})
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = library.AutoConfig.from_pretrained(folder, **options)
        text = config.get_text_config()
        if text is not config and type(text) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
            config, options = text, {**options, "config": text, "key_mapping": _OF_TEXT_MODEL}
        _check_type(library, config)
        _check_sizes(library, folder, config)
        network, found = library.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=own_dtype,
            use_safetensors=True,
            experts_implementation="eager",
            output_loading_info=True,
            **options,
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of many types
        why = error_summary(error)
        raise ConfigError(f"transformers cannot load {quoted(str(folder))}: {why}") from error
    # transformers would leave random numbers in missing tensors
    refuse_tensors("tensors are missing", found["missing_keys"])
    head = network.get_output_embeddings()
    names = {name for name, module in network.named_modules() if module is head}

    def kind_of(name: str) -> Quantized | None:
        return _head(weights_dtype, head_dtype) if name in names else weights_dtype

    def progress(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress("weights", done, total)

    given: dict[str, Any] = {"max_seq_len": max_seq_len, "device": device}
    return TransformersModel(network, kernels, kind_of=kind_of, on_progress=progress, **given)


def _head(weights_dtype: Quantized | None, head_dtype: Quantized | None) -> Quantized | None:
    """Return the quantization of the output matrix, or None."""
    return (head_dtype or "int8") if weights_dtype == "int4" else weights_dtype


def _check_type(library: Any, config: Any) -> None:
    if type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"config.json: model_type = {quoted(config.model_type)}: transformers has no model of "
            "this architecture that continues text"
        )


def _check_sizes(library: Any, folder: Path, config: Any) -> None:
    """Raise ConfigError if a config describes more parameters than its checkpoint holds.

    The network is built on torch's meta device, so no memory is allocated for parameters.
    """
    given = SafetensorsFolder(folder).describe()
    with torch.device("meta"):
        network = library.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    needed = sum(parameter.numel() for parameter in network.parameters())
    stored = sum(math.prod(info.shape) for info in given.values())
    if needed > stored:
        raise ConfigError(
            f"config.json describes {needed} parameters: the checkpoint has only {stored}"
        )


def _check_folder(folder: Path) -> None:
    given = "model_backend = 'transformers'"
    if gguf_checkpoint(folder) is not None:
        raise ConfigError(f"{given}: {quoted(str(folder))} is a GGUF file: only 'native' reads it")
    config = read_config(folder)
    name = config.get("model_type")
    if not knows(name):
        raise ConfigError(
            f"{given}: config.json: model_type = {quoted(name)}: transformers does not have this "
            "architecture (code in a checkpoint is never run)"
        )
    if is_quantized(folder):
        raise ConfigError(
            f"{given}: config.json: quantization_config: only 'native' reads quantized folders"
        )
    num_tensors = len(SafetensorsFolder(folder).describe())
    # checked before transformers creates lists with an item for each layer
    for own in (config, config.get("text_config")):
        if not isinstance(own, dict):
            continue
        for field in _LAYERS:
            if isinstance(count := own.get(field), int) and count > num_tensors:
                raise ConfigError(
                    f"config.json: {field} = {quoted(count)}: the checkpoint has only "
                    f"{num_tensors} tensors"
                )
