"""`ensemble` and `tensorrt_llm_bls`: text in, text out."""

import numpy as np
import pytest
from fuzz import FUZZ
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_calls import TIMEOUT_S, as_arrays, streaming
from tritonclient.utils import InferenceServerException

PROMPT = "Tom had"
FIXTURE_STAYS = HealthCheck.function_scoped_fixture  # it only calls the server


@pytest.fixture
def text(infer, server):
    """The text that follows a prompt, as the model's greedy tokens say it."""
    tokenizer = server.engine.card.tokenizer

    def text(prompt, new, **by_name):
        ids = tokenizer.encode(prompt).ids
        result = server.engine.queue.submit(ids, new, **by_name).result(TIMEOUT_S)
        return tokenizer.decode([*ids, *result.generated_ids[0]])[len(tokenizer.decode(ids)) :]

    return text


def ask(prompt=PROMPT, new=20, **others):
    return {"text_input": [prompt.encode()], "max_tokens": new, **others}


def words(*texts):
    return [[text.encode() for text in texts]]


def one(arrays):
    assert arrays["text_output"].shape == (1, 1)
    return arrays["text_output"][0, 0].decode()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_prompt_and_what_follows(infer, text, model):
    arrays = infer(model, **ask())
    assert one(arrays) == PROMPT + text(PROMPT, 20)
    assert set(arrays) == {
        *("text_output", "cum_log_probs", "output_log_probs", "context_logits"),
        *("generation_logits", "batch_index", "sequence_index"),
    }
    assert one(infer(model, **ask(exclude_input_in_output=True))) == text(PROMPT, 20)
    nothing = {"bad_words": words(""), "stop_words": words("", "")}  # clients send it so
    assert one(infer(model, **ask(**nothing))) == PROMPT + text(PROMPT, 20)


@settings(max_examples=12 * FUZZ, deadline=None, suppress_health_check=[FIXTURE_STAYS])
@given(
    prompt=st.sampled_from(
        ["Tom had", "One day, \u00e9\U0001f600", "\U0001f469\u200d\U0001f680 a"]
    ),
    new=st.integers(1, 24),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.sampled_from(["a", " b", "the", "\U0001f600", "\ufffd", ". "]), max_size=3),
)
def test_a_stream_says_what_the_whole_says(front, grpc, infer, prompt, new, seed, stop):
    """Characters of several tokens, and stop words across tokens, in the whole and in parts."""

    sampled = {"temperature": 3.0, "random_seed": seed, "exclude_input_in_output": True}
    asked = ask(prompt, new, stop_words=words(*stop, ""), return_log_probs=True, **sampled)
    whole = infer("ensemble", **asked)
    with streaming(grpc) as stream:
        stream.send("ensemble", **asked, stream=True)
        parts = [response.arrays for response in stream.all()]
    assert "".join(map(one, parts)) == one(whole)
    assert all(one(part) for part in parts[:-1])
    log_probs = np.concatenate([part["output_log_probs"] for part in parts], axis=2)
    np.testing.assert_array_equal(log_probs, whole["output_log_probs"])
    assert not any(word in one(whole) for word in stop)


def test_stop_words_end_a_text_wherever_they_are(infer, text, server):
    whole = text(PROMPT, 20)
    for stop in (whole[5:9], whole[7:8], whole[-3:]):
        cut = whole[: whole.index(stop)]
        assert one(infer("ensemble", **ask(stop_words=words("zzz", stop)))) == PROMPT + cut
    server.wait_idle()


def test_bad_words_never_come(infer, text):
    word = max(text(PROMPT, 20).split(), key=len)
    assert word in one(infer("ensemble", **ask()))
    assert word not in one(infer("ensemble", **ask(bad_words=words(word))))


def test_words_with_a_bias(infer, server):
    biased = one(
        infer(
            "ensemble",
            **ask(new=4, exclude_input_in_output=True),
            embedding_bias_words=words("zoo"),
            embedding_bias_weights=[[1000.0]],
        )
    )
    encode = server.engine.card.tokenizer.encode
    allowed = {*encode("zoo").ids, *encode(" zoo").ids}
    assert set(encode(biased).ids) <= allowed
    with pytest.raises(InferenceServerException, match="has 2 words, but .* 1 weights"):
        infer(
            "ensemble",
            **ask(),
            embedding_bias_words=words("a", "b"),
            embedding_bias_weights=[[1.0]],
        )


