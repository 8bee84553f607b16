"""Random texts of a grammar: a walk over the tokens that its masks permit, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

_CLOSING = (b'"', b"}", b"]")


def random_text(matcher: Any, tokenizer: Any, chance: random.Random, most: int = 600) -> str | None:
    """A text of the grammar, None if it has not ended after `most` tokens.

    `tokenizer`: llguidance's. The longer the text is, the more often a token that closes something
    is taken.
    """
    matcher, taken, ends = matcher.deep_copy(), [], frozenset(tokenizer.eos_tokens)
    for step in range(most):
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        assert allowed and not matcher.is_error(), matcher.get_error()
        if ends.intersection(allowed):
            return str(tokenizer.decode_bytes(taken).decode())
        closing = [token for token in allowed if tokenizer.decode_bytes([token]) in _CLOSING]
        if closing and chance.random() < step / 200 + 0.1:
            taken.append(chance.choice(closing))
        else:
            taken.append(chance.choice(allowed))
        assert matcher.consume_token(taken[-1])
    return None


def without(schema: Any, pointers: Iterable[str]) -> Any:
    """A schema without the keywords that pointers lead to, as `unenforced` lists them."""
    for pointer in pointers:
        *path, last = [
            step.replace("~1", "/").replace("~0", "~")
            for step in pointer.partition("#/")[2].split("/")
        ]
        part = schema
        for step in path:
            part = part[int(step)] if isinstance(part, list) else part[step]
        del part[last]
    return schema
