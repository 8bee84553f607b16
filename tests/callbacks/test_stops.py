"""`stop` of the queues and of `generate`: an output ends before a stop string, with one final."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from responding import ManagerStub, ending, in_thread, streamed, whole
from text_checkpoint import END_ID, byte_tokenizer

from gptmanager import (
    FinishReason,
    GptManager,
    InferenceRequest,
    ModelType,
    NamedTensor,
    SchedulerConfig,
)
from gptmanager.callbacks import AsyncRequestQueue, RequestQueue, generate
from gptmanager.errors import ConfigError, InvalidRequestError, ManagerDeadError, StepError
from gptmanager.testing import ScriptedModel

TIMEOUT = 30.0
TOKENIZER = byte_tokenizer()
STOP = FinishReason.STOP_WORDS


def ids(text):
    return TOKENIZER.encode(text).ids


@pytest.fixture
def queue():
    with RequestQueue(tokenizer=TOKENIZER) as queue:
        yield queue


def submit(queue, stop=("stop",), prompt="p", **by_name):
    """A generation that the manager has fetched, and the request that it got."""
    generation = queue.submit(ids(prompt), 50, stop=list(stop), **by_name)
    (request,) = queue.get_inference_requests(-1)
    return generation, request


def send(queue, text, request_id=1):
    queue.send_response(request_id, streamed(ids(text)), False, "")


def send_final(queue, text="", reason=FinishReason.CANCELLED, request_id=1):
    queue.send_response(request_id, [*streamed(ids(text)), *ending(reason)], True, "")


# Responses by hand -------------------------------------------------------------------------------


def test_a_stop_string_ends_the_request_at_the_manager(queue):
    generation, _ = submit(queue, is_streaming=True)

    send(queue, "So: s")
    send(queue, "top")
    assert queue.poll_stop_signal() == {1}
    assert not generation.done() and queue.num_open == 1
    send(queue, " and more")
    send_final(queue, "!")

    result = generation.result(0)
    assert result.texts == ("So: ",)
    assert result.generated_ids == (tuple(ids("So: stop")),)
    assert result.finish_reasons == (STOP,)
    assert result.metrics["generated_tokens"] == 8 and result.metrics["queue_s"] == 0.25
    assert list(generation) == ids("So: stop") and "".join(generation.text()) == "So: "
    assert result.tensors["output_ids"].tolist() == [[ids("So: stop")]]
    assert queue.poll_stop_signal() == frozenset() and queue.num_open == 0


def test_text_is_held_back_only_while_it_may_begin_a_stop_string(queue):
    generation, _ = submit(queue, is_streaming=True)
    pieces = generation.text(TIMEOUT)

    send(queue, "a st")
    assert [next(pieces), next(pieces)] == ["a", " "]
    waiting = in_thread(next, pieces)
    send(queue, "ar sto")
    assert [waiting.result(TIMEOUT), next(pieces), next(pieces)] == ["sta", "r", " "]
    waiting = in_thread(list, pieces)
    send_final(queue, reason=FinishReason.LENGTH)

    assert waiting.result(TIMEOUT) == ["sto"]
    assert generation.result(0).texts == ("a star sto",)
    assert generation.result(0).finish_reasons == (FinishReason.LENGTH,)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_request_that_does_not_stream_ends_early_and_is_read_at_its_end(queue, is_whole):
    given = InferenceRequest.from_tokens(1, ids("p"), 50)
    if is_whole:
        generation = queue.submit(given, stop=["stop"])
        (request,) = queue.get_inference_requests(-1)
        assert generation.request is given and not given.is_streaming
    else:
        generation, request = submit(queue)
    assert request.is_streaming  # so that the stop string is found while it runs

    send(queue, "a stop b")
    assert queue.poll_stop_signal() == {1}
    assert not generation._tokens and not generation._pieces
    send_final(queue)

    assert list(generation) == ids("a stop") and list(generation.text()) == ["a", " "]
    assert generation.result(0).texts == ("a ",)


def test_a_stop_string_at_the_very_end_is_found(queue):
    generation, _ = submit(queue)
    send(queue, "a sto")

    send_final(queue, "p", FinishReason.LENGTH)

    assert generation.result(0).texts == ("a ",)
    assert generation.result(0).finish_reasons == (STOP,)


def test_characters_that_are_split_across_tokens(queue):
    generation, _ = submit(queue, ["€b"], is_streaming=True)
    tokens = ids("a€€b")  # one for each byte

    pieces = []
    for token in tokens[:-1]:
        queue.send_response(1, streamed([token]), False, "")
        pieces.append("".join(generation._pieces))
    assert pieces == ["a", "a", "a", "a", "a", "a", "a€"]
    queue.send_response(1, streamed(tokens[-1:]), False, "")
    send_final(queue)

    assert generation.result(0).texts == ("a€",)


def test_an_incomplete_character_is_part_of_the_text_at_the_end(queue):
    generation, _ = submit(queue)
    queue.send_response(1, streamed(ids("a€")[:-1]), False, "")
    send_final(queue, reason=FinishReason.LENGTH)

    assert generation.result(0).texts == ("a\N{REPLACEMENT CHARACTER}",)


def test_each_of_several_outputs_has_its_own_end(queue):
    generation, request = submit(queue, num_return_sequences=3)
    assert not request.is_streaming
    outputs = ["a stop b", "no end", "stop"]

    queue.send_response(1, whole(*(ids(f"p{text}") for text in outputs)), True, "")

    result = generation.result(0)
    assert result.texts == ("a ", "no end", "")
    assert result.generated_ids == (*map(tuple, map(ids, ["a stop", "no end", "stop"])),)
    assert result.finish_reasons == (STOP, FinishReason.LENGTH, STOP)
    assert result.tensors["sequence_length"].tolist() == [[6, 6, 4]]
    assert result.metrics["generated_tokens"] == 2  # the count of the manager
    assert queue.poll_stop_signal() == frozenset()


def test_several_outputs_that_stream_end_when_all_have_stopped(queue):
    generation, _ = submit(queue, beam_width=2, is_streaming=True)

    def rows(first, second):
        tensors = streamed(first)
        tensors[0] = NamedTensor("output_ids", torch.tensor([[first, second]]).int())
        tensors[1] = NamedTensor("sequence_length", torch.tensor([[len(first)] * 2]).int())
        return tensors

    queue.send_response(1, rows(ids("a stop"), ids("b sto ")), False, "")
    assert queue.poll_stop_signal() == frozenset()
    queue.send_response(1, rows(ids("stop"), ids("stop")), False, "")
    assert queue.poll_stop_signal() == {1}
    queue.send_response(1, [*rows([], []), *ending(FinishReason.CANCELLED, 2)], True, "")

    assert generation.result(0).texts == ("a ", "b sto ")
    assert generation.result(0).finish_reasons == (STOP, STOP)
    assert "".join(generation.text()) == "a "


def test_values_of_tokens_after_the_stop_are_removed(queue):
    generation, _ = submit(queue, ["b"])
    for text in ("ab", "cd"):  # one response may have several tokens
        values = torch.arange(2.0).reshape(1, 1, 2)
        logits = torch.zeros(1, 1, 2, 5)
        extras = [
            NamedTensor("output_log_probs", values),
            NamedTensor("generation_logits", logits),
            NamedTensor("context_logits", torch.zeros(1, 2, 5)),
        ]
        queue.send_response(1, [*streamed(ids(text)), *extras], False, "")
    send_final(queue)

    tensors = generation.result(0).tensors
    assert tensors["output_log_probs"].tolist() == [[[0.0, 1.0]]]
    assert tensors["generation_logits"].shape == (1, 1, 2, 5)
    assert tensors["context_logits"].shape == (1, 4, 5)


def test_values_end_with_the_longest_output(queue):
    generation, _ = submit(queue, ["b"], beam_width=2)
    tensors = streamed(ids("abcd"))
    tensors[1] = NamedTensor("sequence_length", torch.tensor([[4, 4]]).int())
    rows = torch.tensor([[ids("acbd"), ids("bcda")]]).int()
    tensors[0] = NamedTensor("output_ids", rows)
    tensors.append(NamedTensor("output_log_probs", torch.arange(8.0).reshape(1, 2, 4)))
    queue.send_response(1, [*tensors, *ending(FinishReason.LENGTH, 2)], True, "")
    result = generation.result(0)
    assert result.generated_ids == (tuple(ids("acb")), tuple(ids("b")))
    assert result.tensors["output_log_probs"].tolist() == [[[0, 1, 2], [4, 5, 6]]]


# Ends that race ----------------------------------------------------------------------------------


def test_a_cancellation_before_the_stop_string_keeps_the_text(queue):
    generation, _ = submit(queue, is_streaming=True)
    send(queue, "a sto")
    assert generation.cancel()
    send_final(queue)

    assert generation.result(0).texts == ("a sto",)
    assert generation.result(0).finish_reasons == (FinishReason.CANCELLED,)
    assert not generation.cancel()


def test_a_cancellation_that_meets_the_stop_string_changes_nothing(queue):
    generation, _ = submit(queue)
    send(queue, "a stop")
    assert generation.cancel()
    send_final(queue, " b", FinishReason.LENGTH)

    assert generation.result(0).finish_reasons == (STOP,)
    assert generation.result(0).texts == ("a ",)


def test_a_pending_request_is_cancelled_without_text(queue):
    generation = queue.submit(ids("p"), 5, stop=["stop"])
    assert generation.cancel()

    assert generation.result(0).texts == ("",)
    assert generation.result(0).finish_reasons == (FinishReason.CANCELLED,)
    assert list(generation.text()) == []


@pytest.mark.parametrize("is_streaming", [False, True])
def test_an_error_after_the_stop_string_does_not_take_the_result(queue, is_streaming):
    generation, _ = submit(queue, is_streaming=is_streaming)
    send(queue, "a stop")

    queue.send_response(1, [], True, "StepError: the step failed")

    result = generation.result(0)
    assert (result.texts, result.finish_reasons) == (("a ",), (STOP,))
    assert result.metrics["generated_tokens"] == 6 and result.metrics["prompt_tokens"] == 1
    assert "".join(generation.text()) == "a "


def test_a_manager_that_ends_after_the_stop_string_does_not_take_the_result(queue):
    manager = ManagerStub()
    queue.attach(manager)
    stopped, _ = submit(queue)
    running, _ = submit(queue)
    send(queue, "a stop")

    manager.end()

    assert stopped.result(TIMEOUT).texts == ("a ",)
    with pytest.raises(ManagerDeadError):
        running.result(TIMEOUT)


def test_an_error_before_the_stop_string_is_raised_after_the_text(queue):
    generation, _ = submit(queue, is_streaming=True)
    send(queue, "a sto")
    queue.send_response(1, [], True, "StepError: the step failed")

    pieces = generation.text()
    assert [next(pieces), next(pieces)] == ["a", " "]
    with pytest.raises(StepError):
        next(pieces)


# Arguments ---------------------------------------------------------------------------------------


def test_an_empty_list_only_decodes(queue):
    generation, _ = submit(queue, [], is_streaming=True)
    send(queue, "a stop")
    assert queue.poll_stop_signal() == frozenset()
    send_final(queue, reason=FinishReason.END_ID)

    assert generation.result(0).texts == ("a stop",)
    assert generation.result(0).finish_reasons == (FinishReason.END_ID,)


def test_without_stop_there_is_no_text(queue):
    generation = queue.submit(ids("p"), 5)
    assert not queue.get_inference_requests(-1)[0].is_streaming
    with pytest.raises(ValueError, match="request 1 was submitted without `stop`"):
        generation.text()
    queue.send_response(1, whole(ids("pa")), True, "")
    assert generation.result(0).texts == ()


def test_an_invalid_stop_is_raised_at_once_and_the_id_is_free(queue):
    with pytest.raises(InvalidRequestError, match=r"stop\[1\] has 0 characters"):
        queue.submit(ids("p"), 5, stop=["a", ""])
    assert queue.num_open == 0
    assert queue.submit(ids("p"), 5, stop=["a"], request_id=1).request_id == 1


def test_stop_without_a_tokenizer_is_a_config_error(tmp_path):
    with RequestQueue() as queue:
        with pytest.raises(ConfigError, match="`stop` needs a tokenizer: create the queue with"):
            queue.submit([1], 5, stop=["a"])
    with RequestQueue.for_checkpoint(tmp_path) as queue:
        queue.submit([1], 5)  # the folder has no tokenizer, and needs none
        with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
            queue.submit([1], 5, stop=["a"])
        assert queue.num_open == 1


def test_a_checkpoints_queue_reads_its_tokenizer_once(checkpoint, tokenizer):
    with RequestQueue.for_checkpoint(checkpoint) as queue:
        generation = queue.submit([1], 5, stop=["é"])
        queue.get_inference_requests(-1)
        tokens = tokenizer.encode("café").ids
        queue.send_response(1, streamed(tokens), False, "")
        send_final(queue)
        assert generation.result(0).texts == ("caf",)
        assert queue._texts.load() is queue._texts.load()


# With a manager ----------------------------------------------------------------------------------

LINE = "So it goes: stop. And on and on, "


def repeating(text=LINE):
    """A model that writes `text` again and again, from the place where the prompt ends."""
    tokens = ids(text)
    return ScriptedModel(lambda history: tokens[len(history) % len(tokens)], vocab_size=END_ID + 1)


def managed(queue):
    model = repeating()
    return model, GptManager(
        model,
        ModelType.INFLIGHT_FUSED_BATCHING,
        2,
        SchedulerConfig(),
        queue.get_inference_requests,
        queue.send_response,
        queue.poll_stop_signal,
    )


def test_a_manager_stops_generating(queue):
    model, manager = managed(queue)
    with manager:
        queue.attach(manager)
        generation = queue.submit(ids("S"), 1000, stop=["stop"])
        result = generation.result(TIMEOUT)
        again = queue.submit(ids("S"), 4, request_id=generation.request_id).result(TIMEOUT)
    assert result.texts == ("o it goes: ",)
    assert result.finish_reasons == (STOP,) and result.generated_ids == (
        tuple(ids("o it goes: stop")),
    )
    assert result.metrics["generated_tokens"] == 15 and result.metrics["prompt_tokens"] == 1
    assert model.num_forwards < 40
    assert again.generated_ids == (tuple(ids("o it")),)


def test_tasks_read_text_and_tokens_until_the_stop_string():
    queue = AsyncRequestQueue(tokenizer=TOKENIZER)

    async def texts():
        with await queue.submit_async(ids("S"), 1000, stop=["stop"], is_streaming=True) as handle:
            return [part.text async for part in handle.parts()]

    async def main():
        tokens = [
            token async for new in queue.stream(ids("S"), 1000, stop=["stop"]) for token in new
        ]
        return await queue.generate(ids("S"), 1000, stop=["stop"]), tokens, await texts()

    _, manager = managed(queue)
    with queue, manager:
        queue.attach(manager)
        result, tokens, pieces = asyncio.run(main())
    assert result.texts == ("".join(pieces),) == ("o it goes: ",)
    assert tokens == ids("o it goes: stop")


def test_several_sampled_outputs_of_a_manager(queue):
    _, manager = managed(queue)
    with manager:
        queue.attach(manager)
        plain = queue.submit(ids("S"), 30, stop=["stop"], num_return_sequences=2)
        beams = queue.submit(ids("S"), 30, stop=["stop"], beam_width=2, is_streaming=True)
        results = [plain.result(TIMEOUT), beams.result(TIMEOUT)]
    assert results[0].texts == ("o it goes: ",) * 2
    assert results[0].finish_reasons == (STOP, STOP)
    assert results[1].texts[0] == "o it goes: "


def test_generate_cuts_texts_and_keeps_the_tokens_of_the_stop_string():
    options = {"stop": ["stop", "And"], "tokenizer": TOKENIZER}

    assert generate(repeating(), "S", 1000, **options) == "o it goes: "
    assert generate(repeating(), ["S", "So it goes: stop"], 1000, **options) == [
        "o it goes: ",
        ". ",
    ]
    assert generate(repeating(), ids("S"), 1000, **options) == ids("o it goes: stop")
    both = generate(repeating(), "S", 30, num_return_sequences=2, **options)
    assert both == ["o it goes: "] * 2


def test_generate_refuses_a_stop_that_it_cannot_use():
    with pytest.raises(ConfigError, match="text prompts and `stop` need a tokenizer"):
        generate(repeating(), [1, 2], 5, stop=["a"])
    with pytest.raises(InvalidRequestError, match="stop = 'stop' must be a list of strings"):
        generate(repeating(), "S", 5, stop="stop", tokenizer=TOKENIZER)


@given(
    text=st.text(alphabet="ab€", min_size=1, max_size=10),
    stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 29), max_size=5),
    is_streaming=st.booleans(),
)
def test_the_handle_gives_what_a_search_in_the_whole_text_finds(text, stops, cuts, is_streaming):
    tokens = ids(text)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end, begin = min(ends, default=(len(text), len(text)))
    parts = sorted({cut for cut in cuts if cut < len(tokens)})
    with RequestQueue(tokenizer=TOKENIZER) as queue:
        generation, _ = submit(queue, stops, is_streaming=is_streaming)
        at = 0
        for part in parts:
            queue.send_response(1, streamed(tokens[at:part], at), False, "")
            at = part
        queue.send_response(1, [*streamed(tokens[at:], at), *ending()], True, "")

    result = generation.result(0)
    assert result.texts == ("".join(generation.text()),) == (text[:begin],)
    assert list(generation) == list(result.generated_ids[0]) == ids(text[:end])
    assert result.finish_reasons == (STOP if ends else FinishReason.LENGTH,)
