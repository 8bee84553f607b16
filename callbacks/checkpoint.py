"""What a checkpoint folder says besides weights: the tokens that end a text, and its tokenizer.

The manager takes neither from the checkpoint: a host decides. These are the usual decisions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from gptmanager import InferenceRequest, word_list
from gptmanager.errors import ConfigError


@dataclass(frozen=True)
class TokenDefaults:
    """The `end_id` and `pad_id` that requests get when they bring none.

    A request has one `end_id`. Of several `end_ids` the first becomes it, each other one a stop
    word of one token, with finish reason STOP_WORDS.
    """

    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @classmethod
    def of_folder(cls, folder: str | os.PathLike[str]) -> TokenDefaults:
        """From `generation_config.json`; without one from `config.json`, as transformers does."""
        for name in ("generation_config.json", "config.json"):
            path = Path(folder) / name
            if path.is_file():
                return cls.of_config(_read_object(path))
        return cls()

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> TokenDefaults:
        """From the keys `eos_token_id` (an id, or a list) and `pad_token_id`."""
        return cls(ids_of(config.get("eos_token_id")), config.get("pad_token_id"))

    def fill(self, request: InferenceRequest) -> None:
        """Set on `request` what it does not say itself."""
        if self.pad_id is not None and "pad_id" not in request.tensors:
            request.pad_id = _one(self.pad_id)
        if not self.end_ids or "end_id" in request.tensors:
            return
        request.end_id = _one(self.end_ids[0])
        if len(self.end_ids) > 1:
            words = _words(request.tensors.get("stop_words_list"))
            if words is not None:
                words += [[end_id] for end_id in self.end_ids[1:]]
                request.stop_words_list = word_list(words)


def ids_of(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """One id, several, or none, as a tuple."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint folder; ConfigError if it has no readable tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{os.fspath(folder)!r} holds no tokenizer.json, which text prompts need: "
            "pass token ids, or a tokenizer"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _one(value: int) -> np.ndarray:
    return np.array([value], dtype=np.int32)


def _words(tensor: Any) -> list[list[int]] | None:
    """The words of a `stop_words_list` tensor; None if it is not one: the manager will say so."""
    if tensor is None:
        return []
    rows = np.asarray(tensor.cpu() if isinstance(tensor, torch.Tensor) else tensor)
    if rows.ndim == 3 and rows.shape[0] == 1:
        rows = rows[0]
    if rows.ndim != 2 or rows.shape[0] != 2 or rows.dtype.kind not in "iu":
        return None
    ids, ends = rows.tolist()
    starts = [0, *ends]
    return [ids[start:end] for start, end in zip(starts, ends, strict=False) if end >= 0]
