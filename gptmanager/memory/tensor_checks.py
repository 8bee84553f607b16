"""Functions that refuse tensors of a checkpoint with a wrong name, shape, dtype or value."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.memory.checkpoint.safetensors_reader import FLOATS
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, TensorSource, tensor_name
from gptmanager.memory.places import Place


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


def _whole(source: TensorSource, name: str) -> Tensor:
    """Return a tensor in one piece."""
    [(_, piece)] = source.pieces(name, sys.maxsize)
    return piece


def read_scales(source: TensorSource, name: str) -> Tensor:
    """Return a tensor of scales. Raise ConfigError unless all are positive and finite."""
    scales = _whole(source, name)
    if not (scales.isfinite() & (scales > 0)).all():
        raise ConfigError(f"tensor {name} holds {scales.tolist()}: scales must be positive")
    return scales


def tied_error(name: str, parameter: str) -> ConfigError:
    """Return the error for a tensor that differs from the parameter to which it is tied."""
    return ConfigError(
        f"tensor {name} differs from {parameter}, to which the config ties it; "
        "if the output matrix is not the embedding, change tie_word_embeddings to false"
    )


def check_values(
    source: TensorSource, names: Mapping[str, str], places: Mapping[str, Place], dtype: torch.dtype
) -> list[str]:
    """Check the scales, and that tied tensors are equal in `dtype`.

    `names` maps the name of each tensor in `places` to its name in the source. Return the names of
    tied tensors that can be compared only with the storage of their parameter.
    """
    filling = {
        places[name].parameter: given for name, given in names.items() if not places[name].twin
    }
    alone = []
    for name, given in names.items():
        place = places[name]
        if place.scale:
            read_scales(source, given)
        elif place.twin and place.parameter not in filling:
            alone.append(name)
        elif place.twin and not _are_equal(source, filling[place.parameter], given, dtype):
            raise tied_error(given, place.parameter)
    return alone


def _are_equal(source: TensorSource, name: str, other: str, dtype: torch.dtype) -> bool:
    one, two = _whole(source, name), _whole(source, other)
    rows = [slice(start, start + 1024) for start in range(0, len(one), 1024)]
    return all(torch.equal(one[it].to(dtype), two[it].to(one.device, dtype)) for it in rows)
