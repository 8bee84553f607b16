"""`PeftConfig`: reads the `adapter_config.json` of a plain LoRA adapter, as PEFT writes it.

It checks that the adapter is plain LoRA, and finds the rank and the scale of a module by the name
of the module, as PEFT does. The file may contain regular expressions of an untrusted author, which
are therefore matched in a bounded number of steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gptmanager.callbacks.adapters.name_pattern import NamePattern, PatternError, Steps
from gptmanager.errors import ConfigError, quoted, quoted_path
from gptmanager.memory.checkpoint.tensor_sources import tensor_name
from gptmanager.memory.checkpoint.untrusted_files import read_object

# Fields about training, bookkeeping, or details of a method that another field enables.
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
MERGE = "merge the adapter into the model with PEFT's merge_and_unload, and use that model"
_REASONS = {
    "target_parameters": "not supported: the tensors in an adapter of expert parameters do not say "
    "which parameter they belong to"
}
# These initializations do not change the base model; others subtract the initial B A from it.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
# limit for all matches of a file together (a few seconds); 500 names usually need 250,000 steps
_MAX_STEPS = 5_000_000
# the first number after at least two parts of the name
_FIRST_NUMBER = re.compile(r"[^.]*\.(?:[^.]*\.)+?(\d+)\.")
_Value = TypeVar("_Value")


class PeftConfig:
    """The content of an `adapter_config.json`.

    The constructor raises ConfigError for an adapter that is not plain LoRA, and for an invalid
    value.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields = {k: v for k, v in read_object(path).items() if v is not None}
        self._refuse_others()
        self._rank = self._read_rank("r", self._fields.get("r", 8))
        self._alpha = self._read_alpha("lora_alpha", self._fields.get("lora_alpha", 8))
        self._is_rslora = self._flag("use_rslora")
        # checked, but not used: it describes the layout of the base matrix, not of A and B
        self._flag("fan_in_fan_out")
        ranks = self._object("rank_pattern")
        alphas = self._object("alpha_pattern")
        self._ranks = {p: self._read_rank("rank_pattern", rank) for p, rank in ranks.items()}
        self._alphas = {p: self._read_alpha("alpha_pattern", a) for p, a in alphas.items()}
        self._steps = Steps(_MAX_STEPS)
        self._patterns: dict[str, NamePattern] = {}
        self._targets = self._names("target_modules")
        if isinstance(self._targets, str) and self._targets.lower() == "all-linear":
            self._targets = None
        self._excluded = self._names("exclude_modules")
        self._layers = self._read_layers()
        self._layers_before = self._read_layers_pattern()

    def rank(self, module: str) -> int:
        """Return the rank of A and B of a module, by its name in the base model."""
        rank = self._by_pattern("rank_pattern", self._ranks, module)
        return self._rank if rank is None else rank

    def scale(self, module: str) -> float:
        """Return the number by which a module multiplies B (A x)."""
        rank = self.rank(module)
        alpha = self._by_pattern("alpha_pattern", self._alphas, module)
        alpha = self._alpha if alpha is None else alpha
        return alpha / (math.sqrt(rank) if self._is_rslora else rank)

    def check_target(self, module: str) -> None:
        """Raise ConfigError for a module to which PEFT would not add an adapter."""
        excluded, targets = self._excluded, self._targets
        if excluded and self._is_named("exclude_modules", excluded, module):
            raise self.error("exclude_modules", f"the file has tensors of {module}")
        if targets is None:
            return
        if not self._is_named("target_modules", targets, module):
            raise self.error("target_modules", f"the file also has tensors of {module}")
        if not isinstance(targets, str) and module not in targets and self._layers:
            if self._layer_of(module) not in self._layers:
                raise self.error("layers_to_transform", f"the file also has tensors of {module}")

    def error(self, field: str, need: str) -> ConfigError:
        value = quoted(self._fields.get(field))
        return ConfigError(f"{quoted_path(self._path)}: {tensor_name(field)} = {value}: {need}")

    def _refuse_others(self) -> None:
        fields = self._fields
        if fields.get("peft_type") != "LORA":
            raise self.error("peft_type", 'only "LORA" is supported')
        if fields.get("bias", "none") != "none":
            need = f'only "none" is supported, because an adapter changes only matrices: {MERGE}'
            raise self.error("bias", need)
        init = fields.get("init_lora_weights", True)
        if not isinstance(init, bool) and str(init).lower() not in _PLAIN_INITS:
            raise self.error(
                "init_lora_weights",
                "not supported: this initialization may change the base model; convert the adapter "
                "with PEFT's save_pretrained and path_initial_model_for_weight_conversion",
            )
        for field, value in fields.items():
            if field not in _READ and field not in _IGNORED and value not in (False, "", [], {}):
                reason = _REASONS.get(field, "not supported: only plain LoRA is")
                raise self.error(field, f"{reason}; {MERGE}")

    def _read_rank(self, field: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.error(field, f"{quoted(value)} must be an integer from 1 to {2**31 - 1}")
        return value

    def _read_alpha(self, field: str, value: Any) -> float:
        try:
            alpha = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            alpha = math.inf
        if not math.isfinite(alpha):
            raise self.error(field, f"{quoted(value)} must be a finite number")
        return alpha

    def _flag(self, field: str) -> bool:
        value = self._fields.get(field, False)
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false")
        return value

    def _object(self, field: str) -> Mapping[str, Any]:
        value = self._fields.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, "must be an object")
        return value

    def _names(self, field: str) -> str | frozenset[str] | None:
        value = self._fields.get(field)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, "must be a string or a list of strings")
        return frozenset(value)

    def _read_layers(self) -> frozenset[int]:
        value = self._fields.get("layers_to_transform", [])
        layers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int for layer in layers):
            raise self.error("layers_to_transform", "must be an integer or a list of integers")
        return frozenset(layers)

    def _read_layers_pattern(self) -> frozenset[str]:
        given = self._names("layers_pattern") or ()
        names = frozenset([given] if isinstance(given, str) else given)
        for name in names:
            if not re.fullmatch(r"\w+(\.\w+)*", name):
                raise self.error(
                    "layers_pattern", f"{quoted(name)} must be a name such as 'layers'"
                )
        return names

    def _by_pattern(self, field: str, values: Mapping[str, _Value], module: str) -> _Value | None:
        """Return the value of the file's first pattern that matches the end of the name."""
        for pattern, value in values.items():
            if self._is_end(field, pattern, module):
                return value
        return None

    def _is_end(self, field: str, pattern: str, module: str) -> bool:
        """Return whether a pattern matches the whole name, or the part after one of its dots."""
        if re.fullmatch(r"[\w.]*", pattern):  # the usual case, for which comparing is enough
            self._take_step(field)
            end = f".{module}"[-len(pattern) - 1 :]
            letters = zip(pattern, end[1:], strict=False)
            is_long_enough = len(end) > len(pattern) and end[0] == "."
            return is_long_enough and all(own in (".", letter) for own, letter in letters)
        return self._match(field, rf"(.*\.)?({pattern})$", module)

    def _is_named(self, field: str, names: str | frozenset[str], module: str) -> bool:
        """Return whether `names` selects a module.

        A string is a pattern for the whole name of the module. A set lists ends of names; the
        module's name must have one of them.
        """
        if isinstance(names, str):
            return self._match(field, names, module)
        return any(end in names for end in _ends(module))

    def _layer_of(self, module: str) -> int | None:
        """Return the layer of a module, or None.

        The layer is the first number after a name of `layers_pattern`; without `layers_pattern`,
        the first number after at least two parts of the module's name.
        """
        if not self._layers_before:
            found = _FIRST_NUMBER.match(module)
            return None if found is None else int(found[1])
        numbers = re.finditer(r"\.(\d+)(?=\.)", module)
        before = ((module[: it.start()], int(it[1])) for it in numbers)
        return next((n for name, n in before if self._layers_before & {*_ends(name)}), None)

    def _match(self, field: str, pattern: str, module: str) -> bool:
        try:
            compiled = self._patterns.get(pattern)
            if compiled is None:
                compiled = self._patterns[pattern] = NamePattern(pattern, self._steps)
            return compiled.matches(module)
        except PatternError as error:
            raise self.error(field, f"{quoted(pattern)}: {error}") from None

    def _take_step(self, field: str) -> None:
        try:
            self._steps.take()
        except PatternError as error:
            raise self.error(field, str(error)) from None


def _ends(module: str) -> Iterator[str]:
    """Yield the whole name, and the part after each of its dots."""
    yield module
    while "." in module:
        module = module.partition(".")[2]
        yield module
