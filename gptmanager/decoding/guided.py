"""Guided decoding: output that fits a JSON schema, a regular expression, a choice, or a grammar.

Grammars are compiled in threads of their own, on trial in a bounded process first, and requests
wait for theirs; llguidance parses.
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from gptmanager.cuda.streams import Stream
from gptmanager.decoding.grammar_masks import Grammar, GuidedSession
from gptmanager.decoding.grammar_matcher import new_matcher, new_tokenizer, rule_of, text_of
from gptmanager.decoding.grammar_trial import GrammarTrials
from gptmanager.decoding.rows import RowProcessor, RowSession
from gptmanager.environment.distribution import install_command
from gptmanager.errors import CapacityError, ConfigError, InvalidRequestError
from gptmanager.kernels.token_masks import mask_logits
from gptmanager.lifecycle.child_process import (
    NoAnswerError,
    NotStartedError,
    RefusedError,
    TooSlowError,
)

MAX_TEXTS = 10_000  # of a choice
MAX_GRAMMAR_BYTES = 1 << 20
_MAX_TRIALS = 4  # at once
_Key = tuple[str, str]


class GuidedDecoding(RowProcessor):
    """Grammars for one tokenizer; each method gives what a request brings as its post-processor.

    `tokenizer`: a `tokenizers.Tokenizer`. `end_ids`: tokens that end a text, none: those that the
    tokenizer's names suggest. They, and the end ids of a request, may come exactly where the
    output is complete. Equal grammars are compiled once; the last `max_grammars` are kept. One
    that does not compile, in `compile_timeout_s` seconds, ends its request. One that nobody refers
    to any more is not compiled. Raises ConfigError without llguidance.

    A grammar has at most 1 MiB, and a choice 10,000 texts: the methods raise ValueError for more.
    """

    name = "guided decoding"

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int] = (),
        *,
        max_grammars: int = 256,
        compile_timeout_s: float = 10.0,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                f"guided decoding needs llguidance: {install_command('guided')} ({error})"
            ) from error
        self._llguidance: Any = llguidance
        try:
            given = tokenizer.to_str(), list(end_ids)
            self._tokenizer = new_tokenizer(self._llguidance, *given)
        except Exception as error:  # llguidance raises what it likes
            raise ConfigError(f"llguidance cannot use the tokenizer: {error}") from error
        self.vocab_size: int = self._tokenizer.vocab_size
        self.end_ids = frozenset(end_ids) or frozenset(self._tokenizer.eos_tokens)
        self._max_grammars = max_grammars
        self._compiled: OrderedDict[_Key, Future[Any]] = OrderedDict()
        # referred to by those who wait for them, so that nobody compiles for clients that are gone
        self._waiting: weakref.WeakValueDictionary[_Key, Future[Any]]
        self._waiting = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._trials = GrammarTrials(*given, compile_timeout_s)
        num_trials = max(2, min(os.cpu_count() or 1, _MAX_TRIALS))
        self._threads = ThreadPoolExecutor(num_trials, thread_name_prefix="gptmanager-grammars")
        # compiled here, not when the first request runs
        mask_logits(torch.zeros(1, 1), np.zeros(1, np.int64), np.zeros((1, 1), np.int32))

    def json_schema(
        self, schema: Mapping[str, Any] | bool | str, *, whitespace_flexible: bool = False
    ) -> Grammar:
        """JSON that `schema` (an object, or its text) permits, its properties in that order.

        `whitespace_flexible`: with any white space between its parts; a model may then produce
        nothing else for long. ValueError for an object that is nested too deeply.
        """
        text = text_of(schema)
        kind = "json_schema" if not whitespace_flexible else "json_schema with white space"
        return self._grammar(kind, text)

    def regex(self, pattern: str) -> Grammar:
        """Text that `pattern`, in the syntax of Rust's regex, matches from its start to its end."""
        return self._grammar("regex", pattern)

    def choice(self, options: Sequence[str]) -> Grammar:
        """One of the texts, at most 10,000 of any characters."""
        if isinstance(options, str):
            raise TypeError(f"options = {options!r} is one text, expected several")
        if not options:
            raise ValueError("options is empty: no text would be allowed")
        if len(options) > MAX_TEXTS:
            raise ValueError(f"options has {len(options)} texts, at most {MAX_TEXTS} are allowed")
        # a single terminal: the parser cannot hold so many alternatives of a rule
        return self._grammar("choice", f"start: TEXT\nTEXT: {' | '.join(map(_quoted, options))}")

    def lark(
        self, grammar: str, *, schemas: Mapping[str, Mapping[str, Any] | bool | str] | None = None
    ) -> Grammar:
        """Text of a grammar in llguidance's kind of Lark syntax; its start rule is `start`.

        `schemas`: rule -> JSON schema, for rules that the grammar uses and does not have. Their
        JSON has a space behind commas and colons, as `json.dumps` writes it. ValueError for what
        is no schema.
        """
        rules = (f"{name}: %json {rule_of(schema)}" for name, schema in (schemas or {}).items())
        return self._grammar("lark", "\n".join((grammar, *rules)))

    def open(self, num_lines: int, stream: Stream | None) -> RowSession:
        return GuidedSession(self.vocab_size, self.end_ids, stream)

    def _grammar(self, kind: str, text: str) -> Grammar:
        size = len(text.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"the {kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed in a grammar"
            )
        key = kind, text
        with self._lock:
            compiled = self._compiled.get(key) or self._waiting.get(key)
            if compiled is None:
                compiled = self._waiting[key] = Future()
                try:
                    self._threads.submit(self._compile_waiting, key, weakref.ref(compiled))
                except RuntimeError as error:  # no thread can be started
                    raise CapacityError(f"the {kind} cannot be compiled: {error}") from None
            elif key in self._compiled:
                self._compiled.move_to_end(key)
            return Grammar(self, kind, compiled)

    def _compile_waiting(self, key: _Key, waiting: weakref.ref[Future[Any]]) -> None:
        """Compile a grammar unless, or until, nobody waits for it."""

        def is_wanted() -> bool:
            return waiting() is not None

        result = error = None
        if is_wanted():
            try:
                result = self._compile(*key, is_wanted)
            except BaseException as raised:  # noqa: B036 - a panic of llguidance, too
                error = raised
        compiled = waiting()
        if compiled is None:
            return
        with self._lock:
            self._waiting.pop(key, None)
            if not isinstance(error, CapacityError):  # another time there may be a process
                self._compiled[key] = compiled
            while len(self._compiled) > self._max_grammars:
                self._compiled.popitem(last=False)
        if error is not None:
            compiled.set_exception(error)
        else:
            compiled.set_result(result)

    def _compile(self, kind: str, text: str, is_wanted: Callable[[], bool]) -> Any:
        """A matcher at its start, which is never moved on: sequences have copies."""
        where = f"logits_post_processor {kind}"
        try:
            self._trials.run(kind, text, is_wanted)
            return new_matcher(self._llguidance, self._tokenizer, kind, text)
        except NotStartedError as error:
            raise CapacityError(f"{where}: {error} to compile it") from None
        except TooSlowError as error:
            raise InvalidRequestError(f"{where}: {error} to compile (compile_timeout_s)") from None
        except (ValueError, TypeError, RefusedError, NoAnswerError) as error:
            raise InvalidRequestError(f"{where}: {error}") from None


def _quoted(text: str) -> str:
    """A text as a grammar has it, which escapes more than JSON must."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)
