"""Grammars beside bad words: both hold, and where they leave nothing that is told."""

import re
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
from guided_requests import allowed, asked, encoded, ids, serve, text
from text_checkpoint import byte_tokenizer

from gptmanager import GuidedDecoding
from gptmanager.callbacks import BannedTexts
from gptmanager.errors import LogitsError


def test_what_completes_a_word_may_not_come(byte_guided):
    grammar = byte_guided.regex("[abc]{4}|x")
    some = grammar.without(BannedTexts(byte_tokenizer()).bind(["ab", "cc", "q"]))
    prompt = encoded("aq")
    assert allowed(some, prompt) == ids("abcx")
    assert allowed(some, [*prompt, *encoded("a")]) == ids("ac")
    assert allowed(some, [*prompt, *encoded("c")]) == ids("ab")
    assert allowed(grammar, [*prompt, *encoded("a")]) == ids("abc")
    after_a = encoded("qa")  # the end of the prompt is text, too
    assert allowed(byte_guided.regex("b|c").without(some.bans), after_a) == ids("c")


def test_an_error_names_both_causes_if_no_token_is_left(byte_guided):
    bans = BannedTexts(byte_tokenizer()).bind(["ed"])
    red = byte_guided.choice(["red"]).without(bans)
    history = encoded("aare")
    with pytest.raises(LogitsError, match="as generated token 3 without a bad word"):
        allowed(red, history)


def test_tokens_beyond_a_grammars_masks_are_left_alone(byte_guided):
    class Bans:
        def prepare(self, device):
            done = Future()
            done.set_result(None)
            return done

        def banned_after(self, history):
            return np.array([encoded("a")[0], 10**6], dtype=np.int64)

    assert allowed(byte_guided.regex("[ab]").without(Bans()), [1, 2]) == ids("b")


def test_outputs_fit_and_hold_no_word_however_they_are_scheduled(tokenizer):
    guided, pattern = GuidedDecoding(tokenizer, [0]), r"( [a-z]{2,6}){4}\."
    bans = BannedTexts(tokenizer).bind(["a", "th", "e "])
    grammar = guided.regex(pattern).without(bans)
    requests = [asked(tokenizer, i, grammar, 60) for i in range(6)]
    for host in (serve(requests), serve(requests, max_tokens=240, run_ahead=1)):
        for i in range(6):
            found = text(tokenizer, host, i).removesuffix("<|end|>")
            assert re.fullmatch(pattern, found) and not re.search("a|th|e ", found), found


@pytest.mark.parametrize("first_fails", [False, True])
def test_a_request_waits_for_the_words_too(byte_guided, first_fails):
    class Bans:
        ready = Future()

        def prepare(self, device):
            return self.ready

    bans = Bans()
    bans.ready = Future()
    grammar = byte_guided.choice(["red"]).without(bans)
    grammar.compiled.exception()
    prepared = grammar.prepare("cpu")
    assert not prepared.done()
    if first_fails:
        bans.ready.cancel()
        bans.ready.set_running_or_notify_cancel()
        assert isinstance(prepared.exception(30), CancelledError)
    else:
        bans.ready.set_result(None)
        assert prepared.result(30) is None


def test_beams_hold_no_word(tokenizer):
    guided = GuidedDecoding(tokenizer, [0])
    options = ["red ball", "blue ball", "green ball", "red car"]
    grammar = guided.choice(options).without(BannedTexts(tokenizer).bind(["red b", "en"]))
    search = {"beam_width": 4, "num_return_sequences": 2, "temperature": 1.0}
    host = serve([asked(tokenizer, 1, grammar, 30, **search)], max_beam_width=4)
    final = host.final(1)
    assert not final.error
    lengths = final.tensors["sequence_length"][0].tolist()
    rows = final.tensors["output_ids"][0]
    found = {tokenizer.decode(rows[beam, :length].tolist()) for beam, length in enumerate(lengths)}
    assert found == {"blue ball", "red car"}
