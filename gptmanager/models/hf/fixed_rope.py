"""Sets longrope and dynamic RoPE frequencies of a transformers network once.

transformers chooses them in each forward pass, by the longest sequence in the batch. Requests would
then change each other's tokens, and cached keys would not fit later queries.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

_CHANGING = ("longrope", "dynamic")


def fix_rotations(network: nn.Module, max_seq_len: int) -> list[str]:
    """Fix the frequencies that depend on the length: use the values for `max_seq_len` tokens.

    Returns the RoPE types that were fixed: one for each module or, if the RoPE types of a module
    differ by layer type, one for each fixed layer type.
    """
    utilities = importlib.import_module("transformers.modeling_rope_utils")
    found = []
    for module in network.modules():
        own: Any = module
        kinds = getattr(own, "rope_type", None)
        if isinstance(kinds, str) and _changes(kinds):
            init = utilities.ROPE_INIT_FUNCTIONS[kinds]
            frequencies, own.attention_scaling = init(own.config, None, seq_len=max_seq_len)
            own.register_buffer("inv_freq", frequencies, persistent=False)
            own.rope_type = "default"  # so the forward pass keeps these frequencies
            found.append(kinds)
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _changes(kind):
                    init = utilities.ROPE_INIT_FUNCTIONS[kind]
                    options = {"seq_len": max_seq_len, "layer_type": layer_type}
                    frequencies, scaling = init(own.config, None, **options)
                    own.register_buffer(f"{layer_type}_inv_freq", frequencies, persistent=False)
                    setattr(own, f"{layer_type}_attention_scaling", scaling)
                    found.append(kind)
            own.rope_type = {name: "default" if _changes(it) else it for name, it in kinds.items()}
    return found


def _changes(kind: str) -> bool:
    return any(name in kind for name in _CHANGING)
