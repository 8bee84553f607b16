"""`TensorSpec` describes an input or output of a model; `InputReader` checks the inputs of a call.

The data of a tensor is read only after its name, datatype and shape have been checked against
limits that the client cannot choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gptmanager.callbacks.processors.banned_texts import MAX_WORDS
from gptmanager.callbacks.text.stop_strings import MAX_STOPS
from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.triton.errors import invalid
from gptmanager.server.triton.messages import InputTensor

_FLOATS = ("FP16", "FP32", "BF16")


class Sizes(NamedTuple):
    """The maximum sizes of dimensions for one server.

    `rows` limits the rows of a batch, `prompt` the tokens of a prompt, `vocabulary` the tokens that
    have a bias or draft logits, `hidden` the values of an embedding, `adapter_rows` the modules of
    an adapter, `adapter_width` the weights of a module, and `word_ids` the token ids of all words
    in a list. `stop_words`, `bad_words` and `bias_words` limit the numbers of strings in the inputs
    `stop_words`, `bad_words` and `embedding_bias_words`.
    """

    rows: int
    prompt: int
    vocabulary: int
    hidden: int
    adapter_rows: int
    adapter_width: int
    word_ids: int = 1 << 18
    stop_words: int = MAX_STOPS
    bad_words: int = MAX_WORDS
    bias_words: int = MAX_WORDS


class TensorSpec(NamedTuple):
    """An input or output of a model.

    `dims` is the shape without the batch; -1 means any size up to a limit. For each -1 of an input,
    `most` names the field of `Sizes` with the limit of this dimension. If `is_of_model`, FP16, FP32
    and BF16 are accepted besides `datatype`.
    """

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = True
    is_of_model: bool = False
    most: tuple[str, ...] = ()

    @property
    def is_scalar(self) -> bool:
        """Whether a row has one number or bool."""
        return self.dims == (1,) and self.datatype != "BYTES"

    def limits(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the maximum size of each dimension."""
        most = iter(self.most)
        return tuple(getattr(sizes, next(most)) if size < 0 else size for size in self.dims)


def table(*rows: tuple[Any, ...]) -> dict[str, TensorSpec]:
    """Return specs by name. A row contains names, separated by spaces, and their common fields."""
    specs = [TensorSpec(name, *rest) for names, *rest in rows for name in names.split()]
    return {spec.name: spec for spec in specs}


def input_table(*rows: tuple[Any, ...]) -> dict[str, TensorSpec]:
    """Return a `table` of inputs. Raises ValueError for a dimension without a limit."""
    found = table(*rows)
    for spec in found.values():
        if spec.dims.count(-1) != len(spec.most) or not set(spec.most) <= set(Sizes._fields):
            raise ValueError(f"input {spec.name}: each -1 of {spec.dims} needs a limit of Sizes")
    return found


