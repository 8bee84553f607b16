"""`BannedTexts`: bans words from outputs, for any split of the text into tokens.

A token is banned if it completes a word that begins in the token or in the text before the token.
The *state* of a text is the longest suffix of the text that is a proper prefix of a word, as in Aho
and Corasick, "Efficient string matching" (1975). Which tokens are banned depends only on the state
of the text so far, so the banned tokens of each state are cached.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import threading
import weakref
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptmanager.arguments import able, at_least
from gptmanager.callbacks.processors.token_bytes import token_bytes
from gptmanager.errors import CapacityError, InvalidRequestError
from gptmanager.lifecycle.per_process import PerProcess

Ints = npt.NDArray[np.int64]

_CPU = torch.device("cpu")
_MAX_SIZE = 1 << 28  # bytes of all lists of words in memory, used or cached
_MAX_CACHED = 1 << 23  # banned token ids that all lists together may cache: 64 MiB
_STATE_SIZE = 200  # bytes of a state, at most; a word adds at most one state per byte
MAX_WORDS, MAX_WORD_LETTERS, MAX_LETTERS = 1024, 256, 8192  # limits of one list


_Bind = Callable[[Sequence[str]], "BannedWords"]


class BannedTexts:
    """Bans words from outputs, for one tokenizer; `bind` returns the processor of a request.

    `tokenizer` must have a decoder that `token_bytes` supports. A word may begin in the prompt: if
    the prompt ends with "a red ba", the output cannot complete the word "ball". Special tokens do
    not count as text.

    A list has at most 1,024 words of at most 256 letters each, and at most 8,192 letters in all. A
    letter is any character. The `max_word_lists` lists that were bound last are cached for other
    requests. All lists in memory take at most 256 MiB together: if a new list would exceed this
    limit, the oldest cached lists are dropped. A list of 8,192 letters takes up to 7 MiB.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_word_lists: int = 64) -> None:
        at_least(0, "max_word_lists", max_word_lists)
        able("tokenizer", tokenizer, "get_vocab", "tokenizer")
        self._lists = PerProcess(lambda: _Lists(tokenizer, max_word_lists))
        # weak: otherwise cached lists would keep this object and its thread alive
        self._bind_again = functools.partial(_bind, weakref.ref(self), tokenizer)

    def bind(self, words: Sequence[str]) -> BannedWords:
        """Return the processor that bans `words`; requests with the same words share it.

        Raise ValueError for an empty list, an empty word, or a list beyond the limits; TypeError
        for a string instead of a list; CapacityError if the lists that requests use leave no space.
        """
        _check(words)
        return self._lists.get().bind(tuple(sorted(set(words))), self._bind_again)


def _bind(
    texts: weakref.ref[BannedTexts], tokenizer: Tokenizer, words: Sequence[str]
) -> BannedWords:
    return (texts() or BannedTexts(tokenizer)).bind(words)


class _Lists:
    """The lists of one process."""

    def __init__(self, tokenizer: Tokenizer, max_word_lists: int) -> None:
        self._tokenizer = tokenizer
        self._max_word_lists = max_word_lists
        self._kept: OrderedDict[tuple[str, ...], BannedWords] = OrderedDict()
        self._used = _Used()
        self._ids = _IdCache()
        self._vocabulary: _Vocabulary | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gptmanager-banned-texts")

    def bind(self, words: tuple[str, ...], bind: _Bind) -> BannedWords:
        """Return the processor of `words`, which calls `bind` in a forked process."""
        with self._lock:
            found = self._kept.get(words) or self._started(words, bind)
            self._kept[words] = found
            self._kept.move_to_end(words)
            if len(self._kept) > self._max_word_lists:
                self._kept.popitem(last=False)
            return found

    def _started(self, words: tuple[str, ...], bind: _Bind) -> BannedWords:
        size = _size(words)
        while self._kept and self._used.size + size > _MAX_SIZE:
            self._kept.popitem(last=False)
        if self._used.size + size > _MAX_SIZE:
            raise CapacityError(
                f"the words that all requests ban would take {self._used.size + size} bytes, at "
                f"most {_MAX_SIZE} are allowed: try again when a request has ended"
            )
        looking_up = self._threads.submit(self._look_up, words)
        found = BannedWords(words, looking_up, bind)
        self._used.add(size)
        weakref.finalize(found, _release, looking_up, self._used, size).atexit = False
        return found

    def _look_up(self, words: tuple[str, ...]) -> _States:
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(token_bytes(self._tokenizer))
        try:
            encoded = [word.encode() for word in words]
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"bad words: {error}") from None
        return _States(encoded, self._vocabulary, self._ids)


