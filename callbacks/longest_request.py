"""`longest_request`: how many tokens a request may have in a running manager."""

from __future__ import annotations

import numpy as np

from gptmanager import GptManager, InferenceRequest


def longest_request(manager: GptManager, at_most: int) -> int:
    """Return how many tokens, prompt and output together, a request of `manager` may have.

    The result is from 2 to `at_most`. It may be less than the manager's `max_seq_len` option,
    because a manager lowers its limit to fit into memory.
    """

    def is_taken(length: int) -> bool:
        request = InferenceRequest(0, {"input_ids": np.zeros(length - 1, dtype=np.int32)})
        request.max_new_tokens = np.array([1], dtype=np.int32)
        return manager.would_fit(request).accepted

    low, high = 2, at_most
    if is_taken(high):
        return high
    while low < high:  # the result is in low..high
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_taken(middle) else (low, middle - 1)
    return low
