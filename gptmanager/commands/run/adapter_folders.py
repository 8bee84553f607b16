"""`AdapterFolders`: reads the adapters that a request file refers to, each folder only once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gptmanager.callbacks import load_peft_adapter
from gptmanager.errors import ConfigError, InvalidRequestError, quoted, response_text

_FIRST_TASK = 1 << 32  # task id of the first folder; task ids in lines are usually smaller


class AdapterFolders:
    """Reads adapters from folders.

    `place`: the folder from which relative paths start. `model`: the checkpoint that the adapters
    must fit, or None for any.
    """

    def __init__(self, place: Path, model: Path | None) -> None:
        self._place = place
        self._model = model
        self._read: dict[Path, tuple[int, tuple[Any, Any]] | InvalidRequestError] = {}

    def take(self, fields: dict[str, Any]) -> None:
        """Replace the field "lora" by the adapter's tensors. Set `lora_task_id` if it is absent.

        Raises InvalidRequestError for an invalid adapter, and if `fields` also has tensors.
        """
        if "lora" not in fields:
            return
        given = fields.pop("lora")
        if "lora_weights" in fields or "lora_config" in fields:
            raise InvalidRequestError("pass either lora or lora_weights and lora_config, not both")
        folder = Path(os.path.realpath(self._place / given))  # not `resolve`: links may form a loop
        if folder not in self._read:
            self._read[folder] = self._load(folder, given)
        found = self._read[folder]
        if isinstance(found, InvalidRequestError):
            raise found
        task_id, (fields["lora_weights"], fields["lora_config"]) = found
        fields.setdefault("lora_task_id", task_id)

    def _load(self, folder: Path, given: str) -> tuple[int, tuple[Any, Any]] | InvalidRequestError:
        try:
            return _FIRST_TASK + len(self._read), load_peft_adapter(folder, model=self._model)
        except (ConfigError, OSError) as error:
            return InvalidRequestError(f"lora = {quoted(given)}: {response_text(error)}")
