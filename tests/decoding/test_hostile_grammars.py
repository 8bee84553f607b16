"""Grammars that want too much, or nothing: an error by name before anything is generated.

GPTMANAGER_FUZZ multiplies the number of random schemas, 40 if it is not set.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import threading
import time
import traceback

import guided_requests
import jsonschema
import numpy as np
import pytest
from fuzz import FUZZ
from guided_requests import MODEL, asked

from gptmanager import InferenceRequest
from gptmanager.callbacks import load_guided_decoding
from gptmanager.decoding.guided import grammar_trial
from gptmanager.decoding.guided.grammar_masks import GuidedSession, _Progress
from gptmanager.decoding.guided.grammar_matcher import GrammarSource
from gptmanager.decoding.guided.grammar_trial import GrammarTrials
from gptmanager.decoding.guided.guided import GuidedDecoding
from gptmanager.decoding.guided.json_schema import SchemaReader
from gptmanager.decoding.guided.schema_numbers import simplest
from gptmanager.errors import CapacityError, InvalidRequestError, LogitsError
from gptmanager.lifecycle.child_process import (
    NoAnswerError,
    NotStartedError,
    RefusedError,
    TooSlowError,
)

NUM_SCHEMAS = 40 * FUZZ
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}


def fault_of(guided, kind, argument):
    """What a grammar's request would end with; None: it compiles."""
    try:
        getattr(guided, kind)(argument).compiled.result()
    except InvalidRequestError as error:
        return str(error)
    return None


# What no text fits, and what is beyond the parser -------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "argument", "fault"),
    [
        ("json_schema", False, "json_schema: the schema is false: it permits no text"),
        ("json_schema", "false", "json_schema: the schema is false: it permits no text"),
        ("json_schema", "null", "the schema is null, expected an object, true or false"),
        ("json_schema", "[1]", r"the schema is [1], expected an object, true or false"),
        ("json_schema", {"not": {}}, "Unsatisfiable schema: schema is false"),
        ("json_schema", {"enum": []}, "Unsatisfiable schema"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}, "minimum (5) is greater"),
        ("json_schema", {"type": "string", "pattern": r"[^\s\S]"}, "Regex is empty"),
        ("json_schema", {"$ref": "#/$defs/none"}, "does not exist"),
        ("json_schema", {"minimum": 2**63}, "minimum = 9223372036854775808 is beyond integers"),
        ("json_schema", {"maximum": -(10**30)}, "maximum = -1000000000000000000000000000000 is"),
        ("json_schema", {"items": {"exclusiveMinimum": 1e300}}, "exclusiveMinimum = 1e+300 is"),
        ("json_schema", {"const": 2**53 + 1}, "const holds 9007199254740993, which double"),
        ("json_schema", {"enum": ["a", {"b": [10**40]}]}, "enum holds 1000"),
        ("json_schema", '{"type":"array","items":' * 10**4 + "{}" + "}" * 10**4, "too deeply"),
        ("json_schema", '{"minimum": 1' + "0" * 5000 + "}", "json_schema: "),
        ("regex", r"[^\s\S]", "regex: the grammar permits no text"),
        ("regex", r"x[^\s\S]|[^\s\S]", "regex: the grammar permits no text"),
        ("regex", "((a{1000}){1000}){1000}", "too many expressions"),
        ("regex", "(" * 3000 + "a" + ")" * 3000, "invalid regex"),
        ("regex", "\ud800", "surrogates not allowed"),
        ("lark", 'start: start "a"', "lark: the grammar permits no text"),
        ("lark", "start: a\na: b\nb: a", "lark: the grammar permits no text"),
        ("lark", "start: A\nA: /a+/ & /b+/", "lark: the grammar permits no text"),
        ("lark", 'start: "a" A\nA: /a+/ & /b+/', "lark: the grammar permits no text"),
        ("lark", 'start: "a" "Z" A\nA: /a+/ & /b+/', "lark: the grammar permits no text"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("lark", "start: <[0-99999999]>", "Token range end too large"),
    ],
)  # fmt: skip
def test_impossible_grammars_are_refused_by_name(guided, kind, argument, fault):
    assert fault in fault_of(guided, kind, argument)


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("json_schema", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
        ("json_schema", {"type": "string", "maxLength": 10**9}),
        ("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
        ("json_schema", {"enum": [f"v{i}" for i in range(3000)]}),
        ("json_schema", {"type": "array", "items": {"$ref": "#"}}),
        ("json_schema", {"properties": {"minimum": True, "const": {"maximum": 2**60}}}),
        ("json_schema", {"type": "string", "pattern": "^(a+)+$"}),
        ("regex", ""),
        ("regex", "(a|b)*a(a|b){300}"),
        ("regex", "((a*)*)*b"),
        ("lark", 'start: "b" | "a" x\nx: "a" x'),
        ("lark", 'start: ""'),
        ("lark", 'start: "a" | "b" A\nA: /a+/ & /b+/'),
        ("lark", 'start: "a" A |\nA: /a+/ & /b+/'),
        ("lark", 'start: "a" A?\nA: /a+/ & /b+/'),
    ],
)
def test_what_only_looks_hostile_compiles(guided, kind, argument):
    assert fault_of(guided, kind, argument) is None


