"""Beam search written down from its definition, over the whole vocabulary."""

from __future__ import annotations

import numpy as np


def search(log_probs_after, width, max_new_tokens, words, len_penalty, early_stopping):
    """`[(tokens, score)]`, best first, the tokens that end a beam included.

    `log_probs_after(text)`: float32 `[vocab]`. A beam whose text ends in one of `words` has ended.
    """

    def score(total, length):
        return np.float32(total) / np.float32(length**len_penalty)

    live, done = [((), np.float32(0))], []
    for length in range(1, max_new_tokens + 1):
        found = []
        for beam, (text, total) in enumerate(live):
            sums = log_probs_after(text) + total
            found += [(-value, beam, token) for token, value in enumerate(sums)]
        found = [(beam, token, -value) for value, beam, token in sorted(found)]
        texts = [((*live[beam][0], token), total) for beam, token, total in found]
        is_last = length == max_new_tokens
        for text, total in texts[:width]:
            if total > -np.inf and (is_last or ends(text, words)):
                done.append((text, score(total, length)))
        done = sorted(done, key=lambda own: -own[1])[:width]
        going_on = (own for own in texts if own[1] > -np.inf and not ends(own[0], words))
        live = [own for own, _ in zip(going_on, range(width), strict=False)]
        if is_last or not live:
            break
        if len(done) == width:
            reached = max_new_tokens if early_stopping > 1 and len_penalty > 0 else length
            if early_stopping == 1 or score(live[0][1], reached) <= done[-1][1]:
                break
    return done


def ends(text, words):
    return any(word and text[-len(word) :] == tuple(word) for word in words)
