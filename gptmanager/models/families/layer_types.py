"""The layers with a window, RoPE, or a state, read from the fields of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gptmanager.errors import ConfigError
from gptmanager.models.fields import Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONVOLUTION = "linear_attention", "conv"
MLP, MOE = "mlp", "moe"  # types of layers without attention
_MAMBA = {"attention": FULL, "mamba": LINEAR}
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
_PATTERN = "sliding_window_pattern"
Concerned = (
    Literal["none", "all", "some", "pattern", "chunks", "linear", "conv", "mamba", "blocks"] | int
)


def read_windows(
    fields: Fields, concerned: Concerned, num_layers: int, max_seq_len: int
) -> tuple[tuple[int | None, ...], list[str]]:
    """Return the window of each layer, and the type of each layer, such as "full_attention".

    A window is a number of positions. It is None if the layer has no window, or if the window
    covers all of `max_seq_len`. `concerned`: see `Family.windows`. The list of types is empty if
    `concerned` is "none", "all" or "some".
    """
    if concerned == "chunks":
        return _in_chunks(fields, num_layers, max_seq_len)
    if isinstance(concerned, str) and concerned in _WITH_STATES:
        return (None,) * num_layers, _WITH_STATES[concerned](fields, num_layers)
    if isinstance(concerned, int) or concerned == "pattern":
        return _by_type(fields, concerned, num_layers, max_seq_len)
    window, is_optional = None, concerned == "some" or fields.has_default("use_sliding_window")
    if fields.get("sliding_window") is not None:
        if concerned == "none":
            raise fields.error("sliding_window", "not supported in this family")
        if not is_optional or fields.flag("use_sliding_window"):
            window = fields.size("sliding_window")
        else:
            fields.count("sliding_window")  # checked although it has no effect
    fields.note_read("max_window_layers", "use_sliding_window")
    first = num_layers if window is None else 0
    if window is not None and concerned == "some":
        first = fields.count("max_window_layers")
    types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    given = types if fields.get("layer_types") is None else fields.get("layer_types")
    if isinstance(given, list):
        given = [FULL if kind == "attention" else kind for kind in given]
    possible = [FULL, SLIDING][: 1 if window is None else 2]
    if given != types and (
        concerned != "some"
        or not isinstance(given, list)
        or len(given) != num_layers
        or not all(kind in possible for kind in given)
    ):
        if concerned == "some":
            raise _wrong_types(fields, num_layers, possible)
        raise fields.error("layer_types", "not supported")
    if window is not None and window >= max_seq_len:
        window = None
    return tuple(window if kind == SLIDING else None for kind in given), []


def _by_type(
    fields: Fields, each: int | Literal["pattern"], num_layers: int, max_seq_len: int
) -> tuple[tuple[int | None, ...], list[str]]:
    window, types = None, [FULL] * num_layers
    if each == "pattern":
        fields.note_read(_PATTERN)
    if fields.get("sliding_window") is not None:
        window = fields.size("sliding_window")
        types = _patterned(fields, num_layers) if each == "pattern" else _repeated(each, num_layers)
    given_types = fields.get("layer_types")
    if given_types is not None:
        types = _checked(fields, num_layers, [FULL, SLIDING][: 1 if window is None else 2])
    if window is not None and window >= max_seq_len:
        window = None
    return tuple(window if kind == SLIDING else None for kind in types), types


def _patterned(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer by the config's pattern.

    A pattern is a number, or a string with a letter per layer, which is repeated: L has a window.
    """
    given = fields.get(_PATTERN)
    if not given or not isinstance(given, str):
        return _repeated(fields.size(_PATTERN), num_layers)
    if {*given} - {*"LG"}:
        raise fields.error(_PATTERN, "must be a number, or letters L and G")
    return [SLIDING if given[i % len(given)] == "L" else FULL for i in range(num_layers)]


def _repeated(each: int, num_layers: int) -> list[str]:
    return [FULL if _is_full(layer, each) else SLIDING for layer in range(num_layers)]


def _in_chunks(
    fields: Fields, num_layers: int, max_seq_len: int
) -> tuple[tuple[int | None, ...], list[str]]:
    """Return the windows and types of layers with attention in chunks.

    Unless `layer_types` says otherwise, the layers with RoPE have chunks.
    """
    types = [CHUNKED if is_rotated(fields, layer) else FULL for layer in range(num_layers)]
    if fields.get("layer_types") is not None:
        types = _checked(fields, num_layers, [FULL, CHUNKED])
    size = None
    if fields.get("attention_chunk_size") is not None:
        size = fields.size("attention_chunk_size")
    if size is not None and size >= max_seq_len:
        size = None
    return tuple(size if kind == CHUNKED else None for kind in types), types


def _checked(fields: Fields, num_layers: int, possible: list[str]) -> list[str]:
    """Return the field `layer_types`.

    Raises ConfigError unless it has one of the `possible` types for each layer.
    """
    given = fields.get("layer_types")
    is_list = isinstance(given, list) and len(given) == num_layers
    if not is_list or not all(kind in possible for kind in given):
        raise _wrong_types(fields, num_layers, possible)
    return list(given)


