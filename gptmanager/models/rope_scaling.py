"""RoPE: `read_rope` reads its parameters from a config; `rope_table` computes cosines and sines.

This module defines which scalings exist and what they compute, not how a table is applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, error_summary, quoted
from gptmanager.models.fields import RANGE, Fields, is_positive

_COMMON = frozenset(
    "rope_type type rope_theta original_max_position_embeddings partial_rotary_factor "
    "finetuned max_position_embeddings llama_4_scaling_beta mrope_section mrope_interleaved".split()
)
_LAYER_TYPES = ("full_attention", "sliding_attention")
_KINDS: Mapping[str, frozenset[str]] = {
    "default": _COMMON,
    "linear": _COMMON | {"factor"},
    "dynamic": _COMMON | {"factor"},
    "proportional": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _COMMON.union(
        "factor attention_factor beta_fast beta_slow truncate mscale mscale_all_dim".split()
    ),
    "longrope": _COMMON | {"factor", "attention_factor", "short_factor", "long_factor"},
}
_OF_PHIMOE = ("short_mscale", "long_mscale")  # attention factors of longrope
_FROM_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
# "su" is what the first configs of Phi 3 call longrope, "deepseek_yarn" what Sarvam calls yarn
_OTHER_NAMES = {"deepseek_yarn": "yarn", "mrope": "default", "su": "longrope"}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings (RoPE): the first `dim` dimensions of a head rotate, in pairs.

    `kind`: "default", or the kind of scaling: "linear", "llama3", "yarn", "longrope" or
    "proportional". `theta`: the base of the frequencies. `divisors`: for longrope, the divisors of
    the `dim / 2` frequencies. `share`: for proportional, the share of the pairs that rotate, from
    the first pair on. Cosines and sines are multiplied by `attention_factor`. `interleaved`: in the
    checkpoint's query and key matrices, the two rows of a pair are next to each other; loading
    reorders the rows. `backward`: pairs rotate by the negative angles. Other fields are parameters
    of the scalings, as in transformers.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    dim: int = 0
    interleaved: bool = False
    backward: bool = False
    share: float = 1.0


def read_rope(
    fields: Fields,
    head_dim: int,
    max_seq_len: int,
    *,
    layer_type: str = "full_attention",
    interleaved: bool = False,
    backward: bool = False,
) -> Rope:
    """Return the RoPE of the layers of one type, as a config describes it.

    The config has `rope_parameters`, possibly with an object per layer type, or `rope_scaling` and
    `rope_theta`. If `max_seq_len` exceeds longrope's original length, its long factors are used for
    all sequences, otherwise its short ones. Raise ConfigError for a value that is not supported.
    """
    values, label, theta = _rope_values(fields, layer_type)
    max_positions = fields.size("max_position_embeddings")
    rope = Fields(
        values,
        {
            "rope_type": values.get("type") or "default",
            "rope_theta": theta,
            "original_max_position_embeddings": max_positions,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        {} if "rope_type" in values else {"rope_type": "type"},
        f"config.json: {label}.",
    )
    kind = rope.get("rope_type")
    kind = _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "dynamic" and fields.has_default("rope_alpha"):
        return _with_alpha(rope, head_dim)
    if kind not in [*_KINDS]:
        raise rope.error("rope_type", f"must be one of {[*_KINDS]}")
    mscales = _OF_PHIMOE if kind == "longrope" and fields.has_default(_OF_PHIMOE[0]) else ()
    for field, value in values.items():
        if value is not None and field not in _KINDS[kind].union(mscales):
            raise rope.error(field, f"not supported with the rope type {kind!r}")
    share = _rotated_share(fields, rope, kind, head_dim)
    is_partial = kind == "proportional"
    dim = head_dim if is_partial else _rotated_dim(fields, head_dim, share)
    scaled = _scale_rope(rope, kind, dim, max_positions, max_seq_len)
    if mscales:
        is_long = max_seq_len > scaled.original_max_positions
        scaled = replace(scaled, attention_factor=rope.number(mscales[is_long]))
    share = share if is_partial else 1.0
    return replace(scaled, dim=dim, interleaved=interleaved, backward=backward, share=share)


def with_original_length(fields: Fields, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the RoPE parameters `values` with the original length that `fields` have, if any.

    This length has precedence in the scalings that use one, as in transformers.
    """
    original = fields.get("original_max_position_embeddings")
    kind = values.get("rope_type", values.get("type"))
    if original is None or kind not in _FROM_ORIGINAL_LENGTH:
        return values
    return {**values, "original_max_position_embeddings": original}


