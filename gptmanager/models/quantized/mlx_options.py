"""`read_packings`: reads and checks how the modules of a checkpoint of MLX are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gptmanager.errors import ConfigError, quoted
from gptmanager.memory.checkpoint.tensor_sources import tensor_name

MLX_FIELD = "quantization"  # its field in config.json
OPTIONS = ("group_size", "bits", "mode")
_GLOBAL_SCALE = "global_scale"
BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_OF_OTHER_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits, group size


class Packing(NamedTuple):
    """How a module is quantized: the bits of a number, columns that share a scale, and the mode.

    If `global_scale`, the scales of each matrix are also multiplied by a number.
    """

    bits: int
    group_size: int
    mode: str = "affine"
    global_scale: bool = False


Packings = Mapping[str, Packing | None]


def read_packings(own: Mapping[str, Any]) -> Packings:
    """Return module -> packing for each module that the field `quantization` names.

    The packing is None for a module that is not quantized. The name "" has the packing of all other
    modules. Raises ConfigError for values that are not supported.
    """
    default = _packing(MLX_FIELD, {it: own.get(it) for it in OPTIONS})
    found: dict[str, Packing | None] = {"": default}
    for module, given in own.items():
        field = f"{MLX_FIELD}.{module}"
        if module in OPTIONS:
            continue
        if isinstance(given, bool):
            found[module] = default if given else None
        elif isinstance(given, dict):
            found[module] = _packing(field, given)
        else:
            raise mlx_error(field, given, "must be an object, true or false")
    return found


def _packing(field: str, given: Mapping[str, Any]) -> Packing:
    for name, value in given.items():
        if name not in (*OPTIONS, _GLOBAL_SCALE) and value not in (None, False):
            known = [*OPTIONS, _GLOBAL_SCALE]
            raise mlx_error(f"{field}.{name}", value, f"not supported; the fields are {known}")
    mode = "affine" if given.get("mode") is None else given["mode"]
    if not isinstance(mode, str) or mode not in ("affine", *_OF_OTHER_MODES):
        raise mlx_error(f"{field}.mode", mode, f"must be one of {['affine', *_OF_OTHER_MODES]}")
    bits, size = _OF_OTHER_MODES.get(mode, (4, 64))
    has_global = given.get(_GLOBAL_SCALE)
    if has_global not in (None, False) and (has_global is not True or mode != "nvfp4"):
        need = "must be true or false, and false unless the mode is 'nvfp4'"
        raise mlx_error(f"{field}.{_GLOBAL_SCALE}", has_global, need)
    allowed = (BITS, _GROUP_SIZES) if mode == "affine" else ((bits,), (size,))
    return Packing(
        _number(f"{field}.bits", given.get("bits"), bits, allowed[0]),
        _number(f"{field}.group_size", given.get("group_size"), size, allowed[1]),
        mode,
        has_global is True,
    )


def _number(field: str, given: Any, default: int, allowed: tuple[int, ...]) -> int:
    found = default if given is None else given
    if type(found) is not int or found not in allowed:
        raise mlx_error(field, found, f"must be one of {[*allowed]}")
    return found


def mlx_error(field: str, value: Any, need: str) -> ConfigError:
    """Return the error for a field below `MLX_FIELD`, or for this field itself."""
    # a field may be the name of a module, which is as untrusted as the name of a tensor
    return ConfigError(f"config.json: {tensor_name(field)} = {quoted(value)}: {need}")