def _check(words: Sequence[str]) -> None:
    """Raise `bind`'s ValueError or TypeError; check the number of words before reading a word."""
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
                f"words[{index}] has {len(word)} characters, at most {MAX_WORD_LETTERS} are allowed"
            )
    num_letters = sum(map(len, words))
    if num_letters > MAX_LETTERS:
        raise ValueError(
            f"words: {num_letters} characters are given, at most {MAX_LETTERS} are allowed in all"
        )


class _Used:
    """The number of bytes that all lists in memory take, both used and cached lists."""

    def __init__(self) -> None:
        self.size = 0
        # reentrant, because the garbage collector may free a list while the lock is held
        self._lock = threading.RLock()

    def add(self, size: int) -> None:
        with self._lock:
            self.size += size


def _release(looking_up: Future[_States], used: _Used, size: int) -> None:
    """Count the bytes of a freed list as free, and cancel its look-up if it is still queued."""
    looking_up.cancel()
    used.add(-size)


def _size(words: Sequence[str]) -> int:
    """Return an upper bound of the number of bytes that a list takes."""
    return _STATE_SIZE * sum(len(word.encode(errors="replace")) for word in words)


class BannedWords:
    """The logits post-processor of a request; requests with the same words share it."""

    def __init__(self, words: tuple[str, ...], looking_up: Future[_States], bind: _Bind) -> None:
        self.words = words
        self._looking_up, self._bind = looking_up, bind
        self._process = os.getpid()
        self._twin: BannedWords | None = None  # in a forked process

    @property
    def _states(self) -> Future[_States]:
        """The states. A forked process looks them up again, because threads are not forked."""
        if self._process == os.getpid():
            return self._looking_up
        self._twin = self._twin or self._bind(self.words)
        return self._twin._states

    def prepare(self, device: str) -> Future[Any]:
        return self._states

    def banned_after(self, history: Sequence[int]) -> Ints:
        """Return the int64 ids of the tokens that would complete a word after `history`.

        Call this method after `prepare`.
        """
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
    """The tokens with text, sorted by their bytes. `of_id[token]` has the bytes of a token id."""

    def __init__(self, of_id: Sequence[bytes]) -> None:
        self.of_id = of_id
        ids = sorted((token for token, text in enumerate(of_id) if text), key=of_id.__getitem__)
        self._ids = np.array(ids, dtype=np.int64)
        self._texts = [of_id[token] for token in ids]
        self._joined = b"".join(self._texts)
        self._starts = np.cumsum([0, *map(len, self._texts)])
        self.longest = max(map(len, self._texts), default=0)  # bytes of the longest token

    def beginning_with(self, text: bytes) -> Ints:
        """Return the ids of the tokens that begin with `text`, which are adjacent in `_texts`."""
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
                at = end - 1  # the search below begins at `end`, the next token
            at = self._joined.find(text, at + 1)
        return self._ids[indices]