@pytest.mark.parametrize("schema", [True, {}, "true", "{}"])
def test_true_and_an_empty_schema_are_any_json(guided, tokenizer, schema):
    host = guided_requests.serve([asked(tokenizer, 1, guided.json_schema(schema), 300)])
    assert not host.final(1).error
    text = tokenizer.decode(host.output(1))
    if host.final(1).tensors["finish_reasons"][0, 0] == 1:  # it may be a long one
        json.loads(text)


@pytest.mark.parametrize(
    ("bounds", "read"),
    [
        ({"minimum": -(2**63)}, {"minimum": -(2**63) + 1024}),
        ({"maximum": 2**63 - 1}, {"maximum": 2**63 - 1024}),
        ({"minimum": 2**63 - 1024}, {"minimum": 2**63 - 1024}),
        ({"maximum": 1e30}, {"maximum": 2**63 - 1024}),
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"minimum": 2**53 + 2}, {"minimum": 2**53 + 2}),
        ({"exclusiveMaximum": -(2**53) - 1}, {"exclusiveMaximum": -(2**53) - 2}),
        ({"minimum": 0.1, "maximum": True}, {"minimum": 0.1, "maximum": True}),
        ({"examples": [{"minimum": 10**30}]}, {}),
        ({"properties": {"enum": {"minimum": 3}}}, {"properties": {"enum": {"minimum": 3}}}),
    ],
)  # fmt: skip
def test_bounds_that_are_not_doubles_are_narrowed(bounds, read):
    schema = {"items": [bounds]}
    assert json.loads(SchemaReader(lenient=False).read(json.dumps(schema))) == {"items": [read]}


def test_a_whole_number_of_at_most_2_to_the_53_is_an_integer():
    texts = ("2.0", "9007199254740992.0", "9007199254740994.0", "0.5")
    assert [str(simplest(text)) for text in texts] == ["2", "9007199254740992", *texts[2:]]


# Time and memory ----------------------------------------------------------------------------------


def test_one_that_compiles_for_ever_ends(tokenizer):
    trials = GrammarTrials(tokenizer.to_str(), [0], timeout_s=1.0)
    with pytest.raises(TooSlowError, match=r"more than 1 s"):
        trials.run(GrammarSource("json_schema", json.dumps(ENDLESS)))
    guided = GuidedDecoding(tokenizer, [0], compile_timeout_s=1.0)
    told = r"it takes more than 1 s to compile \(compile_timeout_s\)"
    with pytest.raises(InvalidRequestError, match=told):
        guided.json_schema(ENDLESS).compiled.result()


def recording_popen(processes):
    """A `subprocess.Popen` that keeps those it starts."""

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            processes.append(self)

    return Recorded


