"""OpenAI's own client in its loops: what it was told goes back, cut off or not."""

import asyncio
import json
from typing import Literal

import httpx
import openai
import pytest
from client_model import NAME, save_client_model
from http_answers import texts_of
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from running_server import running_server, settings_of, wait_for

ASKS = [{"role": "user", "content": "Which ball?"}]


class Ball(BaseModel):
    color: Literal["red", "blue"]
    sizes: list[Literal[1, 2]]


TOOL = openai.pydantic_function_tool(Ball, name="find_ball")


@pytest.fixture(scope="module")
def server(tmp_path_factory, one_torch_thread):
    folder = tmp_path_factory.mktemp("model")
    save_client_model(folder)
    limits = {"max_concurrency": 2, "max_queued_requests": 0}
    settings = settings_of(model=folder, served_model_name=NAME, **limits)
    with running_server(settings) as running:
        yield running


@pytest.fixture
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own types
def test_parsed_answers_go_back(client):
    messages = [*ASKS]
    for seed in range(3):
        raw = client.chat.completions.with_raw_response.parse(
            model=NAME, messages=messages, response_format=Ball, seed=seed
        )
        assert raw.http_request.content.count(b'"parsed"') == seed
        message = raw.parse().choices[0].message
        assert isinstance(message.parsed, Ball) and message.refusal is None
        messages += [message, {"role": "user", "content": "Another one."}]


def test_a_loop_of_parsed_calls(client):
    messages = [*ASKS]
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=NAME, messages=messages, tools=[TOOL], tool_choice="required", seed=seed
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
        messages.append(message)
        for call in message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Ball)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "found"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_whose_calls_are_cut_off_goes_on(client, stream):
    """The arguments are not JSON, and the client sends them back with what its parser says."""
    messages, num_cut = [*ASKS], 0
    for most in (9, 12, 15, 18, 40):
        fields = {"model": NAME, "messages": messages, "tools": [TOOL], "tool_choice": "required",
                  "max_tokens": most, "parallel_tool_calls": False}  # fmt: skip
        if stream:
            with client.chat.completions.stream(**fields) as found:
                try:
                    choice = found.get_final_completion().choices[0]
                except openai.LengthFinishReasonError as error:
                    choice = error.completion.choices[0]
        else:
            choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason in ("length", "tool_calls")
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            try:
                result = str(json.loads(call.function.arguments))
                assert choice.finish_reason == "tool_calls"
            except ValueError as error:
                result, num_cut = f"not JSON: {error}", num_cut + 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        messages.append({"role": "user", "content": "Try again."})
    assert num_cut > 0


def test_events_of_the_streaming_helper(client):
    with client.chat.completions.stream(
        model=NAME, messages=ASKS, response_format=Ball, seed=1,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Ball) and final.usage.total_tokens > 0
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    with client.chat.completions.stream(
        model=NAME, messages=ASKS, tools=[TOOL], tool_choice="required", seed=1
    ) as stream:
        done = [one for one in stream if one.type == "tool_calls.function.arguments.done"]
    assert all(isinstance(one.parsed_arguments, Ball) for one in done) and done


def test_raw_responses_show_the_warning(client):
    fields = {"model": NAME, "messages": ASKS, "max_tokens": 2, "verbosity": "low"}
    raw = client.chat.completions.with_raw_response.create(**fields)
    assert texts_of(raw.headers) == ["fields that have no effect here: verbosity"]
    assert raw.parse().choices[0].finish_reason in ("length", "stop")
    with client.chat.completions.with_streaming_response.create(**fields, stream=True) as raw:
        assert texts_of(raw.headers) == ["fields that have no effect here: verbosity"]
        assert len(list(raw.parse())) > 1


def test_errors_have_the_classes_that_clients_catch(client):
    most = 10**12
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=ASKS, max_tokens=most, stream=True)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.body["message"].startswith("This model's maximum context length is 8192")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4o", messages=ASKS)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=NAME, messages=ASKS, response_format=Ball, max_completion_tokens=2
        )


ENDLESS = {"model": NAME, "prompt": "a", "max_tokens": 8000, "extra_body": {"ignore_eos": True}}


def test_a_client_that_gives_up_leaves_nothing_running(server, client):
    impatient = client.with_options(timeout=0.1, max_retries=1)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(**ENDLESS)
    server.wait_idle()
    # the server may begin with what the client has given up only now, and refuse for a moment
    patient = client.with_options(max_retries=9)
    with patient.completions.create(**ENDLESS, stream=True) as stream:
        next(iter(stream))
    server.wait_idle()


def test_a_full_server_is_tried_again(server, client):
    statuses, held = [], []

    def saw(response):
        statuses.append(response.status_code)
        if response.status_code == 429:
            assert int(response.headers["Retry-After"]) >= 1
            for stream in held:
                stream.close()
            server.wait_idle()

    for _ in range(2):
        held.append(client.completions.create(**ENDLESS, stream=True))
    wait_for(lambda: server.engine.queue.num_open == 2)
    with (
        httpx.Client(event_hooks={"response": [saw]}) as http,
        OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=2, http_client=http
        ) as patient,
    ):
        answer = patient.completions.create(model=NAME, prompt="a", max_tokens=1)
    assert statuses == [429, 200] and answer.usage.completion_tokens == 1


def test_many_at_once_of_the_asynchronous_client(server):
    async def main():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [
                client.chat.completions.create(
                    model=NAME, messages=ASKS, max_tokens=4, stream=bool(index)
                )
                for index in range(2)
            ]
            whole, stream = await asyncio.gather(*asked)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(main())
    assert whole.choices[0].message.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