class _IdCache:
    """The banned token ids of each state, for all lists. Drops the least recently used states."""

    def __init__(self) -> None:
        self._found: OrderedDict[Any, Tensor] = OrderedDict()
        self._num_ids = 0
        self._lock = threading.Lock()
        self.serials = itertools.count()  # numbers that identify the lists

    def get(self, key: Any) -> Tensor | None:
        with self._lock:
            ids = self._found.get(key)
            if ids is not None:
                self._found.move_to_end(key)
            return ids

    def add(self, key: Any, ids: Tensor) -> None:
        with self._lock:
            if key not in self._found:
                self._num_ids += len(ids) + 1
            self._found[key] = ids
            while self._num_ids > _MAX_CACHED:
                self._num_ids -= len(self._found.popitem(last=False)[1]) + 1


class _States:
    """The tokens that a list of words bans, by the state of the text.

    A state is a node of the trie of all proper prefixes of the words. Node 0 is the root, the empty
    prefix. The words with the prefix of `node` are `_words[_first[node] : _end[node]]`.
    """

    def __init__(self, words: Sequence[bytes], vocabulary: _Vocabulary, cache: _IdCache) -> None:
        self._vocabulary = vocabulary
        self._cache, self._serial = cache, next(cache.serials)
        self._words = sorted(words)
        self._next: dict[int, int] = {}  # node * 256 + byte -> node
        self._depth, self._first, self._end = array("i", [0]), array("i", [0]), array("i", [0])
        for index, word in enumerate(self._words):
            self._add(index, word)
        self._suffix = array("i", [0]) * len(self._depth)  # node of the longest proper suffix
        for key, node in sorted(self._next.items(), key=lambda it: self._depth[it[1]]):
            if self._depth[node] > 1:
                self._suffix[node] = self._after(self._suffix[key >> 8], bytes([key & 255]))
        self._longest = max(self._depth)
        found = np.unique(np.concatenate([vocabulary.containing(word) for word in words]))
        self._always_banned = found.astype(np.int32)  # tokens that contain a whole word

    def _add(self, index: int, word: bytes) -> None:
        node = 0
        for depth, byte in enumerate(word[:-1], 1):
            node = self._next.setdefault(node << 8 | byte, len(self._depth))
            if node == len(self._depth):
                self._depth.append(depth)
                self._first.append(index)
                self._end.append(index)
            self._end[node] = index + 1

    def _after(self, node: int, text: bytes) -> int:
        """Return the state that `text` leads to from the state `node`."""
        step, suffix = self._next.get, self._suffix
        for byte in text:
            while (found := step(node << 8 | byte)) is None and node:
                node = suffix[node]
            node = found or 0
        return node

    def state(self, history: Sequence[int]) -> int:
        """Return the state of the text of `history`; ids beyond the vocabulary have no bytes."""
        of_id, length, longest = self._vocabulary.of_id, 0, self._longest
        pieces: list[bytes] = []  # the bytes of the tokens, last token first
        for token in reversed(history):
            if length >= longest:
                break
            if 0 <= token < len(of_id):
                pieces.append(of_id[token])
                length += len(of_id[token])
        return self._after(0, b"".join(reversed(pieces))[max(0, length - longest) :])

    def banned(self, state: int, vocab_size: int, device: torch.device) -> Tensor:
        """Return the int64 ids below `vocab_size` of the tokens that complete a word in `state`."""
        key = self._serial, state, vocab_size, device
        ids = self._cache.get(key)
        if ids is None:
            found = self._look_up(state)
            ids = torch.from_numpy(found[found < vocab_size]).to(device)
            self._cache.add(key, ids)
        return ids

    def _look_up(self, state: int) -> Ints:
        rests = set()
        while state:
            depth = self._depth[state]
            for word in self._words[self._first[state] : self._end[state]]:
                if len(word) - depth <= self._vocabulary.longest:
                    rests.add(word[depth:])
            state = self._suffix[state]
        found = [self._always_banned.astype(np.int64)]
        found += map(self._vocabulary.beginning_with, rests)
        return np.unique(np.concatenate(found))
