"""Bans words from a text, for any split of the text into tokens.

A token is banned if it completes a word that begins in the token or in the text before it. These
tokens depend only on the *state*: the longest suffix of the text that is a proper prefix of a word.
(These are the states of Aho and Corasick, "Efficient string matching", 1975.) So the tokens of a
state are looked up once and cached.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptmanager.callbacks.processors.token_bytes import token_bytes
from gptmanager.errors import InvalidRequestError

Ints = npt.NDArray[np.int64]

_CPU = torch.device("cpu")
_TAIL = 4  # last bytes by which the prefixes of words are looked up
_MAX_SIZE = 1 << 27  # bytes of the prefixes of words in all lists
_MAX_CACHED = 1 << 19  # token ids that the states of a list of words may cache: 4 MiB
# Limits of one list. The memory for a word grows with the square of its length.
MAX_WORDS, MAX_WORD_LETTERS, MAX_LETTERS = 1024, 256, 8192


class BannedTexts:
    """Bans words from outputs, for one tokenizer; `bind` returns the processor of a request.

    `tokenizer`: a `tokenizers.Tokenizer` with a decoder that `token_bytes` supports. The end of the
    prompt counts as text: after "a red ba" the word "ball" is not completed. Special tokens do not
    count as text. A list has at most 1,024 words of at most 256 letters, and 8,192 letters in all.
    The last `max_word_lists` lists are cached for other requests, fewer if they are long.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_word_lists: int = 64) -> None:
        self._tokenizer = tokenizer
        self._max_word_lists = max_word_lists
        self._kept: OrderedDict[tuple[str, ...], BannedWords] = OrderedDict()
        self._vocabulary: _Vocabulary | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gptmanager-banned-texts")

    def bind(self, words: Sequence[str]) -> BannedWords:
        """Return the processor that bans `words`; requests with the same words share it.

        Raise ValueError for an empty list, an empty word, or a list beyond the limits, and
        TypeError for a string instead of a list.
        """
        _check(words)
        key = tuple(sorted(set(words)))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._started(key)
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_word_lists or (
                len(self._kept) > 1 and sum(it.size for it in self._kept.values()) > _MAX_SIZE
            ):
                self._kept.popitem(last=False)
            return self._kept[key]

    def _started(self, words: tuple[str, ...]) -> BannedWords:
        looking_up = self._threads.submit(self._look_up, words)
        found = BannedWords(words, looking_up)
        # a list that no request uses any more must not delay the lists after it
        weakref.finalize(found, looking_up.cancel).atexit = False
        return found

    def _look_up(self, words: tuple[str, ...]) -> _States:
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(token_bytes(self._tokenizer))
        try:
            encoded = [word.encode() for word in words]
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"bad words: {error}") from None
        return _States(encoded, self._vocabulary)


def _check(words: Sequence[str]) -> None:
    """Raise the errors of `bind`; the number of words is checked before any word is read."""
    if isinstance(words, str):
        shown = words if len(words) <= MAX_WORD_LETTERS else f"{words[:MAX_WORD_LETTERS]}..."
        raise TypeError(f"words = {shown!r} must be a list of strings")
    if len(words) > MAX_WORDS:
        raise ValueError(f"words: {len(words)} are given, at most {MAX_WORDS} are allowed")
    if not words or not all(words):
        raise ValueError("words must have at least one word, and no empty word")
    for index, word in enumerate(words):
        if len(word) > MAX_WORD_LETTERS:
            raise ValueError(
                f"words[{index}] has {len(word)} letters, at most {MAX_WORD_LETTERS} are allowed"
            )
    num_letters = sum(map(len, words))
    if num_letters > MAX_LETTERS:
        raise ValueError(
            f"words: {num_letters} letters are given, at most {MAX_LETTERS} are allowed in all"
        )


def _size(words: Sequence[str]) -> int:
    """Return the approximate number of bytes that the prefixes of words take."""
    sizes = [len(word.encode(errors="replace")) for word in words]
    return sum(size * (size + 500) for size in sizes)


