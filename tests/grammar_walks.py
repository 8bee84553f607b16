"""Random texts of a grammar: a walk over the tokens that its masks permit, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

_CLOSING = frozenset('"}]')


def random_text(
    matcher: Any, tokens: list[str], end_ids: Iterable[int], chance: random.Random, most: int = 600
) -> str | None:
    """A text of the grammar, None if it has not ended after `most` tokens.

    The longer it is, the more often a token that closes something is taken.
    """
    matcher, text, ends = matcher.deep_copy(), "", frozenset(end_ids)
    for step in range(most):
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        assert allowed and not matcher.is_error(), matcher.get_error()
        if ends.intersection(allowed):
            return text
        closing = [token for token in allowed if _CLOSING & set(tokens[token])]
        shortest = min(closing, key=lambda token: len(tokens[token]), default=None)
        if shortest is not None and chance.random() < step / 200 + 0.1:
            token = shortest
        else:
            token = chance.choice(allowed)
        assert matcher.consume_token(token)
        text += tokens[token]
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
