"""Chooses whether transformers computes a checkpoint, and reads its sizes before it is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from gptmanager.errors import ConfigError, error_summary, quoted
from gptmanager.models.checkpoint_parts import read_config
from gptmanager.models.families import FAMILIES
from gptmanager.models.families.wrappers import text_config
from gptmanager.models.hf.library import knows, load_transformers_library
from gptmanager.models.other_folders import describe_other_type
from gptmanager.models.read_spec import read_spec
from gptmanager.models.spec import ModelSpec


class CheckpointSizes(NamedTuple):
    """The sizes of a model. `spec` is None if transformers computes the model."""

    vocab_size: int
    hidden_size: int
    max_seq_len: int
    spec: ModelSpec | None = None


def uses_transformers(path: str | os.PathLike[str], backend: str) -> bool:
    """Return whether a checkpoint is loaded through transformers.

    `backend` is `OptionalParams.model_backend`. Raises ConfigError for an unreadable config.
    """
    if backend != "auto" or not os.path.isdir(path):
        return backend == "transformers"
    config = text_config(read_config(Path(path)))
    own = config.get("model_type")
    return own not in [*FAMILIES] and not describe_other_type(config) and knows(own)


def read_sizes(path: Path, backend: str, max_seq_len: int | None = None) -> CheckpointSizes:
    """Return the sizes of a checkpoint from its config.

    `backend` and `max_seq_len` are as in `OptionalParams`. Raises ConfigError if the config cannot
    be read, or if a size is missing or wrong.
    """
    if not uses_transformers(path, backend):
        spec = read_spec(read_config(path), max_seq_len=max_seq_len)
        return CheckpointSizes(spec.vocab_size, spec.hidden_size, spec.max_seq_len, spec)
    library = load_transformers_library()
    try:
        options = {"trust_remote_code": False, "local_files_only": True}
        config: Any = library.AutoConfig.from_pretrained(path, **options).get_text_config()
    except Exception as error:  # transformers raises errors of many types
        why = error_summary(error)
        raise ConfigError(f"transformers cannot read {quoted(str(path))}: {why}") from error
    absent = {"vocab_size": None, "hidden_size": None, "max_position_embeddings": max_seq_len}
    sizes: list[int] = []
    for name, value in absent.items():
        found = getattr(config, name, value)
        if not isinstance(found, int) or found < 1:
            raise ConfigError(f"config.json: {name} = {quoted(found)}: must be at least 1")
        sizes.append(found)
    vocab_size, hidden_size, longest = sizes
    return CheckpointSizes(vocab_size, hidden_size, max_seq_len or longest)