def test_neighbors_go_on_while_a_grammar_compiles_for_ever(tokenizer, monkeypatch):
    base = load_guided_decoding(MODEL)
    red = base.choice(["red"])
    red.prepare("cpu").result(60)  # by a process that is not killed below
    guided = GuidedDecoding(tokenizer, sorted(base.end_ids), compile_timeout_s=600.0)
    processes = []
    monkeypatch.setattr(subprocess, "Popen", recording_popen(processes))
    endless, blue = guided.json_schema(ENDLESS), guided.choice(["blue"])
    neighbors = {2, 3}

    def ended(request_id, logits, tokens, stream, client_id):
        """Called for the last neighbor's last token."""
        if len(tokens[0]) == 25:
            assert not endless.compiled.done()
            while not blue.compiled.done():
                time.sleep(0.01)
            while not endless.compiled.done():  # it may not have begun
                for process in processes:
                    process.kill()
                time.sleep(0.2)

    last = InferenceRequest.from_tokens(2, [5] * 6, 20, logits_post_processor=ended)
    host = guided_requests.serve(
        [
            asked(tokenizer, 1, endless),
            last,
            asked(tokenizer, 3, red),
            asked(tokenizer, 4, blue),
        ]
    )
    assert not any(host.final(request_id).error for request_id in neighbors)
    # a CapacityError if the process was killed while it started
    error = host.final(1).error
    assert "logits_post_processor json_schema: " in error and "it takes more than " in error
    assert tokenizer.decode(host.output(3)) == "red"
    assert tokenizer.decode(host.output(4)) == "blue"  # it was compiled next to the other


def test_one_that_takes_too_much_memory_ends_alone(tokenizer, monkeypatch):
    processes = []
    monkeypatch.setattr(subprocess, "Popen", recording_popen(processes))
    trials = GrammarTrials(tokenizer.to_str(), [0], timeout_s=60.0, max_bytes=1 << 28)
    with pytest.raises(NoAnswerError, match="more than 268435456 bytes of memory"):
        trials.run(GrammarSource("lark", "start: /a{1000}/{100000}"))
    trials.run(GrammarSource("regex", "a+"))
    with pytest.raises(RefusedError, match="unclosed group"):
        trials.run(GrammarSource("regex", "("))
    assert len(processes) == 2
    processes[-1].kill()
    processes[-1].wait()
    trials.run(GrammarSource("regex", "b+"))  # another process takes over
    assert len(processes) == 3


def test_processes_of_a_burst_end_once_they_are_idle(tokenizer, monkeypatch):
    """The one used last stays: a new one costs a start."""
    processes = []
    monkeypatch.setattr(subprocess, "Popen", recording_popen(processes))
    trials = GrammarTrials(tokenizer.to_str(), [0], timeout_s=60.0)

    def run_another():
        if len(processes) == 1:
            trials.run(GrammarSource("regex", "b"))
        return True

    trials.run(GrammarSource("regex", "a"), is_wanted=run_another)
    assert [process.poll() for process in processes] == [None, None]  # another burst may come
    monkeypatch.setattr(grammar_trial, "_IDLE_S", 0.0)
    with pytest.raises(RefusedError) as refusal:
        trials.run(GrammarSource("regex", "("))
    assert "unclosed group" in str(refusal.value)
    assert len(processes) == 2 and sorted(p.poll() is None for p in processes) == [False, True]


def test_the_cached_error_of_a_grammar_keeps_nothing_else(tokenizer):
    """Tracebacks hold the grammar's text, which the limit of the cache would not count."""
    compiled = GuidedDecoding(tokenizer, [0]).regex("(").compiled
    error = compiled.exception()
    assert isinstance(error, InvalidRequestError)
    assert [error.__traceback__, error.__context__, error.__cause__] == [None] * 3


