"""Guided decoding of several beams: each follows its own text, wherever the search takes it."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future

import guided_requests
import jsonschema
import numpy as np
import pytest
import torch
from fuzz import ALL_CASES
from guided_requests import MODEL, SCHEMA
from random_schemas import random_root
from text_checkpoint import END_ID, byte_tokenizer, save_text_checkpoint

from gptmanager import REQUEST_METRICS, InferenceRequest
from gptmanager.decoding.guided.guided import Grammar

LENGTH, CANCELLED = 3, 5
PATTERN = r"[a-c]{2,5}-\d{1,3}"


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    """One token a byte, so that every text has one spelling."""
    return save_text_checkpoint(tmp_path_factory.mktemp("bytes") / "model")


def serve(requests, source=MODEL, max_tokens=80000, **options):
    options = {"max_batch_size": 16, "max_beam_width": 8, **options}
    return guided_requests.serve(requests, source, max_tokens=max_tokens, **options)


def asked(tokenizer, request_id, processor, max_new_tokens=300, **more):
    """Not sampled, but for `more`."""
    more = {"temperature": None, "random_seed": None, **more}
    return guided_requests.asked(tokenizer, request_id, processor, max_new_tokens, **more)


def beams(host, request_id):
    """Tokens and finish reason of each beam that there is."""
    final = host.final(request_id)
    assert not final.error, final.error
    rows = final.tensors["output_ids"][0].tolist()
    lengths = final.tensors["sequence_length"][0].tolist()
    reasons = final.tensors["finish_reasons"][0].tolist()
    found = zip(rows, lengths, reasons, strict=True)
    return [(row[:length], reason) for row, length, reason in found if length]


def texts(tokenizer, host, request_id):
    """Those of beams that have ended by themselves."""
    return [tokenizer.decode(row) for row, reason in beams(host, request_id) if reason == 1]


@pytest.mark.parametrize("kind", ["beam_width", "num_return_sequences"])
def test_every_beam_of_choices_and_patterns_is_one_of_them(guided, tokenizer, kind):
    options = ["red", "reddish", "blue kite", 'say "yes"', "green"]
    more = {"temperature": 2.0, "random_seed": 4} if kind != "beam_width" else {}
    host = serve(
        [
            asked(tokenizer, 1, guided.choice(options), **{kind: 4}, **more),
            asked(tokenizer, 2, guided.regex(PATTERN), **{kind: 8}, **more),
            asked(tokenizer, 3, guided.choice(["red", "blue"]), 20, **{kind: 2}, end_id=-1, **more),
        ]
    )
    chosen, matching = texts(tokenizer, host, 1), texts(tokenizer, host, 2)
    assert len(chosen) == 4 and set(chosen) <= set(options)
    assert len(matching) == 8 and all(re.fullmatch(PATTERN, text) for text in matching)
    assert len(set(matching)) > 4
    for row, reason in beams(host, 3):  # behind the end comes the tokenizer's end, to the last
        assert len(row) == 20 and reason == LENGTH
        assert tokenizer.decode(row) in ("red", "blue")


def scores(source, prompt, options, len_penalty):
    """By option: log probability, each token's among those that continue some option."""
    tokenizer = byte_tokenizer()
    written = [[*tokenizer.encode(option).ids, END_ID] for option in options]
    requests = [
        InferenceRequest.from_tokens(i, [*prompt, *row], 1, return_context_logits=True)
        for i, row in enumerate(written)
    ]
    host = serve(requests, source)
    found = []
    for i, row in enumerate(written):
        logits = host.final(i).tensors["context_logits"][0, len(prompt) - 1 :].double()
        total = 0.0
        for place, token in enumerate(row):
            allowed = sorted({other[place] for other in written if other[:place] == row[:place]})
            scored = torch.log_softmax(logits[place, allowed], dim=0)
            total += scored[allowed.index(token)].item()
        found.append((total / len(row) ** len_penalty, total, options[i]))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("len_penalty", [0.0, 1.0, 2.0])
