"""`PeftConfig`: what an `adapter_config.json` of PEFT says of a plain LoRA adapter.

Decides which of them are plain, and rank and scale of a module by its name, as PEFT does. Knows
nothing of tensors. Patterns are regular expressions of whoever wrote the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from gptmanager.errors import ConfigError
from gptmanager.memory.checkpoint_files import read_object, shown, shown_path

# About training, bookkeeping, or the form of something that another field turns on.
_IGNORED = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "lora_dropout", "ensure_weight_tying", "eva_config", "corda_config"),
        *("lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "init_lora_weights", "bias"),
    }
)
# These leave the base model as it is; others subtract the first A and B from it.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
_Value = TypeVar("_Value")


class PeftConfig:
    """An `adapter_config.json`.

    ConfigError for one of something else than plain LoRA, or a value that cannot be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields = {k: v for k, v in read_object(path).items() if v is not None}
        self._refuse_others()
        self._rank = self._read_rank("r", self._fields.get("r", 8))
        self._alpha = self._read_alpha("lora_alpha", self._fields.get("lora_alpha", 8))
        self._root = self._flag("use_rslora")
        self._flag("fan_in_fan_out")  # how the base matrix lies; A and B lie the same either way
        ranks = self._patterns("rank_pattern")
        alphas = self._patterns("alpha_pattern")
        self._ranks = {p: self._read_rank("rank_pattern", rank) for p, rank in ranks.items()}
        self._alphas = {p: self._read_alpha("alpha_pattern", a) for p, a in alphas.items()}
        self._targets = self._names("target_modules")
        if isinstance(self._targets, str) and self._targets.lower() == "all-linear":
            self._targets = None
        self._excluded = self._names("exclude_modules")
        self._layers = self._read_layers()
        layers_pattern = self._names("layers_pattern") or []
        self._layers_pattern = (
            [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern
        )

    def rank(self, module: str) -> int:
        """The rank of A and B of a module, by its name in the base model."""
        rank = self._by_pattern("rank_pattern", self._ranks, module)
        return self._rank if rank is None else rank

    def scale(self, module: str) -> float:
        """What B (A x) of a module is multiplied with."""
        rank = self.rank(module)
        alpha = self._by_pattern("alpha_pattern", self._alphas, module)
        alpha = self._alpha if alpha is None else alpha
        return alpha / (math.sqrt(rank) if self._root else rank)

    def check_target(self, module: str) -> None:
        """ConfigError for a module that PEFT would not give an adapter to."""
        excluded, targets = self._excluded, self._targets
        if excluded and self._is_named("exclude_modules", excluded, module):
            raise self.error("exclude_modules", f"the file has tensors of {module}")
        if targets is None:
            return
        if not self._is_named("target_modules", targets, module):
            raise self.error("target_modules", f"the file has tensors of {module}, too")
        if not isinstance(targets, str) and module not in targets and self._layers:
            if self._layer_of(module) not in self._layers:
                raise self.error("layers_to_transform", f"the file has tensors of {module}, too")

    def error(self, field: str, need: str) -> ConfigError:
        value = shown(self._fields.get(field))
        return ConfigError(f"{shown_path(self._path)}: {field} = {value}: {need}")

    def _refuse_others(self) -> None:
        fields = self._fields
        if fields.get("peft_type") != "LORA":
            raise self.error("peft_type", 'only "LORA" is supported')
        if fields.get("bias", "none") != "none":
            raise self.error("bias", 'only "none" is supported: an adapter changes matrices alone')
        init = fields.get("init_lora_weights", True)
        if not isinstance(init, bool) and str(init).lower() not in _PLAIN_INITS:
            raise self.error(
                "init_lora_weights",
                "not supported: such a start may change the base model; PEFT's save_pretrained "
                "converts to a plain adapter with path_initial_model_for_weight_conversion",
            )
        for field, value in fields.items():
            if field not in _READ and field not in _IGNORED and value not in (False, "", [], {}):
                raise self.error(field, "not supported: only plain LoRA is")

    def _read_rank(self, field: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.error(field, f"{shown(value)} is no positive integer")
        return value

    def _read_alpha(self, field: str, value: Any) -> float:
        try:
            alpha = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            alpha = math.inf
        if not math.isfinite(alpha):
            raise self.error(field, f"{shown(value)} is no finite number")
        return alpha

    def _flag(self, field: str) -> bool:
        value = self._fields.get(field, False)
        if not isinstance(value, bool):
            raise self.error(field, "true or false is needed")
        return value

    def _patterns(self, field: str) -> Mapping[str, Any]:
        value = self._fields.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, "an object is needed")
        return value

    def _names(self, field: str) -> str | list[str] | None:
        value = self._fields.get(field)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, "a text or a list of texts is needed")
        return value

    def _read_layers(self) -> list[int]:
        value = self._fields.get("layers_to_transform", [])
        layers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int for layer in layers):
            raise self.error("layers_to_transform", "an integer or a list of integers is needed")
        return layers

    def _by_pattern(self, field: str, values: Mapping[str, _Value], module: str) -> _Value | None:
        """The value of the first pattern, as the file lists them, that is the end of the name."""
        for pattern, value in values.items():
            if self._match(field, rf"(.*\.)?({pattern})$", module):
                return value
        return None

    def _is_named(self, field: str, names: str | list[str], module: str) -> bool:
        """By a pattern for the whole name, or by one of several ends of it."""
        if isinstance(names, str):
            return self._match(field, names, module, whole=True) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _layer_of(self, module: str) -> int | None:
        """The first number of the name, after one of `layers_pattern` or any but its first part."""
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in self._layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*"]:
            found = self._match("layers_pattern", rf"{pattern}\.(?P<idx>\d+)\.", module)
            if found is not None:
                return int(found["idx"])
        return None

    def _match(
        self, field: str, pattern: str, module: str, whole: bool = False
    ) -> re.Match[str] | None:
        try:
            return (re.fullmatch if whole else re.match)(pattern, module)
        except (re.error, RecursionError, OverflowError) as error:
            raise self.error(field, f"no regular expression: {error}") from None
