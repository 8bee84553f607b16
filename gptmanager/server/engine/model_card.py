"""`ModelCard`: a model's name, sizes, tokenizer and defaults, from the files of its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gptmanager.callbacks import TokenDefaults, load_tokenizer
from gptmanager.callbacks.text.checkpoint import (
    has_tokenizer,
    read_tokenizer_config,
    sampling_defaults,
    special_tokens_of,
)
from gptmanager.models.decoder.lora_modules import lora_modules
from gptmanager.models.hf.sizes import read_sizes


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The properties of a model. Clients may use any of its `names`.

    Lengths are in tokens, and `created` is in seconds since the epoch. `max_model_len` is the limit
    of prompt and output together. `adapter_rows` is the number of modules that an adapter may
    change, in all layers together. `adapter_width` is the number of LoRA weights of the largest
    module for an adapter of rank 1. `sampling_defaults` are from generation_config.json.
    `special_tokens` maps names in tokenizer_config.json (`bos_token`, `eos_token`, ...) to texts.
    If the folder has no tokenizer, `tokenizer` is None and prompts must be token ids. If the model
    keeps a recurrent state for each sequence, `keeps_state` is True.
    """

    names: tuple[str, ...]
    folder: Path
    vocab_size: int
    max_model_len: int
    hidden_size: int
    adapter_rows: int
    adapter_width: int
    max_beam_width: int = 1
    keeps_state: bool = False
    tokenizer: Tokenizer | None = None
    token_defaults: TokenDefaults = TokenDefaults()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The first of `names`."""
        return self.names[0]

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        names: tuple[str, ...],
        *,
        max_seq_len: int | None = None,
        max_beam_width: int = 1,
        backend: str = "auto",
    ) -> ModelCard:
        """Read a card from the files of a checkpoint. Raise ConfigError for unreadable files.

        `backend` is `OptionalParams.model_backend`.
        """
        sizes = read_sizes(folder, backend, max_seq_len)
        spec = sizes.spec
        modules = () if spec is None else lora_modules(spec).values()
        tokenizer_config = read_tokenizer_config(folder)
        return cls(
            names=names,
            folder=folder,
            vocab_size=sizes.vocab_size,
            max_model_len=sizes.max_seq_len,
            hidden_size=sizes.hidden_size,
            adapter_rows=0 if spec is None else spec.num_layers * len(modules),
            adapter_width=max((module.width for module in modules), default=0),
            max_beam_width=max_beam_width,
            keeps_state=spec is not None and bool(spec.states),
            tokenizer=load_tokenizer(folder) if has_tokenizer(folder) else None,
            token_defaults=TokenDefaults.of_folder(folder),
            sampling_defaults=sampling_defaults(folder),
            special_tokens=special_tokens_of(tokenizer_config),
        )
