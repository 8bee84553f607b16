"""`Adapters`: the LoRA adapters that clients may use by name, and their folders."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmanager.callbacks import load_peft_adapter
from gptmanager.errors import ConfigError, quoted
from gptmanager.server.errors import ApiError

# Task ids from here on are reserved for the server. Clients of Triton's protocol choose lower ids,
# so they can never replace the weights of an adapter here. Clients may hash names to ids; the
# reserved range is small, so that a hash is rarely in this range.
FIRST_OWN_TASK = 2**64 - 2**32


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. `tensors` has `lora_weights` and `lora_config`, as in a request.

    `created` is in seconds since the epoch.
    """

    name: str
    folder: Path
    task_id: int
    tensors: dict[str, Any]
    created: int


class Adapters:
    """The loaded adapters of the model in the folder `model`, by name.

    `root` is the folder from which clients may load adapters; if it is None, they cannot load any.
    At most `most` adapters may be loaded at once; their weights stay in memory. With
    `has_journal`, requests of an earlier process may go on with the adapters of that process, so
    the first task id is random.
    """

    def __init__(
        self, model: Path, root: Path | None, most: int, *, has_journal: bool = False
    ) -> None:
        self._model = model
        self._most = most
        self._num_loading = 0
        self._root = None if root is None else root.resolve()
        self._by_name: dict[str, Adapter] = {}
        first = int.from_bytes(os.urandom(4), "big") >> 1 if has_journal else 0
        self._task_ids = itertools.count(FIRST_OWN_TASK + first)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_name.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def find(self, name: str) -> Adapter:
        """Return the adapter called `name`. Raises ApiError (404) if it is not loaded."""
        if name not in self._by_name:
            raise ApiError(
                404, f"no adapter is called {quoted(name)}", param="lora_name", code="not_found"
            )
        return self._by_name[name]

    @contextlib.contextmanager
    def room(self, name: str) -> Iterator[None]:
        """Reserve a place for one more adapter while the block reads and adds it.

        Raises ApiError (400) if the name is taken, or if the maximum number of adapters is loaded
        or being read.
        """
        self._check_free(name)
        if len(self._by_name) + self._num_loading >= self._most:
            message = f"--max-adapters = {self._most} allows no more adapters: unload one first"
            raise ApiError(400, message, param="lora_name", code="too_many_adapters")
        self._num_loading += 1
        try:
            yield
        finally:
            self._num_loading -= 1

    def read(self, name: str, path: str, *, is_trusted: bool = False) -> Adapter:
        """Return an adapter read from its files, without adding it. Blocks while it reads.

        `is_trusted`: the operator has named the folder, so it may be outside the root. Otherwise,
        raises ApiError (403) if no root is set, or if the folder is outside the root. Raises
        ApiError (400) if the folder has no valid adapter.
        """
        folder = Path(path).resolve() if is_trusted else self._folder(path)
        try:
            weights, config = load_peft_adapter(folder, model=self._model)
        except (ConfigError, OSError) as error:
            raise ApiError(
                400, f"lora_path = {quoted(path)}: {error}", param="lora_path"
            ) from error
        tensors = {"lora_weights": weights, "lora_config": config}
        return Adapter(name, folder, next(self._task_ids), tensors, int(time.time()))

    def add(self, adapter: Adapter) -> None:
        """Add an adapter. Raises ApiError (400) if its name is taken."""
        self._check_free(adapter.name)
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Remove and return an adapter. Raises ApiError (404) if it is not loaded."""
        adapter = self.find(name)
        del self._by_name[name]
        return adapter

    def _check_free(self, name: str) -> None:
        if name in self._by_name:
            raise ApiError(
                400, f"an adapter called {quoted(name)} is already loaded", param="lora_name"
            )

    def _folder(self, path: str) -> Path:
        if self._root is None:
            raise ApiError(
                403, "clients can load adapters only with --adapter-dir", param="lora_path"
            )
        try:
            folder = Path(self._root, path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null character
            raise ApiError(
                400, f"lora_path = {quoted(path)} must be a path: {error}", param="lora_path"
            ) from error
        if not folder.is_relative_to(self._root):
            raise ApiError(
                403, f"lora_path = {quoted(path)} must be inside --adapter-dir", param="lora_path"
            )
        return folder
