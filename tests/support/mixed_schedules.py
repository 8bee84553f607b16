"""Schedules with contexts and generations."""

from __future__ import annotations

from devices import prompt

from gptmanager import (
    InferenceRequest,
)

from_tokens = InferenceRequest.from_tokens


def mixed():
    """Penalties, biases, bans, and all that may be asked for, in one batch."""
    return [
        from_tokens(1, prompt(1, 20), 9),
        from_tokens(2, prompt(2, 33), 9, repetition_penalty=1.4, frequency_penalty=0.3),
        from_tokens(3, prompt(3, 8), 9, temperature=0.7, random_seed=3, return_log_probs=True),
        from_tokens(4, prompt(4, 25), 9, bad_words_list=[[5], [6, 7]], embedding_bias=None),
        from_tokens(5, prompt(5, 17), 9, return_generation_logits=True),
        from_tokens(7, [5, 6] * 9, 12, no_repeat_ngram_size=3, presence_penalty=0.5),
        from_tokens(6, prompt(6, 17), 9, return_context_logits=True, min_length=4, end_id=3),
    ]
