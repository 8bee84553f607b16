"""Functions that refuse tensors of a checkpoint with a wrong name, shape or dtype."""

from __future__ import annotations

from collections.abc import Collection

from gptmanager.errors import ConfigError
from gptmanager.memory.safetensors_reader import FLOATS
from gptmanager.memory.tensor_sources import TensorInfo, tensor_name


def check_tensor(name: str, found: TensorInfo, *expected: tuple[int, ...]) -> None:
    """Raise ConfigError unless a tensor has one of the `expected` shapes and a float dtype."""
    if found.shape not in expected:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        raise ConfigError(
            f"tensor {name} has shape {list(found.shape)}; the config requires {wanted}"
        )
    if found.dtype not in FLOATS.values():
        needed = ", ".join(FLOATS.values())
        raise ConfigError(f"tensor {name} has dtype {found.dtype}; must be one of {needed}")


def refuse_tensors(what: str, names: Collection[str], hint: str = "") -> None:
    """Raise ConfigError if there are `names`. Its text is `what`, the first 8 names and `hint`."""
    if names:
        first = ", ".join(tensor_name(name) for name in sorted(names)[:8])
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ConfigError(f"{what}: {first}{more}{hint}")
