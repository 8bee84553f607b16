"""Guided decoding: output that fits a JSON schema, a regular expression, a choice, or a grammar.

Grammars are compiled in threads of their own, on trial in a bounded process first, and requests
wait for theirs; llguidance parses.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from gptmanager.cuda.device.streams import Stream
from gptmanager.decoding.guided.grammar_masks import CompiledGrammar, Grammar, GuidedSession
from gptmanager.decoding.guided.grammar_matcher import (
    GrammarSource,
    new_matcher,
    new_tokenizer,
    text_of,
)
from gptmanager.decoding.guided.grammar_trial import GrammarTrials
from gptmanager.decoding.processors.rows import RowProcessor, RowSession
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
# Of the grammars that are kept: compiled, one takes up to ten times the bytes of its text.
MAX_KEPT_BYTES = 4 << 20
_MAX_TRIALS = 4  # at once
logger = logging.getLogger("gptmanager")


class GuidedDecoding(RowProcessor):
    """Grammars for one tokenizer; each method gives what a request brings as its post-processor.

    `tokenizer`: a `tokenizers.Tokenizer`. `end_ids`: tokens that end a text, none: those that the
    tokenizer's names suggest. They, and the end ids of a request, may come exactly where the
    output is complete. Equal grammars are compiled once; the last `max_grammars` are kept, fewer
    if their texts have more than 4 MiB. One that does not compile, in `compile_timeout_s`
    seconds, ends its request. One that nobody refers to any more is not compiled. Raises
    ConfigError without llguidance.

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
        self._compiled: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._num_kept_bytes = 0
        self._lock = threading.Lock()
        self._trials = GrammarTrials(*given, compile_timeout_s)
        self._start()
        # compiled here, not when the first request runs
        mask_logits(torch.zeros(1, 1), np.zeros(1, np.int64), np.zeros((1, 1), np.int32))

    def _start(self) -> None:
        """Begin with nothing that waits; also in a forked process, which has no threads."""
        # referred to by those who wait for them, so that nobody compiles for clients that are gone
        self._waiting: weakref.WeakValueDictionary[GrammarSource, CompiledGrammar]
        self._waiting = weakref.WeakValueDictionary()
        num_trials = max(2, min(os.cpu_count() or 1, _MAX_TRIALS))
        self._threads = ThreadPoolExecutor(num_trials, thread_name_prefix="gptmanager-grammars")
        self._pid = os.getpid()

    def json_schema(
        self,
        schema: Mapping[str, Any] | bool | str,
        *,
        whitespace_flexible: bool = False,
        lenient: bool = False,
    ) -> Grammar:
        """JSON that `schema` (an object, or its text) permits, its properties in that order.

        `whitespace_flexible`: with any white space between its parts; a model may then produce
        nothing else for long. `lenient`: keywords that cannot be enforced are left out, and
        `unenforced` of the grammar lists them. ValueError for an object that is nested too deeply.
        """
        kind = "json_schema" if not whitespace_flexible else "json_schema with white space"
        return self._grammar(GrammarSource(kind, text_of(schema), lenient=("",) if lenient else ()))

    def regex(self, pattern: str) -> Grammar:
        """Text that `pattern`, in the syntax of Rust's regex, matches from its start to its end."""
        return self._grammar(GrammarSource("regex", pattern))

    def choice(self, options: Sequence[str]) -> Grammar:
        """One of the texts, at most 10,000 of any characters."""
        if isinstance(options, str):
            raise TypeError(f"options = {options!r} is one text, expected several")
        if not options:
            raise ValueError("options is empty: no text would be allowed")
        if len(options) > MAX_TEXTS:
            raise ValueError(f"options has {len(options)} texts, at most {MAX_TEXTS} are allowed")
        # a single terminal: the parser cannot hold so many alternatives of a rule
        alternatives = " | ".join(map(_quoted, options))
        return self._grammar(GrammarSource("choice", f"start: TEXT\nTEXT: {alternatives}"))

    def lark(
        self,
        grammar: str,
        *,
        schemas: Mapping[str, Mapping[str, Any] | bool | str] | None = None,
        lenient: Collection[str] = (),
    ) -> Grammar:
        """Text of a grammar in llguidance's kind of Lark syntax; its start rule is `start`.

        `schemas`: rule -> JSON schema, for rules that the grammar uses and does not have. Their
        JSON has a space behind commas and colons, as `json.dumps` writes it. `lenient`: those of
        the rules whose keywords are left out where they cannot be enforced. ValueError for an
        object that is nested too deeply.
        """
        rules = tuple((name, text_of(schema)) for name, schema in (schemas or {}).items())
        return self._grammar(GrammarSource("lark", grammar, rules, tuple(sorted(lenient))))

    def open(self, num_lines: int, stream: Stream | None) -> RowSession:
        return GuidedSession(self.vocab_size, self.end_ids, stream)

    def _grammar(self, source: GrammarSource) -> Grammar:
        size = source.num_bytes
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"the {source.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
            )
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            compiled = self._compiled.get(source) or self._waiting.get(source)
            if compiled is None:
                compiled = self._waiting[source] = CompiledGrammar()
                try:
                    self._threads.submit(self._compile_waiting, source, weakref.ref(compiled))
                except RuntimeError as error:  # no thread can be started
                    raise CapacityError(f"the {source.kind} cannot be compiled: {error}") from None
            elif source in self._compiled:
                self._compiled.move_to_end(source)
            return Grammar(self, source.kind, compiled)

    def _compile_waiting(
        self, source: GrammarSource, waiting: weakref.ref[CompiledGrammar]
    ) -> None:
        """Compile a grammar unless, or until, nobody waits for it."""

        def is_wanted() -> bool:
            return waiting() is not None

        result, error = None, None
        unenforced: tuple[str, ...] = ()
        if is_wanted():
            try:
                result, unenforced = self._compile(source, is_wanted)
            except BaseException as raised:  # noqa: B036 - a panic of llguidance, too
                error = raised
        compiled = waiting()
        if compiled is None:
            return
        with self._lock:
            self._waiting.pop(source, None)
            if not isinstance(error, CapacityError):  # another time there may be a process
                self._num_kept_bytes += source.num_bytes if source not in self._compiled else 0
                self._compiled[source] = compiled
            while len(self._compiled) > self._max_grammars or self._num_kept_bytes > MAX_KEPT_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_kept_bytes -= oldest.num_bytes
        if error is not None:
            compiled.set_exception(error)
        else:
            compiled.unenforced = unenforced
            compiled.set_result(result)

    def _compile(
        self, source: GrammarSource, is_wanted: Callable[[], bool]
    ) -> tuple[Any, tuple[str, ...]]:
        """A matcher at its start, which is never moved on; and what it does not enforce."""
        kind, where = source.kind, f"logits_post_processor {source.kind}"
        try:
            text, unenforced = self._trials.run(source, is_wanted)
            matcher = new_matcher(self._llguidance, self._tokenizer, kind, text)
        except NotStartedError as error:
            raise CapacityError(f"{where}: {error} to compile it") from None
        except TooSlowError as error:
            raise InvalidRequestError(f"{where}: {error} to compile (compile_timeout_s)") from None
        except (ValueError, TypeError, RefusedError, NoAnswerError) as error:
            raise InvalidRequestError(f"{where}: {error}") from None
        if unenforced:
            logger.warning("%s: keywords that are not enforced: %s", where, ", ".join(unenforced))
        return matcher, tuple(unenforced)


def _quoted(text: str) -> str:
    """A text as a grammar has it, which escapes more than JSON must."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)
