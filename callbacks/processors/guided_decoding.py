"""Guided decoding with the tokenizer and the end tokens of a checkpoint folder."""

from __future__ import annotations

import os

from gptmanager import GuidedDecoding
from gptmanager.callbacks.text.checkpoint import TokenDefaults, load_tokenizer


def load_guided_decoding(folder: str | os.PathLike[str]) -> GuidedDecoding:
    """Return a `GuidedDecoding` for the tokenizer and the end tokens of a checkpoint folder.

    Raise ConfigError if the folder has no tokenizer, or if llguidance is not installed.
    """
    return GuidedDecoding(load_tokenizer(folder), TokenDefaults.of_folder(folder).end_ids)
