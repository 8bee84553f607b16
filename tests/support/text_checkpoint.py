"""A tiny random Llama that reads and writes bytes: a checkpoint folder with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints import CONFIGS, checkpoint, random_model
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_ID = 256  # the token after those of the 256 bytes


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def save_text_checkpoint(folder: Path, *, with_tokenizer: bool = True) -> Path:
    config, state = checkpoint(random_model({**CONFIGS["llama"], "vocab_size": END_ID + 1}))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    if with_tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