def _with_alpha(rope: Fields, head_dim: int) -> Rope:
    """Return HunYuan's RoPE: for all sequence lengths, a power of `alpha` multiplies the base."""
    if head_dim < 4:
        raise rope.error("alpha", "needs heads of more than 2 dimensions")
    theta = rope.number("rope_theta") * rope.number("alpha") ** (head_dim / (head_dim - 2))
    if theta <= 1 or not is_positive(theta):
        raise rope.error("alpha", f"leads to the base {theta:g}; it must be above 1, and {RANGE}")
    return Rope(theta=theta, dim=head_dim)


def _rope_values(fields: Fields, layer_type: str) -> tuple[Mapping[str, Any], str, Any]:
    """Return the object with a layer type's RoPE, the name of the object in errors, and theta.

    Theta is None if only the object has it.
    """
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    if scaling and not fields.is_given("rope_parameters"):
        parameters = None
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, Mapping):
            raise fields.error(name, "must be an object")
    theta, local = _base_or_none(fields, "rope_theta"), None
    if fields.has_default("rope_local_base_freq"):
        local = _base_or_none(fields, "rope_local_base_freq")
    if scaling and parameters and not _contains({"rope_theta": theta, **scaling}, parameters):
        raise fields.error("rope_scaling", f"contradicts rope_parameters = {quoted(parameters)}")
    values, label = scaling or parameters or {}, "rope_scaling" if scaling else "rope_parameters"
    values = with_original_length(fields, values)
    if layer_type in values and set(values) <= {*_LAYER_TYPES} and fields.layer_types:
        label, values = f"{label}.{layer_type}", values[layer_type]
        if not isinstance(values, Mapping):
            raise ConfigError(f"config.json: {label} = {quoted(values)}: must be an object")
    elif layer_type == "sliding_attention" and local is not None:
        values = {}  # the scaling does not apply to layers with a sliding window
    if layer_type == "sliding_attention" and local is not None:
        theta = local
    if theta is None and "rope_theta" not in values:
        raise fields.error("rope_theta", "must be a number above 1")
    return values, label, theta