def test_the_best_of_a_choice_are_found(bytes_model, byte_guided, len_penalty):
    options = ["ab", "abc", "abd", "b", "bcdef", "cab", "ca", "xyz"]
    tokenizer = byte_tokenizer()
    expected = scores(bytes_model, [5, 6, 7], options, len_penalty)
    more = {"end_id": END_ID, "len_penalty": len_penalty, "early_stopping": 2}
    request = InferenceRequest.from_tokens(
        1,
        [5, 6, 7],
        20,
        beam_width=8,
        return_log_probs=True,
        include_stop_in_output=True,  # so that the end is in the sum
        logits_post_processor=byte_guided.choice(options),
        **more,
    )
    narrow = InferenceRequest.from_tokens(
        2,
        [5, 6, 7],
        20,
        beam_width=8,
        num_return_sequences=3,
        logits_post_processor=byte_guided.choice(options),
        **more,
    )
    host = serve([request, narrow], bytes_model)
    best = [option for _, _, option in expected]
    assert [tokenizer.decode(row) for row, _ in beams(host, 1)] == best
    assert [tokenizer.decode(row) for row, _ in beams(host, 2)] == best[:3]
    totals = host.final(1).tensors["cum_log_probs"][0].tolist()
    np.testing.assert_allclose(totals, [total for _, total, _ in expected], rtol=1e-4, atol=1e-5)


def test_a_search_with_nothing_left_to_find_is_over(guided, tokenizer):
    """A grammar with one text has one beam; the other beams never exist."""
    host = serve([asked(tokenizer, 1, guided.choice(["red"]), 200, beam_width=4)])
    assert texts(tokenizer, host, 1) == ["red"]
    final = host.final(1).tensors
    assert final["sequence_length"][0, 1:].tolist() == [0, 0, 0]


def test_what_other_inputs_forbid_ends_beams(bytes_model, byte_guided):
    """min_length forbids the end where the grammar permits nothing else."""
    red = byte_guided.choice(["red", "green"])
    more = {"end_id": END_ID, "logits_post_processor": red}
    host = serve(
        [
            InferenceRequest.from_tokens(1, [5], 60, beam_width=3, min_length=5, **more),
            InferenceRequest.from_tokens(2, [5], 60, beam_width=3, min_length=50, **more),
            InferenceRequest.from_tokens(
                3, [5], 60, num_return_sequences=2, temperature=1.0, min_length=50, **more
            ),
            InferenceRequest.from_tokens(4, [5], 9, beam_width=2),
        ],
        bytes_model,
    )
    assert texts(byte_tokenizer(), host, 1) == ["green"]
    for request_id in (2, 3):
        error = host.final(request_id).error
        assert error.startswith("LogitsError: no token is possible as generated token 6 ")
        assert "logits_post_processor choice, min_length" in error
    assert not host.final(4).error


def test_neither_pauses_nor_neighbors_show_in_sampled_texts(guided, tokenizer):
    more = {"num_return_sequences": 3, "temperature": 1.5}
    requests = [
        asked(tokenizer, i, guided.regex(r"([A-Z][a-z]{5,9} ){6}\d"), 60, random_seed=i, **more)
        for i in range(4)
    ]
    free = asked(tokenizer, 9, None, 40, end_id=-1)
    alone = [beams(serve([request]), request.request_id) for request in (*requests, free)]
    host = serve([*requests, free], max_tokens=224, max_num_tokens=32, max_seq_len=80)
    ids = (0, 1, 2, 3, 9)
    assert sum(host.final(i).tensors["request_metrics"][3].item() for i in ids) > 0
    assert [beams(host, i) for i in ids] == alone


def test_a_grammar_that_fails_harms_its_own_request(guided, tokenizer):
    class Panic(BaseException):
        """Replaces a panic in Rust, which is not an Exception."""

    class Broken:
        def deep_copy(self):
            raise Panic("index out of bounds")

    panics = Grammar(guided, "regex", Future())
    panics.compiled.set_result(Broken())
    host = serve(
        [
            asked(tokenizer, 1, panics, beam_width=3),
            asked(tokenizer, 2, guided.lark("start: foo"), beam_width=2),
            asked(tokenizer, 3, guided.choice(["red", "blue"]), beam_width=2),
        ]
    )
    assert "guided decoding raised Panic: index out" in host.final(1).error
    assert 'unknown name: "foo"' in host.final(2).error
    assert sorted(texts(tokenizer, host, 3)) == ["blue", "red"]


# Schemas, brute force, and pauses ----------------------------------------------------------------