def _wrong_types(fields: Fields, num_layers: int, possible: list[str]) -> ConfigError:
    need = f"must be {num_layers} of {possible}"
    if possible == [FULL]:
        need += f" with {fields.as_given('sliding_window')}"
    return fields.error("layer_types", need)


def is_rotated(fields: Fields, layer: int) -> bool:
    """Return whether a layer uses RoPE.

    Despite its name, the list `no_rope_layers` has a 1 for each layer with RoPE. Without this list,
    all layers use RoPE except every `no_rope_layer_interval`-th.
    """
    given, interval = fields.get("no_rope_layers"), fields.size("no_rope_layer_interval")
    if given is None or given == []:
        return (layer + 1) % interval != 0
    num_layers = fields.size("num_hidden_layers")
    own = given[layer] if isinstance(given, list) and len(given) == num_layers else None
    if type(own) is not int or own not in (0, 1):
        raise fields.error("no_rope_layers", f"must be a list of {num_layers} zeros and ones")
    return bool(own)


def _linear_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer, from `layer_types` or `full_attention_interval`.

    Without `layer_types`, the last of every `full_attention_interval` layers has full attention,
    and the other layers have linear attention.
    """
    interval = fields.size("full_attention_interval")
    if fields.get("layer_types") is None:
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    return _partly_full(fields, num_layers, LINEAR)


def _convolution_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer, from `layer_types` or `full_attn_idxs`.

    With neither, all layers have full attention, unless the family needs `layer_types`.
    """
    has_indices = fields.has_default("full_attn_idxs")
    if fields.get("layer_types") is not None or not has_indices:
        fields.note_read("full_attn_idxs")
        return _partly_full(fields, num_layers, CONVOLUTION)
    if fields.get("full_attn_idxs") is None:
        return [FULL] * num_layers
    return _listed(fields, num_layers, "full_attn_idxs", CONVOLUTION)


def _listed(fields: Fields, num_layers: int, field: str, other: str) -> list[str]:
    """Return the type of each layer: full attention for the layers that `field` lists."""
    full = fields.layers(field)
    if not full & {*range(num_layers)}:
        raise fields.error(field, "must list at least one layer")
    return [FULL if layer in full else other for layer in range(num_layers)]


def _mamba_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer, from `layer_types`, or in Bamba from `attn_layer_indices`.

    Published configs have other names for the types.
    """
    if fields.has_default("attn_layer_indices"):
        return _listed(fields, num_layers, "attn_layer_indices", LINEAR)
    return _named(fields, num_layers, _MAMBA)


def _named(fields: Fields, num_layers: int, names: Mapping[str, str]) -> list[str]:
    """Return the type of each layer, which `layer_types` may also have by a name of `names`."""
    given, known = fields.get("layer_types"), {**names, **{it: it for it in names.values()}}
    is_list = isinstance(given, list) and len(given) == num_layers
    if not is_list or not all(isinstance(it, str) and it in known for it in given):
        raise _wrong_types(fields, num_layers, [*names])
    types = [known[it] for it in given]
    if FULL not in types:
        raise fields.error("layer_types", "must have 'attention' for at least one layer")
    return types


def _block_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer, from `layer_types` or `hybrid_override_pattern`."""
    pattern = fields.get("hybrid_override_pattern")
    if fields.get("layer_types") is not None:
        return _named(fields, num_layers, {**_MAMBA, MLP: MLP, MOE: MOE})
    is_text = isinstance(pattern, str) and len(pattern) == num_layers
    if not is_text or {*pattern} - {*_LETTERS} or "*" not in pattern:
        need = f"must be {num_layers} letters of {[*_LETTERS]}, with '*' for at least one layer"
        raise fields.error("hybrid_override_pattern", need)
    return [_LETTERS[it] for it in pattern]


def listed_layers(fields: Fields) -> int | None:
    """Return the number of layers that `layer_types` or `hybrid_override_pattern` lists.

    Only a family with this pattern may leave out the number of its layers.
    """
    if not fields.has_default("hybrid_override_pattern"):
        return None
    lists = (fields.get(it) for it in ("layer_types", "hybrid_override_pattern"))
    return next((len(it) for it in lists if isinstance(it, (list, str))), None)


def _partly_full(fields: Fields, num_layers: int, other: str) -> list[str]:
    """Return the field `layer_types`, which must have full attention for at least one layer."""
    types = _checked(fields, num_layers, [FULL, other])
    if FULL not in types:
        raise fields.error("layer_types", f"must have {FULL!r} for at least one layer")
    return types


_WITH_STATES = {
    "linear": _linear_types,
    "conv": _convolution_types,
    "mamba": _mamba_types,
    "blocks": _block_types,
}


def _is_full(layer: int, each: int) -> bool:
    """Return whether a layer has no window; see `Family.windows`."""
    if each < 0:
        return layer % -each == 0
    return each > 0 and (layer + 1) % each == 0