def _contains(scaling: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Return whether `scaling`, which transformers prefers, has all values of `parameters`."""
    whole, part = ({"rope_type": it.get("type", "default"), **it} for it in (scaling, parameters))
    return whole | part | {"type": None} == whole | {"type": None}


def _base_or_none(fields: Fields, field: str) -> float | None:
    return None if fields.get(field) is None else _base(fields, field)


def _base(fields: Fields, field: str) -> float:
    theta = fields.number(field)
    if theta <= 1:
        raise fields.error(field, "must be more than 1")
    return theta


def _rotated_share(fields: Fields, rope: Fields, kind: str, head_dim: int) -> float:
    """Return the share of `head_dim` dimensions that rotate.

    In Mistral 4 all of them do. Its field is their share of all dimensions of a key.
    """
    is_known, of_config = fields.has_default("partial_rotary_factor"), 1.0
    if is_known and fields.has_default("qk_nope_head_dim"):
        of_key = head_dim / (head_dim + fields.size("qk_nope_head_dim"))
        if rope.number("partial_rotary_factor", of_key) != of_key:
            raise rope.error("partial_rotary_factor", f"must be {of_key}")
        return 1.0
    if is_known:
        of_config = fields.number("partial_rotary_factor", limit=1.0)
    given = rope.number("partial_rotary_factor", of_config, limit=1.0)
    if given != 1 and not is_known and kind != "proportional":
        raise rope.error("partial_rotary_factor", "not supported in this family")
    return given


def _rotated_dim(fields: Fields, head_dim: int, given: float) -> int:
    """Return `Rope.dim` for `given`, a share of the dimensions of a head.

    For "proportional" it is `head_dim` instead: `Rope.share` limits the pairs.
    """
    name, dim = "head_dim", int(head_dim * given)
    if fields.has_default("rotary_dim") and fields.get("rotary_dim") is not None:
        name, dim = "rotary_dim", fields.size("rotary_dim")
    if dim % 2 or not 0 < dim <= head_dim:
        share = "" if name == "rotary_dim" else f" (partial_rotary_factor {given})"
        need = (
            f"{dim} of {head_dim} dimensions would rotate{share}; the number must be "
            f"even, and from 2 to {head_dim}"
        )
        raise fields.error(name, need)
    return dim


def rope_table(rope: Rope, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 `[num_positions, dim]`: the cosines of dim / 2 angles, then the sines.

    Raise ConfigError if the values overflow float32.
    """
    frequencies, half = _finite_frequencies(rope, rope.dim, num_positions), rope.dim // 2
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    table = torch.empty(num_positions, rope.dim, dtype=torch.float32)
    torch.cos(angles, out=table[:, :half])
    torch.sin(-angles if rope.backward else angles, out=table[:, half:])
    return table.mul_(rope.attention_factor).to(device)


def _scale_rope(
    rope: Fields, kind: str, head_dim: int, max_positions: int, max_seq_len: int
) -> Rope:
    plain = Rope(kind, theta=_base(rope, "rope_theta"))
    if kind == "default":
        return plain
    if kind == "dynamic":
        return _unstretched(rope, head_dim, max_positions, max_seq_len)
    if kind == "proportional":
        return replace(plain, factor=rope.number("factor", 1.0))
    original = rope.size("original_max_position_embeddings")
    if original == 1:
        raise rope.error("original_max_position_embeddings", "must be more than 1")
    implied = max_positions / original if kind in ("yarn", "longrope") else None
    plain = replace(plain, factor=rope.number("factor", implied), original_max_positions=original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high < low:  # in Llama 4 they are equal
            raise rope.error("high_freq_factor", f"must be at least low_freq_factor {low}")
        return replace(plain, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
        if fast < slow:
            raise rope.error("beta_slow", f"must be at most {rope.as_given('beta_fast')}")
        return replace(
            plain,
            beta_fast=fast,
            beta_slow=slow,
            truncate=rope.flag("truncate", if_null=True),
            attention_factor=rope.number("attention_factor", _yarn_attention(rope, plain.factor)),
        )
    if kind == "longrope":
        stretch = math.log(plain.factor) / math.log(original) if plain.factor > 1 else 0.0
        return replace(
            plain,
            divisors=_read_divisors(rope, head_dim, is_long=max_seq_len > original),
            attention_factor=rope.number("attention_factor", math.sqrt(1 + stretch)),
        )
    return plain


def _unstretched(rope: Fields, dim: int, max_positions: int, max_seq_len: int) -> Rope:
    """Return the RoPE that dynamic RoPE has for each sequence of at most `max_positions` tokens.

    It is the default one, up to the rounding of the formula. For a longer sequence the base would
    grow with each token, and cached keys would not fit later queries.
    """
    if max_seq_len > max_positions:
        raise rope.error(
            "rope_type",
            f"max_seq_len = {max_seq_len} must be at most max_position_embeddings {max_positions}, "
            "because the frequencies of longer sequences change with each token",
        )
    if dim < 4:
        raise rope.error("rope_type", "needs heads of which more than 2 dimensions rotate")
    factor = rope.number("factor")
    stretch = factor * max_positions / max_positions - (factor - 1)
    theta = _base(rope, "rope_theta") * max(stretch, 0.0) ** (dim / (dim - 2))
    if theta <= 1 or not is_positive(theta):
        raise rope.error("factor", f"leads to the base {theta:g}; it must be above 1, and {RANGE}")
    return Rope(theta=theta)


def _yarn_attention(rope: Fields, factor: float) -> float:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale, of_all = rope.number_or_zero("mscale"), rope.number_or_zero("mscale_all_dim")
    if not (scale and of_all):
        return temperature(1.0)
    found = temperature(scale) / temperature(of_all)
    if not is_positive(found):
        raise rope.error("mscale", f"leads to the factor {found:g}; it must be {RANGE}")
    return found


def _read_divisors(rope: Fields, head_dim: int, *, is_long: bool) -> tuple[float, ...]:
    for field in ("short_factor", "long_factor"):
        values = rope.get(field)
        if not isinstance(values, list) or len(values) != head_dim // 2:
            raise rope.error(field, f"must be a list of {head_dim // 2} numbers")
        if not all(map(is_positive, values)):
            raise rope.error(field, f"must be positive numbers {RANGE}")
    return tuple(float(value) for value in rope.get("long_factor" if is_long else "short_factor"))


def _finite_frequencies(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    try:
        frequencies = _inverse_frequencies(rope, head_dim)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(
            f"config.json: {quoted(rope)} has no frequencies: {error_summary(error)}"
        ) from error
    if not (frequencies * max(rope.attention_factor, num_positions)).isfinite().all():
        raise ConfigError(f"config.json: the frequencies of {quoted(rope)} overflow float32")
    return frequencies


def _inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position, float32 `[head_dim / 2]`.

    The order of operations is that of transformers, because at position 100,000 the last bit of a
    frequency changes the angle by 0.01 radians.
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    frequencies = 1.0 / powers
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        frequencies[int(rope.share * head_dim // 2) :] = 0
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, powers)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * powers)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high frequencies, and interpolate between them."""
    length = rope.original_max_positions
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wave_lengths = 2 * math.pi / frequencies
    stretched = torch.where(wave_lengths > length / low, frequencies / rope.factor, frequencies)
    if high == low:
        return stretched
    share = (length / wave_lengths - low) / (high - low)
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    is_between = (wave_lengths >= length / high) & (wave_lengths <= length / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: Rope, head_dim: int, powers: Tensor) -> Tensor:
    """Keep high frequencies, divide low frequencies by `factor`, and interpolate between them.

    A frequency is high if it makes at least `beta_fast` rotations within the original length, and
    low if it makes at most `beta_slow`. This is the method of YaRN (arXiv:2309.00071).
    """

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