def beams_of(host, request_id):
    """(tokens without the end, cumulative log probability) of each beam that there is."""
    final = host.final(request_id)
    assert not final.error, final
    tensors = final.tensors
    lengths = tensors["sequence_length"][0].tolist()
    scores = tensors["cum_log_probs"][0].tolist()
    rows = tensors["output_ids"][0].tolist()
    return [
        (tuple(row[:length]), score)
        for row, length, score in zip(rows, lengths, scores, strict=True)
        if score > -float("inf")
    ]


def searched(tokenizer, request_id, processor, width, **more):
    more = {"return_log_probs": True, "max_new_tokens": 200, **more}
    return asked(tokenizer, request_id, processor, beam_width=width, **more)


def test_every_beam_of_random_schemas_validates(guided, tokenizer):
    schemas = [random_root(seed) for seed in range(40 if ALL_CASES else 20)]
    requests = [
        searched(tokenizer, seed, guided.json_schema(schema), 2 + seed % 3)
        for seed, schema in enumerate(schemas)
    ]
    host = serve(requests, max_beam_width=4, max_batch_size=8)
    num_ended = 0
    for seed, schema in enumerate(schemas):
        final = host.final(seed)
        reasons = final.tensors["finish_reasons"][0].tolist()
        beams = beams_of(host, seed)
        for (tokens, _), reason in zip(beams, reasons, strict=False):
            if reason == 1:
                num_ended += 1
                value = json.loads(tokenizer.decode(tokens, skip_special_tokens=False))
                jsonschema.validate(value, schema)
    assert num_ended > 1.5 * len(schemas)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_beams_are_the_best_of_a_choice(byte_guided, tmp_path, run_ahead):
    """One token a byte, so that each text is one sequence of tokens, and all of them are known."""
    model = save_text_checkpoint(tmp_path / "model")
    tokenizer = byte_tokenizer()
    options = ["red", "a red ball", "a ball", "blue", "sun", "a red kite"]
    widths = {6: options, 3: options, 4: options[:2]}
    requests = [
        searched(tokenizer, width, byte_guided.choice(texts), width, end_id=END_ID, len_penalty=0.0)
        for width, texts in widths.items()
    ]
    host = serve(requests, model, max_beam_width=6, run_ahead=run_ahead)
    found = {
        width: [(tokenizer.decode(tokens), score) for tokens, score in beams_of(host, width)]
        for width in widths
    }
    for width, texts in widths.items():
        scores = [score for _, score in found[width]]
        assert scores == sorted(scores, reverse=True)
        if width >= len(texts):  # they are all that there is
            assert sorted(text for text, _ in found[width]) == sorted(texts)
            assert sum(np.exp(scores)) == pytest.approx(1, abs=1e-3)
    # a narrower search finds some of them, as probable as they are
    assert len(found[3]) == 3 and set(dict(found[3])) <= set(options)
    for text, score in found[3]:
        assert score == pytest.approx(dict(found[6])[text], abs=1e-4)


def test_neither_pauses_nor_neighbors_show_in_beams(guided, tokenizer, monkeypatch):
    monkeypatch.setattr(
        "gptmanager.assembly.blueprint._START_HEADROOM_STEPS", 0
    )  # so that some are paused
    grammars = [guided.json_schema(SCHEMA), guided.regex("[a-c]{30,50}x?"), None]

    def requests():
        return [searched(tokenizer, i, grammars[i % 3], 3, max_new_tokens=60) for i in range(9)]

    alone = [serve([request], max_beam_width=3) for request in requests()]
    tight = serve(requests(), max_beam_width=3, max_tokens=240, max_batch_size=4)
    pauses = REQUEST_METRICS.index("pauses")
    assert any(tight.final(i).tensors["request_metrics"][pauses] for i in range(9))
    for request, host in zip(requests(), alone, strict=True):
        found, expected = (beams_of(h, request.request_id) for h in (tight, host))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([s for _, s in expected], abs=1e-4)


def test_several_texts_of_one_prompt_keep_to_the_grammar(guided, tokenizer):
    request = guided_requests.asked(
        tokenizer, 1, guided.json_schema(SCHEMA), num_return_sequences=4
    )
    host = serve([request], max_beam_width=4)
    final = host.final(1)
    assert not final.error
    rows = final.tensors["output_ids"][0]
    for row, length in zip(rows, final.tensors["sequence_length"][0], strict=True):
        jsonschema.validate(json.loads(tokenizer.decode(row[:length].tolist())), SCHEMA)