class BannedWords:
    """The logits post-processor of a request; requests with the same words share it.

    `size`: the approximate number of bytes that it takes.
    """

    def __init__(self, words: tuple[str, ...], states: Future[_States]) -> None:
        self.words = words
        self.size = _size(words)
        self._states = states

    def prepare(self, device: str) -> Future[Any]:
        return self._states

    def banned_after(self, history: Sequence[int]) -> Ints:
        """Return the ids of the tokens that would complete a word, int64. Call after `prepare`."""
        states = self._states.result()
        found: Ints = states.banned(states.state(history), sys.maxsize, _CPU).numpy()
        return found

    def __call__(
        self, request_id: int, logits: Tensor, tokens: Sequence[Sequence[int]], *ignored: Any
    ) -> None:
        states = self._states.result()
        for beam, history in enumerate(tokens):
            banned = states.banned(states.state(history), logits.shape[2], logits.device)
            if len(banned):
                logits[0, beam].index_fill_(0, banned, -math.inf)


class _Vocabulary:
    """The tokens with text, sorted by their bytes. `of_id`: the bytes of each token."""

    def __init__(self, of_id: Sequence[bytes]) -> None:
        self.of_id = of_id
        ids = sorted((token for token, text in enumerate(of_id) if text), key=of_id.__getitem__)
        self._ids = np.array(ids, dtype=np.int64)
        self._texts = [of_id[token] for token in ids]
        self._joined = b"".join(self._texts)
        self._starts = np.cumsum([0, *map(len, self._texts)])

    def beginning_with(self, text: bytes) -> Ints:
        """Return the ids of the tokens that begin with `text`, which are adjacent in the order."""
        first = bisect_left(self._texts, text)
        end = bisect_left(self._texts, True, first, key=lambda one: not one.startswith(text))
        return self._ids[first:end]

    def containing(self, text: bytes) -> Ints:
        indices, at = [], self._joined.find(text)
        while at >= 0:
            index = int(np.searchsorted(self._starts, at, side="right")) - 1
            end = int(self._starts[index + 1])
            if at + len(text) <= end:
                indices.append(index)
                at = end - 1  # where the next token begins
            at = self._joined.find(text, at + 1)
        return self._ids[indices]


class _States:
    """The tokens that a list of words bans, by the state of the text."""

    def __init__(self, words: Sequence[bytes], vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rests: dict[bytes, list[bytes]] = {}  # proper prefix -> the rests of its words
        for word in words:
            for length in range(1, len(word)):
                self._rests.setdefault(word[:length], []).append(word[length:])
        self._longest = max(map(len, self._rests), default=0)
        # last bytes -> the lengths of the prefixes that end with them, so that few are tried
        self._lengths: dict[bytes, list[int]] = {}
        for prefix in sorted(self._rests, key=len, reverse=True):
            self._lengths.setdefault(prefix[-_TAIL:], []).append(len(prefix))
        found = [vocabulary.containing(word) for word in words]
        self._always_banned = np.unique(np.concatenate(found))  # they contain a whole word
        self._cache: dict[tuple[bytes, int, torch.device], Tensor] = {}
        self._num_cached = 0

    def state(self, history: Sequence[int]) -> bytes:
        """Return the state of a text in tokens; ids beyond the vocabulary have no bytes."""
        of_id, length, longest = self._vocabulary.of_id, 0, self._longest
        pieces: list[bytes] = []  # the last one first
        for token in reversed(history):
            if length >= longest:
                break
            if 0 <= token < len(of_id):
                pieces.append(of_id[token])
                length += len(of_id[token])
        end = b"".join(reversed(pieces))
        for size in range(min(_TAIL, length), 0, -1):
            for number in self._lengths.get(end[-size:], ()):
                if number <= length and end[length - number :] in self._rests:
                    return end[length - number :]
        return b""

    def banned(self, state: bytes, vocab_size: int, device: torch.device) -> Tensor:
        """Return the ids below `vocab_size` that complete a word in `state`, int64."""
        key = state, vocab_size, device
        ids = self._cache.get(key)
        if ids is None:
            found = self._look_up(state)
            ids = torch.from_numpy(found[found < vocab_size]).to(device)
            if self._num_cached + len(ids) > _MAX_CACHED:
                self._cache, self._num_cached = {}, 0
            self._cache[key] = ids
            self._num_cached += len(ids)
        return ids

    def _look_up(self, state: bytes) -> Ints:
        ends = (state[start:] for start in range(len(state)))
        rests = {rest for end in ends for rest in self._rests.get(end, ())}
        found = [self._always_banned, *map(self._vocabulary.beginning_with, rests)]
        return np.unique(np.concatenate(found))
