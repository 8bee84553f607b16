"""Guided decoding: outputs that fit their grammar, whatever the model and the schedule."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from concurrent.futures import Future

import jsonschema
import pytest
from fuzz import ALL_CASES
from guided_requests import SCHEMA, allowed, asked, encoded, ids, serve, text
from random_schemas import random_root
from text_checkpoint import END_ID, byte_tokenizer, save_text_checkpoint
from tokenizers import Tokenizer

from gptmanager import (
    GptManager,
    GuidedDecoding,
    InferenceRequest,
    ModelType,
    OptionalParams,
)
from gptmanager.decoding.guided.grammar_masks import Grammar
from gptmanager.environment.distribution import install_command
from gptmanager.errors import ConfigError, InvalidRequestError
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.testing import RecordingCallbacks, ScriptedModel

# What may come next -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generated", "letters", "ends"),
    [
        ("", "a", 0),
        ("a", "a", 0),
        ("aa", "ab", 1),
        ("aaa", "ab", 1),
        ("aaaa", "b", 1),
        ("aab", "", 1),
    ],
)
def test_the_end_is_allowed_exactly_where_the_grammar_accepts(
    byte_guided, generated, letters, ends
):
    regex = byte_guided.regex("a{2,4}b?")
    expected = ids(letters) | ({END_ID} if ends else set())
    assert allowed(regex, [7, 8, *encoded(generated)]) == expected
    # another end_id than the tokenizer's takes its place, beside it
    own = allowed(regex, [7, 8, *encoded(generated)], end_id=9)
    assert own - {END_ID} == ids(letters) | ({9} if ends else set())
    # and none of the request's own leaves that of the tokenizer
    assert allowed(regex, [7, 8, *encoded(generated)], end_id=-1) == expected


def test_only_the_end_follows_the_end(byte_guided):
    regex = byte_guided.regex("ab?")
    assert allowed(regex, [7, 8, *encoded("a"), END_ID], end_id=-1) == {END_ID}
    assert allowed(regex, [7, 8, *encoded("a"), END_ID, END_ID], end_id=-1) == {END_ID}


@pytest.mark.parametrize("vocab_size", [END_ID + 1, 300, 320, 1000])
def test_a_vocabulary_beyond_the_tokenizers_is_forbidden(byte_guided, vocab_size):
    assert allowed(byte_guided.choice(["x", "y"]), [1, 2], vocab_size=vocab_size) == ids("xy")


def test_an_end_beyond_the_tokenizers_vocabulary(byte_guided):
    """Models have more rows than tokens, and one of them may be the end."""
    regex = byte_guided.regex("ab?")
    for end_id in (300, 999):
        assert allowed(regex, [7, 8], end_id=end_id, vocab_size=1000) == ids("a")
        after = allowed(regex, [7, 8, *encoded("a")], end_id=end_id, vocab_size=1000)
        assert after == ids("b") | {END_ID, end_id}
        ended = allowed(regex, [7, 8, *encoded("a"), end_id], end_id=end_id, vocab_size=1000)
        assert ended == {end_id}


def test_without_end_ids_they_are_the_end_of_text_tokens_of_the_tokenizer(tokenizer):
    assert GuidedDecoding(tokenizer, [1, 3]).end_ids == {1, 3}
    assert GuidedDecoding(tokenizer).end_ids == {tokenizer.token_to_id("<|endoftext|>")}


def test_a_panic_harms_its_own_row(guided, tokenizer):
    class Panic(BaseException):
        """Replaces a panic in Rust, which is not an Exception."""

    class Broken:
        def deep_copy(self):
            raise Panic("index out of bounds")

    broken = Grammar(guided, "regex", Future())
    broken.compiled.set_result(Broken())
    fine = guided.choice(["red"])
    host = serve([asked(tokenizer, 1, broken), asked(tokenizer, 2, fine)])
    text_of_it = "CallbackError: logits_post_processor guided decoding raised Panic: index out"
    assert host.final(1).error.startswith(text_of_it)
    assert text(tokenizer, host, 2) == "red"


def test_a_token_that_does_not_fit_is_reported(byte_guided):
    with pytest.raises(Exception, match=r"guided decoding: token \d+ at index 1 of the out"):
        allowed(byte_guided.regex("ab"), [7, 8, *encoded("ax")])


def test_a_longer_prompt_is_not_the_output(byte_guided):
    assert allowed(
        byte_guided.choice(["xy"]), [*encoded("zzz"), *encoded("x")], prompt_len=3
    ) == ids("y")


def test_a_history_that_is_shorter_than_before_is_gone_back_to(byte_guided):
    """Tokens that were never confirmed are forgotten in a pause."""
    choice = byte_guided.choice(["abc", "axe"])
    handle = RequestProcessor(choice)

    def after(letters, *ends):
        return allowed(choice, [7, 8, *encoded(letters), *ends], handle=handle, end_id=-1)

    assert after("abc") == {END_ID}
    assert after("a") == ids("bx")
    assert after("axe", END_ID) == {END_ID}
    assert after("ax") == ids("e")


# Whole managers -----------------------------------------------------------------------------------


def test_every_output_of_random_schemas_validates(guided, tokenizer):
    schemas = [random_root(seed) for seed in range(200 if ALL_CASES else 80)]
    requests = [
        # so hot that digits, which may go on for ever, do not
        asked(tokenizer, i, guided.json_schema(schema), 400, temperature=3.0)
        for i, schema in enumerate(schemas)
    ]
    host = serve(requests)
    for i, schema in enumerate(schemas):
        written = json.loads(text(tokenizer, host, i).removesuffix("<|endoftext|>"))
        jsonschema.validate(written, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("kind", "argument", "pattern"),
    [
        ("regex", r"[a-c]{2,5}-\d+", r"[a-c]{2,5}-\d+"),
        ("regex", r"(?i)größe: (klein|groß)", r"(?i)größe: (klein|groß)"),
        ("choice", ["red", "blue kite", 'say "yes"', "back\\slash\n"], None),
        ("lark", 'start: "x" item+\nitem: "a" | "(" item ")"', r"x([a()])+"),
    ],
)
def test_the_kinds_of_grammars(guided, tokenizer, kind, argument, pattern, caplog):
    processor = getattr(guided, kind)(argument)
    host = serve([asked(tokenizer, i, processor) for i in range(6)])
    for i in range(6):
        written = text(tokenizer, host, i)
        if pattern is None:
            assert written in argument
        else:
            assert re.fullmatch(pattern, written), written
    assert "not enforced" not in caplog.text


def test_json_schemas_as_rules_of_a_grammar(guided, tokenizer):
    pairs = {"enum": [{"a": 1, "b": 2}, [3, 4]]}
    number = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
    processor = guided.lark(
        'start: "<" pair "|" number ">"', schemas={"pair": pairs, "number": number}
    )
    host = serve([asked(tokenizer, i, processor) for i in range(6)])
    for i in range(6):
        assert re.fullmatch(r'<({"a": 1, "b": 2}|\[3, 4\])\|[1-9]\d*>', text(tokenizer, host, i))
    for wrong in ("{", False, {"minimum": 2**63}):
        with pytest.raises(InvalidRequestError):
            guided.lark("start: x", schemas={"x": wrong}).compiled.result()


def test_white_space_comes_only_if_it_may(guided, tokenizer):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    loose = guided.json_schema(json.dumps(schema), whitespace_flexible=True)
    tight = asked(tokenizer, 1, guided.json_schema(schema))
    host = serve([tight, *(asked(tokenizer, i, loose, temperature=9.0) for i in range(2, 8))])
    assert " " not in text(tokenizer, host, 1)
    flexible = [text(tokenizer, host, i) for i in range(2, 8)]
    assert all(len(json.loads(written)) == 3 for written in flexible)
    assert any(re.search(r"\s", written) for written in flexible)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_neither_pauses_nor_neighbors_show(guided, tokenizer, run_ahead):
    processor = guided.json_schema(SCHEMA)
    requests = [asked(tokenizer, i, processor, 60) for i in range(4)]
    free = asked(tokenizer, 9, None, 40, end_id=-1)
    alone = [serve([request]).output(request.request_id) for request in (*requests, free)]
    host = serve(
        [*requests, free], max_tokens=208, max_num_tokens=32, run_ahead=run_ahead, max_seq_len=80
    )
    pauses = [host.final(i).tensors["request_metrics"][3] for i in (0, 1, 2, 3, 9)]
    assert sum(pauses) > 0
    assert [host.output(i) for i in (0, 1, 2, 3, 9)] == alone
    for i in range(4):
        jsonschema.validate(json.loads(text(tokenizer, host, i)), SCHEMA)


def test_a_conflict_of_a_grammar_with_other_inputs_is_reported(byte_guided, tmp_path):
    """min_length forbids the end where the grammar permits nothing else."""
    source = save_text_checkpoint(tmp_path / "model")
    more = {"end_id": END_ID, "min_length": 50}
    red = byte_guided.choice(["red"])
    host = serve(
        [
            InferenceRequest.from_tokens(1, [5], 60, logits_post_processor=red, **more),
            InferenceRequest.from_tokens(2, [5], 9),
        ],
        source,
    )
    error = host.final(1).error
    assert error.startswith("LogitsError: no token is possible as generated token 4 ")
    assert "logits_post_processor choice, min_length" in error and not host.final(2).error


def test_without_an_end_id_ends_follow(guided, tokenizer):
    host = serve([asked(tokenizer, 1, guided.choice(["red"]), 9, end_id=-1)])
    red = tokenizer.encode("red").ids
    assert host.output(1)[-5:] == [0] * 5
    assert tokenizer.decode(host.output(1)) == "red" and len(red) < 5


# Compilation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "argument", "fault"),
    [
        ("json_schema", {"type": "objec"}, "Invalid type: objec"),
        ("json_schema", "{", "EOF while parsing"),
        ("regex", "(a", "unclosed group"),
        ("lark", "start: foo", 'unknown name: "foo"'),
        ("lark", "", "Empty grammar"),
    ],
)
def test_a_grammar_that_is_wrong_ends_its_request_with_its_fault(
    guided, tokenizer, kind, argument, fault
):
    host = serve(
        [asked(tokenizer, 1, getattr(guided, kind)(argument)), asked(tokenizer, 2, None, 5)]
    )
    assert host.final(1).error.startswith(f"InvalidRequestError: logits_post_processor {kind}: ")
    assert fault in host.final(1).error
    assert not host.final(2).error


def test_large_grammars_are_kept_only_while_there_is_room(monkeypatch):
    monkeypatch.setattr("gptmanager.decoding.guided.guided.MAX_KEPT_BYTES", 500)
    guided = GuidedDecoding(byte_tokenizer(), [END_ID])
    for number in range(9):
        guided.regex(f"{number}" + "a" * 99).compiled.result(20)
        assert len(guided._own.get().compiled) == min(number + 1, 5)
    first, *_ = guided._own.get().compiled
    assert first.text.startswith("4")
    guided.regex("b" * 501).compiled.result(20)  # it serves its own request alone
    assert not guided._own.get().compiled


def test_a_number_of_grammars_that_no_request_could_wait_for_is_refused():
    with pytest.raises(ConfigError, match="max_grammars = -1 must be an integer of at least 1"):
        GuidedDecoding(byte_tokenizer(), [END_ID], max_grammars=-1)


def test_equal_grammars_are_compiled_once_and_few_are_kept():
    guided = GuidedDecoding(byte_tokenizer(), [END_ID], max_grammars=2)
    first = guided.json_schema(SCHEMA)
    assert guided.json_schema(dict(SCHEMA)).compiled is first.compiled
    assert first.compiled.result()
    with pytest.raises(InvalidRequestError, match="#/not"):  # it cannot be enforced
        guided.json_schema({"type": "string", "not": {"pattern": "a"}}).compiled.result()
    for pattern in ("a", "b"):
        guided.regex(pattern).compiled.result()
    assert guided.json_schema(SCHEMA).compiled is not first.compiled


def test_a_compilation_takes_no_time_of_others(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    compile_it = GuidedDecoding._compile

    def slowly(self, source, is_wanted):
        begun.set()
        assert go_on.wait(20)
        return compile_it(self, source, is_wanted)

    monkeypatch.setattr(GuidedDecoding, "_compile", slowly)
    guided = GuidedDecoding(byte_tokenizer(), [END_ID])
    host = RecordingCallbacks()
    with GptManager(
        ScriptedModel(lambda history: history[-1], vocab_size=END_ID + 1),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(max_batch_size=4, exclude_input_in_output=True),
        **host.keywords(),
    ) as manager:
        host.manager = manager
        processor = guided.choice(["yes"])
        assert begun.wait(30)
        for i in (1, 2):
            host.submit(
                InferenceRequest.from_tokens(
                    i, [5], 9, end_id=END_ID, logits_post_processor=processor
                )
            )
        host.submit(InferenceRequest.from_tokens(3, [5], 30))
        assert host.final(3).tensors["sequence_length"].tolist() == [[30]]
        assert manager.explain(1).reason == "preparing"
        host.stop(2)
        manager.notify()
        host.submit(InferenceRequest.from_tokens(4, [5], 3))  # an iteration, so that it is polled
        assert host.final(2).tensors["finish_reasons"].tolist() == [[5]]
        go_on.set()
        assert not host.final(1).error
        assert byte_tokenizer().decode(host.output(1)) == "yes"


def test_a_choice_of_many_texts_of_any_characters(guided):
    chance = random.Random(3)
    letters = [
        chr(c)
        for c in (*range(0x79), *range(0x7A, 0x300), 0x2028, 0xFEFF, 0xFFFF, 0x1F600, 0x10FFFF)
    ]
    options = ["".join(chance.choices(letters, k=20)) for _ in range(9000)]
    options += [f"x{letter}" for letter in letters]
    options += ["a" * length for length in range(10_000 - len(options))]
    matcher = guided.choice(options).compiled.result()
    assert len(options) == 10_000
    for option in (options[8999], options[-1], *(f"x{letter}" for letter in letters)):
        ids = guided._tokenizer.tokenize_str(option)
        own = matcher.deep_copy()
        assert own.try_consume_tokens(ids) == len(ids) and own.is_accepting(), option
    assert not matcher.deep_copy().try_consume_tokens(guided._tokenizer.tokenize_str("y"))


def test_llguidance_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("guided"))):
        GuidedDecoding(byte_tokenizer(), [END_ID])


def test_a_tokenizer_that_llguidance_cannot_use_is_refused():
    with pytest.raises(ConfigError, match="llguidance cannot use the tokenizer"):
        GuidedDecoding(byte_tokenizer(), [5_000_000])


def test_no_options_are_refused(guided):
    with pytest.raises(ValueError, match="`options` is empty"):
        guided.choice([])
    with pytest.raises(TypeError, match="options must be a list of texts, got the text 'red'"):
        guided.choice("red")


def test_a_recorded_run_replays(guided, tokenizer, tmp_path):
    path = tmp_path / "run.jsonl"
    serve(
        [
            asked(tokenizer, 1, guided.json_schema(SCHEMA)),
            asked(tokenizer, 2, guided.lark("start: foo")),
            asked(tokenizer, 3, None, 5),
        ],
        recording_path=path,
    )
    recording = read_recording(path)
    report = replay(recording)
    assert report.divergence is None and report.compared == len(recording.iterations)


def test_a_tokenizer_may_be_any(tmp_path):
    """The tokenizer may be loaded from a file, and have special tokens of its own."""
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    guided = GuidedDecoding(Tokenizer.from_file(str(path)))
    assert allowed(guided.choice(["x"]), [1, 2]) == ids("x")
