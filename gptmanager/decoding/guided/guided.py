"""Guided decoding: output that fits a JSON schema, a regular expression, a choice, or a grammar.

llguidance compiles each grammar, first on trial in a child process with limits of time and memory,
then in a background thread. A request waits until its grammar is compiled.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from gptmanager.arguments import at_least, number
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
from gptmanager.environment.distribution import install_command, too_old
from gptmanager.environment.machine.cores import num_cores
from gptmanager.errors import CapacityError, ConfigError, InvalidRequestError, quoted
from gptmanager.kernels.token_masks import mask_logits
from gptmanager.lifecycle.child_process import (
    NoAnswerError,
    NotStartedError,
    RefusedError,
    TooSlowError,
)
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.per_process import PerProcess

MAX_TEXTS = 10_000  # in a choice
MAX_GRAMMAR_BYTES = 1 << 20
MAX_KEPT_BYTES = 4 << 20  # grammar texts; a compiled grammar takes up to 10 times its text
_MAX_TRIALS = 4  # grammars that are compiled at the same time


class _Compilation:
    """The grammars of one process, and what compiles them."""

    def __init__(self, trials: GrammarTrials) -> None:
        self.trials = trials
        self.lock = threading.Lock()  # guards the fields below
        self.compiled: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self.num_kept_bytes = 0
        # The references are weak, so a grammar is dropped when no request waits for it any more.
        self.waiting: weakref.WeakValueDictionary[GrammarSource, CompiledGrammar]
        self.waiting = weakref.WeakValueDictionary()
        num_trials = max(2, min(num_cores(), _MAX_TRIALS))
        self.threads = ThreadPoolExecutor(num_trials, thread_name_prefix="gptmanager-grammars")


class GuidedDecoding(RowProcessor):
    """Grammars for one tokenizer; each method returns a request's post-processor.

    `tokenizer` is a `tokenizers.Tokenizer`. `end_ids` are the tokens that end a text; if empty,
    they are found by the names of the tokenizer's special tokens. The end ids and a request's own
    end ids are permitted only where the output is complete. Equal grammars are compiled once. The
    `max_grammars` grammars used last are kept, or fewer if their texts exceed 4 MiB. If a grammar
    does not compile within `compile_timeout_s` seconds, its requests fail, and later requests try
    again. If all requests that wait for a grammar end, the grammar is dropped. Raise ConfigError if
    llguidance is not installed, or cannot use the tokenizer, or if `max_grammars` is less than 1.

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
        if (old := too_old("guided")) is not None:
            raise ConfigError(f"guided decoding needs {old}")
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                f"guided decoding needs llguidance: {install_command('guided')} ({error})"
            ) from error
        self._llguidance: Any = llguidance
        if not isinstance(end_ids, Collection) or isinstance(end_ids, (str, bytes)):
            raise ConfigError(f"end_ids = {quoted(end_ids)} must be a list of token ids")
        try:
            given = tokenizer.to_str(), list(end_ids)
            self._tokenizer = new_tokenizer(self._llguidance, *given)
        except Exception as error:  # llguidance documents no exception types
            raise ConfigError(f"llguidance cannot use the tokenizer: {error}") from error
        self.given = given  # the arguments from which an equal object can be created
        self.vocab_size: int = self._tokenizer.vocab_size
        self.end_ids = frozenset(end_ids) or frozenset(self._tokenizer.eos_tokens)
        self._max_grammars = at_least(1, "max_grammars", max_grammars)
        seconds = number(0, "compile_timeout_s", compile_timeout_s)
        self._own = PerProcess(lambda: _Compilation(GrammarTrials(*given, seconds)))
        self._own.get()
        # Numba compiles this function here, before the first request runs.
        mask_logits(torch.zeros(1, 1), np.zeros(1, np.int64), np.zeros((1, 1), np.int32))

    def json_schema(
        self,
        schema: Mapping[str, Any] | bool | str,
        *,
        whitespace_flexible: bool = False,
        lenient: bool = False,
    ) -> Grammar:
        """Guide by a JSON schema (an object, or its text); properties follow the schema's order.

        `whitespace_flexible` permits any white space between JSON tokens; a model may then produce
        long runs of it. With `lenient`, keywords that cannot be enforced are left out, and the
        grammar's `unenforced` lists them. Raise ValueError if an object is nested too deeply.
        """
        kind = "json_schema" if not whitespace_flexible else "json_schema with white space"
        return self._grammar(GrammarSource(kind, text_of(schema), lenient=("",) if lenient else ()))

    def regex(self, pattern: str) -> Grammar:
        """Guide by `pattern`, a regular expression in Rust's syntax. It must match all the text."""
        return self._grammar(GrammarSource("regex", pattern))

    def choice(self, options: Sequence[str]) -> Grammar:
        """Guide to one of the texts in `options`: at most 10,000, with any characters."""
        if isinstance(options, str):
            raise TypeError(f"options must be a list of texts, got the text {options!r}")
        if not options:
            raise ValueError("`options` is empty: at least one text is needed")
        if len(options) > MAX_TEXTS:
            raise ValueError(f"options has {len(options)} texts, at most {MAX_TEXTS} are allowed")
        # All texts are one terminal, because a rule cannot have this many alternatives.
        alternatives = " | ".join(map(_quoted, options))
        return self._grammar(GrammarSource("choice", f"start: TEXT\nTEXT: {alternatives}"))

    def lark(
        self,
        grammar: str,
        *,
        schemas: Mapping[str, Mapping[str, Any] | bool | str] | None = None,
        lenient: Collection[str] = (),
    ) -> Grammar:
        """Guide by a grammar in llguidance's variant of Lark syntax; its start rule is `start`.

        `schemas` maps names of rules, which the grammar uses but does not define, to JSON schemas.
        The output of these rules has a space after commas and colons, as `json.dumps` writes it.
        `lenient` holds the names of the rules from which keywords that cannot be enforced are left
        out. Raise ValueError if a schema is an object that is nested too deeply.
        """
        rules = tuple((name, text_of(schema)) for name, schema in (schemas or {}).items())
        return self._grammar(GrammarSource("lark", grammar, rules, tuple(sorted(lenient))))

    def gbnf(self, grammar: str) -> Grammar:
        """Guide by a grammar in GBNF, the form of BNF of llama.cpp; its start rule is `root`."""
        return self._grammar(GrammarSource("gbnf", grammar))

    def open(self, num_lines: int, stream: Stream | None) -> RowSession:
        return GuidedSession(self.vocab_size, self.end_ids, stream)

    def _grammar(self, source: GrammarSource) -> Grammar:
        size = source.num_bytes
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"the {source.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
            )
        return Grammar(self, source.kind, self.compiled(source))

    def compiled(self, source: GrammarSource) -> CompiledGrammar:
        """Return the grammar of a source, which this process compiles if it has not yet."""
        own = self._own.get()
        with own.lock:
            compiled = own.compiled.get(source) or own.waiting.get(source)
            if compiled is None:
                compiled = own.waiting[source] = CompiledGrammar(source)
                try:
                    own.threads.submit(self._compile_waiting, source, weakref.ref(compiled))
                except RuntimeError as error:  # no thread can be started
                    raise CapacityError(f"the {source.kind} cannot be compiled: {error}") from None
            elif source in own.compiled:
                own.compiled.move_to_end(source)
            return compiled

    def _compile_waiting(
        self, source: GrammarSource, waiting: weakref.ref[CompiledGrammar]
    ) -> None:
        """Compile a grammar and settle `waiting`, unless all requests for it have ended."""

        def is_wanted() -> bool:
            return waiting() is not None

        result, error, is_final = None, None, True
        unenforced: tuple[str, ...] = ()
        if is_wanted():
            try:
                result, unenforced = self._compile(source, is_wanted)
            except BaseException as raised:  # noqa: B036 - includes panics of llguidance
                # later a process may be available, or the machine may be less busy
                is_final = not isinstance(raised.__cause__ or raised, NoAnswerError | MemoryError)
                # The error is cached. Its traceback and its chained errors would keep the
                # grammar's text in memory.
                error = raised.with_traceback(None)
                error.__context__ = error.__cause__ = None
        compiled = waiting()
        if compiled is None:
            return
        own = self._own.get()
        with own.lock:
            own.waiting.pop(source, None)
            if is_final:
                own.num_kept_bytes += source.num_bytes if source not in own.compiled else 0
                own.compiled[source] = compiled
            while len(own.compiled) > self._max_grammars or own.num_kept_bytes > MAX_KEPT_BYTES:
                oldest, _ = own.compiled.popitem(last=False)
                own.num_kept_bytes -= oldest.num_bytes
        if error is not None:
            compiled.set_exception(error)
        else:
            compiled.unenforced = unenforced
            compiled.set_result(result)

    def _compile(
        self, source: GrammarSource, is_wanted: Callable[[], bool]
    ) -> tuple[Any, tuple[str, ...]]:
        """Return a matcher in its initial state, and the keywords that are not enforced."""
        kind, where = source.kind, f"logits_post_processor {source.kind}"
        try:
            text, unenforced = self._own.get().trials.run(source, is_wanted)
            matcher = new_matcher(self._llguidance, self._tokenizer, kind, text)
        except NotStartedError as error:
            raise CapacityError(f"{where}: the grammar cannot be compiled: {error}") from error
        except TooSlowError as error:
            raise InvalidRequestError(f"{where}: {error} to compile (compile_timeout_s)") from error
        except NoAnswerError as error:
            raise InvalidRequestError(f"{where}: {error}") from error
        except (ValueError, TypeError, RefusedError) as error:
            raise InvalidRequestError(f"{where}: {error}") from None
        if unenforced:
            logger.warning("%s: these keywords are not enforced: %s", where, ", ".join(unenforced))
        return matcher, tuple(unenforced)


def grammar_of(guided: GuidedDecoding, source: GrammarSource) -> Grammar:
    """Return the grammar of a source, as the methods of `guided` make it."""
    return guided._grammar(source)


def _quoted(text: str) -> str:
    """Quote a text for a grammar, which needs more escapes than JSON."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)
