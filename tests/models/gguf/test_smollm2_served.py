"""The real model behind the server, in a chat, and in a recording."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import orjson
import pytest
from running_server import running_server, settings_of
from smollm2 import smollm2_file

from gptmanager import FinishReason, GptManager, KvCacheConfig, ModelType, OptionalParams, cli
from gptmanager.callbacks import ChatTemplate, RequestQueue
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay

CAPITAL = {"role": "user", "content": "What is the capital of France?"}
ANSWER = "The capital of France is Paris."
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def file() -> Path:
    return smollm2_file()


@pytest.fixture(scope="module")
def template(file: Path) -> Iterator[ChatTemplate]:
    with ChatTemplate.of_folder(file) as found:
        yield found


@pytest.fixture(scope="module")
def client(file: Path) -> Iterator[httpx.Client]:
    cache = KvCacheConfig(max_tokens=4096)
    # in float32: the first token of ANSWER is so close to another one that the rounding of
    # activations, which depends on the processor, decides between them
    params = {"kv_cache_config": cache, "max_seq_len": 2048, "dtype": "float32"}
    settings = settings_of(file, params, served_model_name="smollm2", triton=False)
    with (
        running_server(settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def body(*messages: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": messages,
        "temperature": 0,
        "max_completion_tokens": 40,
        **fields,
    }


def answer(client: httpx.Client, *messages: dict[str, str], **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT, json=body(*messages, **fields))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def content(found: dict[str, Any]) -> str:
    text: str = found["choices"][0]["message"]["content"]
    return text


def test_a_system_prompt_is_part_of_the_prompt(
    client: httpx.Client, template: ChatTemplate
) -> None:
    assert content(answer(client, CAPITAL)) == ANSWER
    system = {"role": "system", "content": "You answer questions about Italy."}
    found = answer(client, system, CAPITAL)
    assert found["usage"]["prompt_tokens"] == len(template.render([system, CAPITAL]))
    assert found["choices"][0]["finish_reason"] == "stop"


def test_a_stream_has_the_same_text(client: httpx.Client) -> None:
    pieces = []
    with client.stream("POST", CHAT, json=body(CAPITAL, stream=True)) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                pieces.append(choice["delta"].get("content") or "")
    assert "".join(pieces) == ANSWER
    assert len([*filter(None, pieces)]) > 3


def test_a_stop_text_ends_the_answer(client: httpx.Client) -> None:
    found = answer(client, CAPITAL, stop=[" is Par"])  # ends within a token
    assert content(found) == "The capital of France"
    assert found["choices"][0]["finish_reason"] == "stop"


def test_an_answer_has_the_form_of_its_schema(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "inhabitants": {"type": "integer", "maximum": 99999999},
        },
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    found = answer(client, CAPITAL, response_format=form, max_completion_tokens=60)
    jsonschema.validate(json.loads(content(found)), schema)


def test_tools_are_refused_with_the_reason(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    response = client.post(CHAT, json=body(CAPITAL, tools=[tool]))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(
        "tools: the chat template describes no known format of calls"
    )


@pytest.mark.slow
def test_a_long_system_prompt_is_computed_once(client: httpx.Client) -> None:
    rules = " ".join(f"Rule {number} is as good as rule {number + 1}." for number in range(60))
    system = {"role": "system", "content": rules}
    first = answer(client, system, CAPITAL, max_completion_tokens=2)["usage"]
    other = {"role": "user", "content": "Name a color."}
    second = answer(client, system, other, max_completion_tokens=2)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 64
    assert second["prompt_tokens"] > 600
    # all but what differs, in whole blocks
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64 * 9


@pytest.mark.slow
def test_a_conversation_through_pipes(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"What is the capital of France?\nAnd of Italy?\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    exact = ["--dtype", "float32", "--temperature", "0"]
    assert cli.main(["chat", "--model", str(file), *exact]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\nThe capital of Italy is Rome.\n"


def test_a_run_is_recorded_replayed_and_simulated(
    file: Path, template: ChatTemplate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    cache = KvCacheConfig(max_tokens=1024)
    params = OptionalParams(kv_cache_config=cache, max_seq_len=256, recording_path=path)
    questions = ["What is the capital of France?", "Name a color.", "Who wrote Faust?"]
    with (
        RequestQueue.for_checkpoint(file) as queue,
        GptManager(
            file,
            ModelType.INFLIGHT_FUSED_BATCHING,
            get_inference_requests_cb=queue.get_inference_requests,
            send_response_cb=queue.send_response,
            optional_params=params,
        ) as manager,
    ):
        queue.attach(manager)
        prompts = [template.render([{"role": "user", "content": text}]) for text in questions]
        answers = [queue.submit(prompt, 24 + index) for index, prompt in enumerate(prompts)]
        results = [one.result(60) for one in answers]

    report = replay(read_recording(path))
    assert report.divergence is None and report.iterations > 24
    options = ["--recording", str(path), "--policies", "guaranteed_no_evict", "--json"]
    assert cli.main(["simulate", *options]) == 0
    simulated = orjson.loads(capsys.readouterr().out)
    figures = simulated["policies"]["guaranteed_no_evict"]
    ends = [result.finish_reasons[0] is FinishReason.END_ID for result in results]
    tokens = [len(result.generated_ids[0]) for result in results]
    assert figures["output_tokens"] == sum(tokens) + sum(ends)
    assert figures["makespan_s"] == pytest.approx(simulated["recorded_makespan_s"], rel=0.05)
