"""`ModelSettings`: the server's model, its adapters, and options of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptmanager.environment.machine.local_models import name_of
from gptmanager.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Options of the model and its adapters.

    `model_name`: the name by which the checkpoint `model` was found, if it was not given as a path.
    `served_model_name`: the model's names for clients, by default `model_name` and the name of the
    folder or file.
    `adapters`: names and folders of adapters that are loaded at the start. `adapter_dir`: the
    folder from which clients may load adapters; if it is None, they cannot load any.
    `max_adapters`: the maximum number of adapters that are loaded at once. `block_reuse`: whether
    prompts reuse blocks of the KV cache; by default they do, unless the batching is V1.
    `host_tier_bytes`: CPU memory for evicted blocks, in bytes. `prompt_lookup`: the maximum number
    of draft tokens of a request in a step; None means no drafts. `record`: the file to which the
    run is recorded. `journal` is the `journal_path` of `OptionalParams`. `journal_sync` and
    `journal_on_full` have the same names and values there.
    """

    model: Path
    model_name: str | None = None
    served_model_name: str | Sequence[str] | None = None
    adapters: Sequence[tuple[str, Path]] = ()
    adapter_dir: Path | None = None
    max_adapters: int = 128
    max_beam_width: int = 1
    block_reuse: bool | None = None
    host_tier_bytes: int | None = None
    prompt_lookup: int | None = None
    record: Path | None = None
    journal: Path | None = None
    journal_sync: float | Literal["always", "never"] = 20
    journal_on_full: Literal["refuse", "continue"] = "refuse"

    @property
    def name(self) -> str:
        """The model's first name for clients."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model for clients."""
        given = self.served_model_name
        if given is None:
            own = "".join(it if it.isprintable() else "_" for it in name_of(self.model))
            return tuple(dict.fromkeys((self.model_name or own, own)))
        return (given,) if isinstance(given, str) else tuple(given)

    def _check_names(self) -> None:
        names = [*self.names, *(name for name, _ in self.adapters)]
        for name in names:
            if not name.strip() or not name.isprintable():
                option = "served_model_name" if name in self.names else "adapters"
                raise ConfigError(f"{option} = {name!r} must be printable and must not be blank")
            if names.count(name) > 1:
                raise ConfigError(f"served_model_name and adapters: {name!r} is used twice")
        if len(self.adapters) > self.max_adapters:
            raise ConfigError(
                f"max_adapters = {self.max_adapters} must be at least the number of adapters, "
                f"{len(self.adapters)}"
            )
