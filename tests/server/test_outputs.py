"""One output from its tokens: where it ends, and what is given out when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmanager import FinishReason
from gptmanager.callbacks import load_tokenizer
from gptmanager.server.text.log_probs import TokenLogProb
from gptmanager.server.text.outputs import Ends, Output

TOKENIZER = load_tokenizer("examples/tiny_llama")
END = 0
TEXTS = st.text(alphabet="ab€ \n", max_size=12)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3)


def pieces_of(items, cuts):
    ends = sorted({min(cut, len(items)) for cut in cuts} | {len(items)})
    return [items[a:b] for a, b in zip([0, *ends], ends, strict=False)]


CUTS = st.lists(st.integers(0, 30), max_size=8)


def joined(tokens, cuts, ends, reason=FinishReason.LENGTH, takes=True):
    log_probs = [TokenLogProb(token, -float(index)) for index, token in enumerate(tokens)]
    output = Output(TOKENIZER, [], ends, offset=0)
    deltas = []
    for piece in pieces_of([*zip(tokens, log_probs, strict=True)], cuts):
        output.push([token for token, _ in piece], [log_prob for _, log_prob in piece])
        if takes:
            deltas.append(output.take())
    output.finish(reason)
    deltas.append(output.take())
    text = "".join(delta.text for delta in deltas)
    listed = [one for delta in deltas for one in delta.log_probs]
    ids = [token for delta in deltas for token in delta.token_ids]
    assert text == output.text and ids == output.token_ids
    return text, listed, ids, output.finish_reason, output.stop_reason


@given(
    text=TEXTS,
    more=st.lists(st.integers(2, 639), max_size=6),
    stops=STOPS,
    cuts=CUTS,
    stop_ids=st.sets(st.integers(2, 639), max_size=200),
    keeps_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_deltas_joined_are_the_whole(text, more, stops, cuts, stop_ids, keeps_stop, min_tokens):
    tokens = [*TOKENIZER.encode(text).ids, *more, END, 5]
    ends = Ends(frozenset([END]), frozenset(stop_ids), tuple(stops), keeps_stop, min_tokens)
    streamed = joined(tokens, cuts, ends)
    assert streamed == joined(tokens, [], ends, takes=False)
    given, listed, ids, _, stop_reason = streamed
    assert all(one.start <= len(given) for one in listed)
    assert len(ids) > min_tokens or len(ids) == len(tokens)
    if not keeps_stop and not min_tokens:
        assert not any(stop in given for stop in stops)
    if stop_reason in stops and keeps_stop:
        assert given.endswith(stop_reason)


def test_a_character_in_several_tokens_is_given_out_whole():
    tokens = TOKENIZER.encode("5 €").ids
    output = Output(TOKENIZER, [], Ends(), offset=0)
    texts = []
    for token in tokens:
        output.push([token])
        texts.append(output.take().text)
    assert "".join(texts) == "5 €" and "\ufffd" not in "".join(texts)
    output.push(TOKENIZER.encode("€").ids[:1])
    assert output.take().text == ""
    output.finish(FinishReason.LENGTH)
    assert output.take().text == "\ufffd"


@pytest.mark.parametrize(
    ("ends", "text", "count", "stop_reason"),
    [
        (Ends(frozenset([END])), "a b", 3, None),
        (Ends(frozenset([END]), stops=("b",)), "a ", 2, "b"),
        (Ends(frozenset([END]), stops=("b",), keeps_stop=True), "a b", 2, "b"),
        (Ends(frozenset([END]), min_tokens=3), "a b", 4, None),
    ],
)
def test_ends(ends, text, count, stop_reason):
    tokens = [*TOKENIZER.encode("a b").ids, END, END]
    assert len(tokens) == 4
    given, _, ids, reason, stopped_by = joined(tokens, [1, 2, 3], ends)
    assert (given, len(ids), stopped_by) == (text, count, stop_reason)
    assert reason == "stop"


def test_a_stop_token_is_reported_by_its_id():
    a, b = TOKENIZER.encode("ab").ids[0], TOKENIZER.encode(" b").ids[-1]
    without = joined([a, b, a], [], Ends(stop_ids=frozenset([b])))
    assert (without[0], without[4]) == (TOKENIZER.decode([a]), b)
    kept = joined([a, b, a], [], Ends(stop_ids=frozenset([b]), keeps_stop=True))
    assert (kept[0], kept[4]) == (TOKENIZER.decode([a, b]), b)