@pytest.mark.parametrize("fault", [OSError(24, "Too many open files"), MemoryError()])
def test_without_a_process_for_its_trial_a_grammar_is_refused(tokenizer, monkeypatch, fault):
    """It might take all memory, or never compile. With the next one it is tried again."""

    def refuse(*args, **keywords):
        raise fault

    guided = GuidedDecoding(tokenizer, [0])
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(NotStartedError, match="no process can be started"):
            GrammarTrials(tokenizer.to_str(), [0], 1.0).run(GrammarSource("regex", "("))
        error = guided.regex("ab").compiled.exception()
        assert isinstance(error, CapacityError)
        told = "regex: the grammar cannot be compiled: no process can be started: "
        assert str(error).startswith(f"logits_post_processor {told}")
    guided.regex("ab").compiled.result()


@pytest.mark.parametrize("fault", [TooSlowError("it takes more than 1 s"), NoAnswerError("killed")])
def test_a_grammar_without_an_answer_is_tried_again(tokenizer, monkeypatch, fault):
    """The machine may have been busy."""
    guided, run, tried = GuidedDecoding(tokenizer, [0]), GrammarTrials.run, []

    def busy(*given):
        tried.append(given)
        if len(tried) == 1:
            raise fault
        return run(*given)

    monkeypatch.setattr(GrammarTrials, "run", busy)
    error = guided.regex("ab").compiled.exception()
    assert isinstance(error, InvalidRequestError) and str(fault) in str(error)
    assert [error.__traceback__, error.__context__, error.__cause__] == [None] * 3
    for _ in range(2):
        guided.regex("ab").compiled.result()
    assert len(tried) == 2