class InputReader:
    """Checks the inputs of calls of the model that clients know as `model`."""

    def __init__(self, model: str, specs: Mapping[str, TensorSpec], sizes: Sizes) -> None:
        self.specs = specs
        self._model = model
        self._sizes = sizes

    def check_number(self, number: int) -> None:
        """Raise ApiError if a call has more inputs than the model."""
        if number > len(self.specs):
            raise invalid(
                "inputs",
                f"{number} inputs are given for model {quoted(self._model)}; it has "
                f"{len(self.specs)}",
            )

    def check(self, name: str, datatype: str, shape: Sequence[int]) -> None:
        """Raise ApiError for an unknown input, and for a datatype or a shape that does not fit.

        The data of the tensor is not needed.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise invalid(
                name, f"unexpected inference input {quoted(name)} for model {quoted(self._model)}"
            )
        if datatype != spec.datatype and not (spec.is_of_model and datatype in _FLOATS):
            raise invalid(
                name,
                f"inference input {quoted(name)} data-type is {quoted(datatype)}, but model "
                f"{quoted(self._model)} expects '{spec.datatype}'",
            )
        fits = len(shape) == len(spec.dims) + 1 and all(
            size in (-1, given) for size, given in zip(spec.dims, shape[1:], strict=True)
        )
        if not fits or min(shape) < 0:
            raise self._misshapen(spec, shape)
        if shape[0] > self._sizes.rows:
            raise self._wrong_batch(shape[0])
        for index, most in enumerate(spec.limits(self._sizes)):
            if shape[index + 1] > most:
                raise self._too_large(spec, shape)

    def shape_of(self, name: str, value: Any) -> tuple[int, ...]:
        """Return the shape of a row that JSON contains as nested lists, or () for a single element.

        Raises ApiError for lists that do not fit the input. The items of a list that is too long
        are not read.
        """
        spec, sizes, level = self.specs[name], [], [value]
        for depth, most in enumerate(spec.limits(self._sizes)):
            kinds = set(map(type, level))
            if list not in kinds:
                break
            lengths = {len(one) for one in level if isinstance(one, list)}
            if len(kinds) > 1 or len(lengths) > 1:
                raise invalid(name, f"input {quoted(name)} has lists of different lengths")
            sizes.append(lengths.pop())
            if spec.dims[depth] == -1 and sizes[-1] > most:
                raise self._too_large(spec, [1, *sizes])
            if sizes[-1] > most:
                raise self._misshapen(spec, [1, *sizes])
            level = [inner for one in level for inner in one]
        if list in set(map(type, level)):
            raise invalid(name, f"input {quoted(name)} has lists deeper than {len(spec.dims)}")
        return tuple(sizes)

    def rows(self, inputs: Mapping[str, InputTensor]) -> list[dict[str, Any]]:
        """Return the inputs of each row of the batch by name.

        Arrays have no batch dimension, and scalars are Python values. `check` must have accepted
        the inputs. Raises ApiError if an input is missing, and if the inputs have different numbers
        of rows.
        """
        for spec in self.specs.values():
            if not spec.is_optional and spec.name not in inputs:
                raise invalid(
                    spec.name,
                    f"input {quoted(spec.name)} is missing for model {quoted(self._model)}",
                )
        first, count = next((name, len(it.array)) for name, it in inputs.items())
        for name, tensor in inputs.items():
            if len(tensor.array) != count:
                raise invalid(
                    name,
                    f"input {quoted(name)} has batch size {len(tensor.array)} for model "
                    f"{quoted(self._model)}, while {quoted(first)} has {count}",
                )
        if count < 1:
            raise self._wrong_batch(count)
        return [
            {name: _of_row(self.specs[name], tensor.array[row]) for name, tensor in inputs.items()}
            for row in range(count)
        ]

    def _misshapen(self, spec: TensorSpec, shape: Sequence[int]) -> ApiError:
        return invalid(
            spec.name,
            f"unexpected shape for input {quoted(spec.name)} for model {quoted(self._model)}. "
            f"Expected {[-1, *spec.dims]}, got {quoted(list(shape))}",
        )

    def _too_large(self, spec: TensorSpec, shape: Sequence[int]) -> ApiError:
        if spec.most == ("prompt",) and not spec.is_optional:
            return prompt_too_long(shape[1], self._sizes.prompt)
        limits = spec.limits(self._sizes)
        return invalid(
            spec.name,
            f"unexpected shape for input {quoted(spec.name)} for model {quoted(self._model)}. "
            f"Expected {[-1, *spec.dims]}, at most {[self._sizes.rows, *limits]}, got "
            f"{quoted(list(shape))}",
        )

    def _wrong_batch(self, size: int) -> ApiError:
        return invalid(
            None,
            f"inference request batch-size must be from 1 to {self._sizes.rows} for model "
            f"{quoted(self._model)}, got {size}",
        )


def prompt_too_long(length: int | str, most: int) -> ApiError:
    """Return the error for a prompt that leaves no room for a new token.

    The message is the same as the message of the C++ backend.
    """
    return invalid("input_ids", f"Prompt length ({length}) exceeds maximum input length ({most}).")


def _of_row(spec: TensorSpec, array: np.ndarray) -> Any:
    return array.reshape(-1)[0].item() if spec.is_scalar else array