def test_the_checkpoint_ends_a_text_but_for_another_end_id(infer, server):
    tokenizer = server.engine.card.tokenizer
    ids = tokenizer.encode(PROMPT).ids
    result = server.engine.queue.submit(ids, 400).result(TIMEOUT_S)
    assert len(result.generated_ids[0]) < 400  # it has come to the checkpoint's end token
    ended = one(infer("ensemble", **ask(new=400)))
    assert len(ended) < len(one(infer("ensemble", **ask(new=400, end_id=-1))))


def test_beams_and_sequences(infer, stream):
    arrays = infer("ensemble", **ask(beam_width=3))
    assert arrays["text_output"].shape == (1, 3)
    assert all(text.startswith(PROMPT.encode()) for text in arrays["text_output"][0])
    assert len(set(arrays["text_output"][0])) == 3
    fewer = infer("ensemble", **ask(beam_width=3, num_return_sequences=2))["text_output"]
    assert fewer.tolist() == arrays["text_output"][:, :2].tolist()
    sampled = {"temperature": 1.0, "random_seed": 7, "num_return_sequences": 3}
    stream.send("ensemble", **ask(**sampled, stream=True))
    texts = {}
    for response in stream.all():
        index = int(response.arrays["sequence_index"][0, 0])
        texts[index] = texts.get(index, "") + one(response.arrays)
    assert len(texts) == 3 and len(set(texts.values())) > 1


def test_a_batch_of_texts(stream, text):
    prompts = ["Tom had", "One day", "Lily"]
    (datatype, array) = as_arrays(text_input=[[one.encode()] for one in prompts])["text_input"]
    assert datatype == "BYTES" and array.shape == (3, 1)
    stream.send("ensemble", text_input=array, max_tokens=np.full((3, 1), 6))
    found = {int(it.arrays["batch_index"][0, 0]): one(it.arrays) for it in stream.all()}
    assert found == {index: prompt + text(prompt, 6) for index, prompt in enumerate(prompts)}


def test_a_prompt_table_precedes_the_text(infer, server):
    table = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float16)
    ids = [640, 641, 642, *server.engine.card.tokenizer.encode(PROMPT).ids]
    submit = server.engine.queue.submit
    result = submit(ids, 8, prompt_embedding_table=table).result(TIMEOUT_S)
    wanted = server.engine.card.tokenizer.decode(result.generated_ids[0])
    given = ask(new=8, prompt_embedding_table=table, prompt_table_extra_id=5)
    assert one(infer("ensemble", **given, exclude_input_in_output=True)).strip() == wanted.strip()


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"text_input": [b"\xff"]}, "text_input must be text in UTF-8"),
        ({"text_input": [b""]}, "text_input has no tokens"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"decoder_text_input": [b"a"]}, "decoder_text_input is not supported"),
        ({"stop_words": words(*"a" * 65)}, r"at most \[32, 64\], got \[1, 65\]"),
        (
            {"stop_words": words("a"), "beam_width": 2},
            "stop_words are not supported with beam_width = 2",
        ),
        ({"top_p": 2.0}, "runtime_top_p = 2"),
    ],
)
def test_refusals_name_the_field(infer, wrong, told):
    with pytest.raises(InferenceServerException, match=told):
        infer("ensemble", **{**ask(), **wrong})


def test_drafts_of_a_second_model_are_refused(infer):
    assert infer("tensorrt_llm_bls", **ask(num_draft_tokens=0, use_draft_logits=False))
    with pytest.raises(InferenceServerException, match="num_draft_tokens = 4 is not supported"):
        infer("tensorrt_llm_bls", **ask(num_draft_tokens=4))
    with pytest.raises(InferenceServerException, match="unexpected inference input"):
        infer("ensemble", **ask(num_draft_tokens=0))