def test_an_interpreter_that_ends_at_once_is_reported(tokenizer, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(NotStartedError, match="no process can be started: it ended with status 1"):
        GrammarTrials(tokenizer.to_str(), [0], 1.0).run(GrammarSource("regex", "a"))


# Compilations that nobody wants ------------------------------------------------------------------


def test_a_grammar_that_no_request_uses_is_not_compiled(tokenizer, monkeypatch):
    tried, go_on = [], threading.Event()

    def run(self, source, is_wanted):
        tried.append(source.text)
        while is_wanted() and not go_on.wait(0.01):
            pass
        if not is_wanted():
            raise NoAnswerError("it is not wanted any more")
        return source.text, []

    monkeypatch.setattr(GrammarTrials, "run", run)
    guided = GuidedDecoding(tokenizer, [0])
    num_trials = guided._own.get().threads._max_workers
    wanted = guided.regex("wanted")
    running = [guided.regex(f"x{i}") for i in range(num_trials - 1)]
    waiting = [guided.regex(f"y{i}") for i in range(50)]
    also_wanted = guided.regex("also wanted")
    del waiting  # before its turn
    del running  # in its turn: that of the last one is now
    while "also wanted" not in tried:
        time.sleep(0.01)
    go_on.set()
    assert wanted.compiled.result() and also_wanted.compiled.result()
    assert not any(text.startswith("y") for text in tried)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_host_compiles_for_itself(tokenizer):
    guided = GuidedDecoding(tokenizer, [0])
    guided.regex("before").compiled.result()
    forked = os.fork()
    if not forked:
        try:
            os._exit(0 if guided.regex("after").compiled.result(60) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert guided.regex("after").compiled.result()


def test_an_equal_grammar_that_waits_is_the_same(guided):
    first, second = guided.regex("(a|b){3}c"), guided.regex("(a|b){3}c")
    assert first.compiled is second.compiled
    assert guided.regex("(a|b){3}c").compiled is first.compiled
    assert first.compiled.result()


def test_the_size_of_a_grammar_is_bounded(guided):
    with pytest.raises(ValueError, match="options has 10001 texts, at most 10000 are allowed"):
        guided.choice(["a"] * 10_001)
    for make in (guided.regex, guided.lark, guided.json_schema):
        with pytest.raises(ValueError, match="has 1048577 bytes, at most 1048576 are allowed"):
            make("a" * (2**20 + 1))


def test_a_mask_of_a_parser_that_has_failed_is_an_error(guided):
    """The mask of a failed parser would permit the end."""

    class Failed:
        def unsafe_compute_mask_ptr(self, address, size):
            pass

        def is_error(self):
            return True

        def get_error(self):
            return "lexer error: too many expressions constructed"

    session = GuidedSession(64, frozenset([0]), None)
    masks = np.ones((1, 2), dtype=np.int32)
    with pytest.raises(LogitsError, match="generated token 4: lexer error: too many"):
        session._compute(masks, 0, frozenset(), _Progress(Failed(), 3))


def test_a_dead_end_of_a_grammar_is_an_error_not_the_end_of_the_text(guided, tokenizer):
    """The parser then permits the end of a text that is none of the grammar's."""
    dead_end = guided.lark('start: "b" "b" x | "b" "b" "b" x\nx: "a" x')
    host = guided_requests.serve([asked(tokenizer, 1, dead_end, 30)])
    assert "LogitsError: " in host.final(1).error and "no token continues" in host.final(1).error


# Random schemas -----------------------------------------------------------------------------------

NUMBERS = [0, -1, 1.5, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**30, 1e300, 10**9]
TYPES = ["integer", "number", "string", "array", "object", "boolean", "null", "nonsense"]


def random_schema(chance, depth=3):
    schema = {"type": chance.choice(TYPES)} if chance.random() < 0.8 else {}
    keywords = {
        "minimum": lambda: chance.choice(NUMBERS),
        "exclusiveMaximum": lambda: chance.choice(NUMBERS),
        "multipleOf": lambda: chance.choice([0, 3, 0.01, -1, "x"]),
        "minLength": lambda: chance.choice(NUMBERS),
        "maxItems": lambda: chance.choice(NUMBERS),
        "pattern": lambda: chance.choice(["(", "a{1000}", ".*x.*", r"[^\s\S]", "^(a|b)*$", 5]),
        "enum": lambda: [chance.choice([*NUMBERS, "a", None, [], {}]) for _ in range(2)],
        "const": lambda: chance.choice([*NUMBERS, "a", {"b": 2**70}]),
        "items": lambda: random_schema(chance, depth - 1),
        "anyOf": lambda: [random_schema(chance, depth - 1) for _ in range(chance.randrange(3))],
        "allOf": lambda: [random_schema(chance, depth - 1) for _ in range(chance.randrange(3))],
        "properties": lambda: {"a": random_schema(chance, depth - 1), "const": True},
        "required": lambda: chance.choice([["a"], ["zz"], "a", [5]]),
        "$ref": lambda: chance.choice(["#", "#/none", "http://localhost/none.json", 5]),
    }
    for name in chance.sample(sorted(keywords), chance.randrange(3) if depth else 0):
        schema[name] = keywords[name]()
    return schema


def test_a_random_schema_works_or_is_an_error_by_name(guided, tokenizer):
    """And what works gives texts that fit it."""
    chance = random.Random(7)
    schemas = [random_schema(chance) for _ in range(NUM_SCHEMAS)]
    requests = [
        asked(tokenizer, i, guided.json_schema(schema), 60, random_seed=i)
        for i, schema in enumerate(schemas)
    ]
    host = guided_requests.serve(requests)
    worked = 0
    for i, schema in enumerate(schemas):
        error = host.final(i).error
        if error:
            assert error.startswith(("InvalidRequestError: logits_post", "LogitsError: ")), error
        elif host.final(i).tensors["finish_reasons"][0, 0] == 1:
            worked += 1
            text = json.loads(tokenizer.decode(host.output(i)))
            with contextlib.suppress(jsonschema.SchemaError):  # the parser reads only what counts
                jsonschema.validate(text, schema)
    assert worked > 2


def test_a_kept_error_keeps_no_stack_of_its_requests(guided):
    """It is raised for every request that brings the grammar, and each would leave its stack."""

    def frames_after_a_request():
        grammar = guided.regex("(?=never)")
        with pytest.raises(InvalidRequestError) as told:
            grammar.prepare("cpu").result(timeout=60)
        return len(list(traceback.walk_tb(told.value.__traceback__)))

    first = frames_after_a_request()
    assert [frames_after_a_request() for _ in range(3)] == [first] * 3
    assert guided.regex("(?=never)").prepare("cpu").exception().__traceback__ is None
