"""Words that a text never contains, in whatever tokens it comes.

A token is banned if it completes a word: one that begins in the text before it, or in the token.
Which tokens do so depends on one thing alone, the *state*: the longest end of the text that is a
proper beginning of a word. (These are the states of Aho and Corasick, "Efficient string matching",
1975.) So the tokens of a state are looked up once, and kept.
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
_TAIL = 4  # bytes by which the beginnings of words are looked up
_MAX_ROOM = 1 << 27  # bytes of the beginnings of words in all lists
_MAX_KEPT = 1 << 19  # token ids that the states of a list of words may keep: 4 MiB
# Of the words of one list. What is kept of a word grows with the square of its length.
MAX_WORDS, MAX_WORD_LETTERS, MAX_LETTERS = 1024, 256, 8192


class BannedTexts:
    """Words that outputs never contain, for one tokenizer; `bind` gives a request's processor.

    `tokenizer`: a `tokenizers.Tokenizer` whose decoder `token_bytes` knows. The end of the prompt
    counts as text: after "a red ba" the word "ball" is not completed. Special tokens are no text.
    A list has at most 1,024 words of at most 256 letters, and 8,192 letters in all.
    The last `max_word_lists` lists are kept for other requests, fewer if they are long.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_word_lists: int = 64) -> None:
        self._tokenizer = tokenizer
        self._max_word_lists = max_word_lists
        self._kept: OrderedDict[tuple[str, ...], BannedWords] = OrderedDict()
        self._vocabulary: _Vocabulary | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gptmanager-banned-texts")

    def bind(self, words: Sequence[str]) -> BannedWords:
        """Return the processor that bans `words`, which requests with the same words share.

        ValueError for no words, an empty one, or more than a list may have; TypeError for a text
        instead of a list.
        """
        _check(words)
        key = tuple(sorted(set(words)))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._started(key)
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_word_lists or (
                len(self._kept) > 1 and sum(it.room for it in self._kept.values()) > _MAX_ROOM
            ):
                self._kept.popitem(last=False)
            return self._kept[key]

    def _started(self, words: tuple[str, ...]) -> BannedWords:
        looking_up = self._threads.submit(self._look_up, words)
        found = BannedWords(words, looking_up)
        # a list that nobody waits for any more must not hold up those behind it
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
    """Raise what `bind` raises; the number of words is checked before any is read."""
    if isinstance(words, str):
        shown = words if len(words) <= MAX_WORD_LETTERS else f"{words[:MAX_WORD_LETTERS]}..."
        raise TypeError(f"words = {shown!r} is one text, expected several")
    if len(words) > MAX_WORDS:
        raise ValueError(f"words: {len(words)} are given, at most {MAX_WORDS} are allowed")
    if not words or not all(words):
        raise ValueError("words: one or more are needed, and each needs a letter")
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


def _room(words: Sequence[str]) -> int:
    """Return about how many bytes the beginnings of words take."""
    sizes = [len(word.encode(errors="replace")) for word in words]
    return sum(size * (size + 500) for size in sizes)


class BannedWords:
    """The logits post-processor of a request; requests with the same words share it.

    `room`: about how many bytes it takes.
    """

    def __init__(self, words: tuple[str, ...], states: Future[_States]) -> None:
        self.words = words
        self.room = _room(words)
        self._states = states

    def prepare(self, device: str) -> Future[Any]:
        return self._states

    def banned_after(self, history: Sequence[int]) -> Ints:
        """The ids of the tokens that would complete a word, int64; after `prepare`."""
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
    """The tokens with text, in the order of their bytes; `of_id`: the bytes of each token."""

    def __init__(self, of_id: Sequence[bytes]) -> None:
        self.of_id = of_id
        ids = sorted((token for token, text in enumerate(of_id) if text), key=of_id.__getitem__)
        self._ids = np.array(ids, dtype=np.int64)
        self._texts = [of_id[token] for token in ids]
        self._joined = b"".join(self._texts)
        self._starts = np.cumsum([0, *map(len, self._texts)])

    def beginning_with(self, text: bytes) -> Ints:
        """Their ids; they stand side by side."""
        first = bisect_left(self._texts, text)
        behind = bisect_left(self._texts, True, first, key=lambda one: not one.startswith(text))
        return self._ids[first:behind]

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
    """The tokens that some words ban, by the state of the text."""

    def __init__(self, words: Sequence[bytes], vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._begun: dict[bytes, list[bytes]] = {}  # proper beginning -> what completes a word
        for word in words:
            for length in range(1, len(word)):
                self._begun.setdefault(word[:length], []).append(word[length:])
        self._longest = max(map(len, self._begun), default=0)
        # the lengths of the beginnings that end with these bytes, so that few of them are tried
        self._lengths: dict[bytes, list[int]] = {}
        for beginning in sorted(self._begun, key=len, reverse=True):
            self._lengths.setdefault(beginning[-_TAIL:], []).append(len(beginning))
        found = [vocabulary.containing(word) for word in words]
        self._anywhere = np.unique(np.concatenate(found))
        self._kept: dict[tuple[bytes, int, torch.device], Tensor] = {}
        self._num_kept = 0

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
                if number <= length and end[length - number :] in self._begun:
                    return end[length - number :]
        return b""

    def banned(self, state: bytes, vocab_size: int, device: torch.device) -> Tensor:
        """The ids of the tokens that complete a word in `state`, int64, below `vocab_size`."""
        key = state, vocab_size, device
        ids = self._kept.get(key)
        if ids is None:
            found = self._look_up(state)
            ids = torch.from_numpy(found[found < vocab_size]).to(device)
            if self._num_kept + len(ids) > _MAX_KEPT:
                self._kept, self._num_kept = {}, 0
            self._kept[key] = ids
            self._num_kept += len(ids)
        return ids

    def _look_up(self, state: bytes) -> Ints:
        ends = (state[start:] for start in range(len(state)))
        rests = {rest for end in ends for rest in self._begun.get(end, ())}
        found = [self._anywhere, *map(self._vocabulary.beginning_with, rests)]
        return np.unique(np.concatenate(found))
