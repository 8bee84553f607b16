"""Guided decoding for a checkpoint folder: its tokenizer, and the tokens that end a text."""

from __future__ import annotations

import os

from gptmanager import GuidedDecoding
from gptmanager.callbacks.text.checkpoint import TokenDefaults, load_tokenizer


def load_guided_decoding(folder: str | os.PathLike[str]) -> GuidedDecoding:
    """For the checkpoint in `folder`; ConfigError without its tokenizer, or without llguidance."""
    return GuidedDecoding(load_tokenizer(folder), TokenDefaults.of_folder(folder).end_ids)
