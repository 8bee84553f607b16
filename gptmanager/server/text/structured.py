"""Constrains answers by a rule: a JSON schema, a regular expression, a choice, or a grammar.

A request may set one rule, in one of several fields. The rule is compiled before the request runs,
so that the client gets an error with an explanation if the rule is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from gptmanager import GuidedDecoding
from gptmanager.callbacks.answers.call_grammar import InexpressibleArguments, marks_of
from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.callbacks.answers.tools import Tools
from gptmanager.decoding.guided.gbnf import is_gbnf
from gptmanager.errors import CapacityError, ConfigError, RequestError, quoted
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import field_error, wrong_key
from gptmanager.server.http.warning_header import Warnings

_NO_GRAMMAR = ("grammar", "")  # clients of llama.cpp send these for no grammar
# How errors of post-processors begin; for the client, the value has the name of its field.
_OWN_NAMES = ("logits_post_processor ", "json_schema: ", "regex: ", "choice: ", "words: ")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}
_ALIASES = {
    **{f"guided_{kind}": kind for kind in _KINDS[:4]},
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}


@dataclass(frozen=True, slots=True)
class OutputRule:
    """The rule that an answer must fit.

    `where` is the name of the request's field that sets the rule. `kind` is one of `_KINDS`. With
    `lenient`, schema keywords that cannot be enforced are ignored and reported.
    """

    where: str
    kind: str
    value: Any
    lenient: bool = False


def read_output_rule(body: Mapping[str, Any]) -> OutputRule | None:
    """Return the rule in `response_format`, `structured_outputs` or an alias such as guided_json.

    Return None if no rule is set. Raise ApiError (400) for a wrong rule, and for two rules.
    """
    rules = [
        *_of_response_format(body.get("response_format")),
        *_of_structured_outputs(body.get("structured_outputs")),
        *(
            OutputRule(name, kind, body[name])
            for name, kind in _ALIASES.items()
            if body.get(name) is not None and (name, body[name]) != _NO_GRAMMAR
        ),
    ]
    if len(rules) > 1:
        raise field_error(
            rules[1].where, f"pass either {rules[0].where} or {rules[1].where}, not both"
        )
    for rule in rules:
        _check(rule)
    return rules[0] if rules else None


def _of_response_format(given: Any) -> list[OutputRule]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise field_error("response_format", f"{quoted(given)} must be an object with a type")
    kind = given.get("type")
    if kind == "text":
        _refuse_schema(given, "schema", "type 'json_object'")
    if kind in ("text", "json_object"):
        _refuse_schema(given, "json_schema", "type 'json_schema'")
    if kind == "text":
        return []
    if kind == "json_object":
        if given.get("schema") is not None:
            lenient = given.get("strict") is False
            return [OutputRule("response_format.schema", "json", given["schema"], lenient)]
        return [OutputRule("response_format", "json_object", True)]
    if kind != "json_schema":
        allowed = "'text', 'json_object' or 'json_schema'"
        raise wrong_key("response_format", given, "type", allowed)
    where, own = "response_format.json_schema", given.get("json_schema")
    if not isinstance(own, Mapping):
        raise wrong_key("response_format", given, "json_schema", "an object with name and schema")
    if not isinstance(own.get("name"), str):
        raise wrong_key(where, own, "name", "a string")
    if not isinstance(own.get("strict"), bool | None):
        raise wrong_key(where, own, "strict", "true or false")
    if own.get("schema") is None:
        raise wrong_key(where, own, "schema", "a JSON schema")
    return [OutputRule(f"{where}.schema", "json", own["schema"], own.get("strict") is False)]


def _refuse_schema(given: Mapping[str, Any], key: str, need: str) -> None:
    """Raise ApiError (400) if `response_format` has a schema that its type would ignore."""
    if given.get(key) is not None:
        kind = quoted(given["type"])
        raise field_error(f"response_format.{key}", f"has no effect with type {kind}: use {need}")


def _of_structured_outputs(given: Any) -> list[OutputRule]:
    if given is None:
        return []
    where = "structured_outputs"
    if not isinstance(given, Mapping):
        kinds = ", ".join(_KINDS)
        raise field_error(where, f"{quoted(given)} must be an object with one of {kinds}")
    there = {key: value for key, value in given.items() if value is not None}
    for key in there:
        if key not in _KINDS:
            raise field_error(
                f"{where}.{key}", f"unknown field; the fields are {', '.join(_KINDS)}"
            )
    rules = [OutputRule(f"{where}.{key}", key, value) for key, value in there.items()]
    return [rule for rule in rules if (rule.kind, rule.value) != ("json_object", False)]


def _check(rule: OutputRule) -> None:
    value, need = rule.value, ""
    if rule.kind == "json" and not isinstance(value, Mapping | str | bool):
        need = "a JSON schema: an object, or a string of JSON"
    if rule.kind in ("regex", "grammar") and not isinstance(value, str):
        need = "a string"
    if rule.kind == "json_object" and value is not True:
        need = "true or false"
    if rule.kind == "choice":
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not texts or not value:
            need = "a list of one or more strings"
    if need:
        raise field_error(rule.where, f"{quoted(value)} must be {need}")


class StructuredOutputs:
    """Compiles the rules of requests, with one `GuidedDecoding` for the model's tokenizer.

    The first request with a rule creates the `GuidedDecoding`. With a vocabulary of 150,000 tokens,
    creating it takes a second.
    """

    _of_engines: ClassVar[WeakKeyDictionary[Engine, StructuredOutputs]] = WeakKeyDictionary()

    @classmethod
    def of(cls, engine: Engine) -> StructuredOutputs:
        """Return the instance that all endpoints of an engine share."""
        if engine not in cls._of_engines:
            card = engine.card
            cls._of_engines[engine] = cls(card.tokenizer, card.token_defaults.end_ids)
        return cls._of_engines[engine]

    def __init__(self, tokenizer: Tokenizer | None, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._guided: GuidedDecoding | None = None
        self._lock = threading.Lock()

    async def processor(self, rule: OutputRule, warnings: Warnings) -> Any:
        """Return the logits post-processor for a rule. Raise ApiError as `prepared` does.

        Add to `warnings` the keywords of a lenient schema that are not enforced.
        """

        def grammar(guided: GuidedDecoding) -> Any:
            if rule.kind == "json_object":
                return guided.json_schema(_ANY_OBJECT)
            if rule.kind == "grammar" and is_gbnf(rule.value):
                return guided.gbnf(rule.value)
            make: dict[str, Callable[..., Any]] = {
                "json": partial(guided.json_schema, lenient=rule.lenient),
                "regex": guided.regex,
                "choice": guided.choice,
                "grammar": guided.lark,
            }
            return make[rule.kind](rule.value)

        found = await self._compiled(rule.where, grammar)
        warnings.add_ignored((it[1:] for it in found.unenforced), f"not enforced in {rule.where}")
        return found

    async def processor_with_tools(
        self, rule: OutputRule | None, tools: Tools, form: ToolFormat, warnings: Warnings
    ) -> Any:
        """Return the post-processor for an answer of tool calls or, if calls are optional, of text.

        With a `rule`, the text must be JSON that fits the rule. Without a rule, optional calls are
        guided as far as possible: schema keywords that cannot be enforced are ignored. If
        llguidance is not installed or cannot read a schema, optional calls without a rule are
        unconstrained: the result is None, and `warnings` has the reason. The result is also None
        if the tool format cannot guide such answers.
        """
        answer = None
        if rule is not None and not tools.required:
            if rule.kind not in ("json", "json_object"):
                raise field_error(rule.where, "with tools, only JSON rules are supported")
            answer = _ANY_OBJECT if rule.kind == "json_object" else rule.value
        is_optional = not tools.required and answer is None
        marks = {} if self._tokenizer is None else marks_of(self._tokenizer, self._end_ids)
        try:
            made = form.grammar(tools, marks, answer)
        except InexpressibleArguments as error:
            where_wrong = f"tools[{tools.index_of(error.rule)}].function.parameters"
            if not is_optional:
                raise field_error(where_wrong, str(error)) from None
            warnings.add(f"tool calls are not constrained: {where_wrong}: {error}")
            return None
        if made is None:
            return None
        grammar, schemas = made
        of_tools = [name for name in schemas if name != "answer"]
        lenient = {name for name in of_tools if tools.is_lenient(name)}
        if rule is not None and rule.lenient:
            lenient.add("answer")
        where = {name: f"tools[{tools.index_of(name)}]" for name in of_tools}
        for allowed in (lenient, set(schemas)) if is_optional else (lenient,):
            make = partial(GuidedDecoding.lark, grammar=grammar, schemas=schemas, lenient=allowed)
            try:
                found = await self._compiled("tools", make)
            except ApiError as error:
                refused = error
                continue
            for name in schemas:
                own = [
                    it.partition("#/")[2] for it in found.unenforced if it.startswith(f"{name}#")
                ]
                warnings.add_ignored(own, f"not enforced in {where.get(name, 'the schema')}")
            return found
        if is_optional and refused.status == 400:
            warnings.add(f"tool calls are not constrained: {refused.message}")
            return None
        await self._check_parameters(tools)
        raise refused

    async def _check_parameters(self, tools: Tools) -> None:
        """Raise ApiError (400) for the first tool with a schema that does not compile."""
        for rule, schema in tools.schemas.items():
            where = f"tools[{tools.index_of(rule)}].function.parameters"
            lenient = tools.is_lenient(rule)
            make = partial(GuidedDecoding.json_schema, schema=schema, lenient=lenient)
            await self._compiled(where, make)

    async def _compiled(self, where: str, make: Callable[[GuidedDecoding], Any]) -> Any:
        return await prepared(where, lambda: make(self._for_tokenizer()))

    def _for_tokenizer(self) -> GuidedDecoding:
        with self._lock:
            if self._guided is None:
                if self._tokenizer is None:
                    raise ConfigError("the model has no tokenizer, which guided decoding needs")
                self._guided = GuidedDecoding(self._tokenizer, self._end_ids)
            return self._guided


async def prepared(where: str, make: Callable[[], Any]) -> Any:
    """Return the logits post-processor that `make` creates, once it is compiled.

    Raise ApiError: 400 if the processor cannot be compiled, 503 if no thread or process can be
    started to compile it.
    """
    processor = None
    try:
        processor = await asyncio.to_thread(make)
        await _finished(processor.prepare("cpu"))
    except CapacityError as error:
        raise ApiError(503, f"{where}: {_without_field(error)}", param=where) from None
    except (ValueError, RequestError) as error:  # a ConfigError is also a ValueError
        raise field_error(where, _without_field(error)) from None
    except asyncio.CancelledError:
        processor = None  # release the processor even if something still refers to this frame
        raise
    return processor


async def _finished(future: Future[Any]) -> None:
    """Wait for a future, and raise its error.

    `asyncio.wrap_future` would make a reference cycle: after a disconnect the grammar would stay
    alive, and be compiled, until the garbage collector runs.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        await done.wait()
    except asyncio.CancelledError:
        future = Future()  # release the old one even if something still refers to this frame
        raise
    future.result()


def _without_field(error: Exception) -> str:
    """Return the text of an error without the names that the client does not know."""
    text = str(error)
    for name in _OWN_NAMES:
        text = text.removeprefix(name)
    return text
