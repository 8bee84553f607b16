"""Several end ids of a request: whatever reads them reads all. transformers is the oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_driver import expected_output
from recorded_runs import ScheduledHost, record, request
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from gptmanager import (
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import RequestQueue, generate
from gptmanager.cli import main
from gptmanager.config import PromptLookup
from gptmanager.decoding.guided.guided import GuidedDecoding
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay.replaying import replay
from gptmanager.testing import RecordingCallbacks

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny_llama"
LENGTH = 24


@pytest.fixture(scope="module")
def peer():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def prompt():
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode("Tom had a red ").ids


def of_peer(peer, prompt, end_ids, **options):
    """The tokens that transformers generates, without those that fill up."""
    found = peer.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=LENGTH,
        eos_token_id=end_ids,
        pad_token_id=639,
        **options,
    )
    return found[:, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def end_ids(peer, prompt):
    """Three tokens of what the model says when nothing ends it, the first one last."""
    first, second, third = dict.fromkeys(of_peer(peer, prompt, None)[0][:9][::3])
    return [third, second, first]


def serve(requests, **options):
    host = RecordingCallbacks(requests)
    options = {"exclude_input_in_output": True, "max_batch_size": 8, **options}
    with GptManager(
        CHECKPOINT,
        ModelType.INFLIGHT_FUSED_BATCHING,
        options.pop("max_beam_width", 1),
        SchedulerConfig(),
        **host.keywords(),
        optional_params=OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=4000), **options),
    ) as manager:
        assert manager.wait_idle(50)
    return host


@pytest.mark.parametrize("min_length", [0, 15])
@pytest.mark.parametrize(
    "options", [{}, {"speculative_decoding_config": PromptLookup()}], ids=["plain", "drafts"]
)
def test_one_text_is_that_of_transformers(peer, prompt, end_ids, min_length, options):
    (tokens,) = of_peer(peer, prompt, end_ids, min_new_tokens=min_length or None)
    assert tokens[-1] in end_ids and len(tokens) > min_length
    host = serve(
        [
            InferenceRequest.from_tokens(
                number, prompt, LENGTH, end_id=given, min_length=min_length, is_streaming=number > 1
            )
            for number, given in enumerate([end_ids, [end_ids], np.array([-1, *end_ids])], start=1)
        ],
        **options,
    )
    for number in (1, 2, 3):
        assert host.output(number) == tokens[:-1]
        reasons = host.final(number).tensors["finish_reasons"].tolist()
        assert reasons == [[FinishReason.END_ID]]
    padding = host.final(1).tensors["output_ids"][0, 0, len(tokens) - 1 :]
    assert set(padding.tolist()) == {end_ids[0]}


def test_beams_are_those_of_transformers(peer, prompt):
    several = {"num_beams": 4, "num_return_sequences": 4}
    without = of_peer(peer, prompt, 639, **several)
    end_ids = sorted({token for beam in without for token in beam[9:12]})
    assert len(end_ids) > 1
    beams = of_peer(peer, prompt, end_ids, **several)
    made = InferenceRequest.from_tokens(
        1, prompt, LENGTH, end_id=end_ids, beam_width=4, include_stop_in_output=True
    )
    final = serve([made], max_beam_width=4).final(1).tensors
    lengths = final["sequence_length"][0].tolist()
    rows = zip(final["output_ids"][0].tolist(), lengths, strict=True)
    found = [row[:length] for row, length in rows]
    assert [row[: len(own)] for row, own in zip(beams, found, strict=True)] == found
    assert FinishReason.END_ID in final["finish_reasons"][0].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, end_ids):
    """The example, whose generation_config.json has three end tokens."""
    folder = tmp_path_factory.mktemp("several_ends")
    for file in CHECKPOINT.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    return folder


def test_a_checkpoints_list_is_banned_by_min_length(
    peer, prompt, end_ids, folder, tmp_path, monkeypatch, capsys
):
    (tokens,) = of_peer(peer, prompt, end_ids, min_new_tokens=15)
    assert generate(folder, prompt, LENGTH, min_length=15) == tokens[:-1]
    lines = tmp_path / "requests.jsonl"
    line = {"input_ids": prompt, "max_new_tokens": LENGTH, "min_length": 15}
    other = {**line, "end_id": end_ids[:2], "min_length": 0}
    lines.write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    out = tmp_path / "out.jsonl"
    main(["run", "--model", str(folder), "--requests", str(lines), "--output", str(out), "--json"])
    results = [json.loads(text) for text in out.read_text().splitlines()]
    assert [one["finish_reason"] for one in results] == ["END_ID"] * 2
    assert results[0]["output_ids"] == tokens[:-1]
    (shorter,) = of_peer(peer, prompt, end_ids[:2])
    assert results[1]["output_ids"] == shorter[:-1]


def test_guided_texts_end_with_any_of_them(prompt):
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    guided = GuidedDecoding(tokenizer, [0])
    red = guided.choice(["red"])
    more = {"logits_post_processor": red, "include_stop_in_output": True, "temperature": 1.0}
    likely = np.zeros(640, dtype=np.float32)
    likely[639] = 50.0  # an end id of the request alone, which comes as soon as it may
    final = serve(
        [
            InferenceRequest.from_tokens(
                1, prompt, 9, end_id=[5, 639], embedding_bias=likely, **more
            ),
            InferenceRequest.from_tokens(2, prompt, 9, end_id=[0, 1], **more),
        ]
    )
    assert final.output(1) == [*tokenizer.encode("red").ids, 639]
    assert final.output(2)[-1] in (0, 1) and tokenizer.decode(final.output(2)) == "red"


def test_a_recording_of_one_end_id_is_read_as_it_was_written(tmp_path):
    """Version 4 of the format had `end_id` where there is `end_ids` now."""
    text = expected_output(request(1, 5, 12).input_ids.tolist(), 12)
    made = [request(1, 5, 12, end_id=text[6]), request(2, 5, 4)]
    record(tmp_path / "new.jsonl", ScheduledHost([made]))
    lines = (tmp_path / "new.jsonl").read_text()
    assert lines.count('"version":5') == 1 and f'"end_ids":[{text[6]}]' in lines
    for new, old in (
        ('"version":5', '"version":4'),
        (f'"end_ids":[{text[6]}]', f'"end_id":{text[6]}'),
        ('"end_ids":[]', '"end_id":-1'),
    ):
        lines = lines.replace(new, old)
    (tmp_path / "old.jsonl").write_text(lines)
    old, new = (read_recording(tmp_path / name) for name in ("old.jsonl", "new.jsonl"))
    schedules = [[one.schedule for one in run.iterations] for run in (old, new)]
    assert schedules[0] == schedules[1]
    assert replay(old).divergence is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "end_id has shape [0], expected [n] or [1, n], n from 1 to 1024"),
        ([[1], [2]], "end_id has shape [2, 1], expected [n] or [1, n]"),
        (list(range(1025)), "end_id has shape [1025]"),
        ([3, 640], "end_id[1] = 640 is outside -1..639"),
        ([-2], "end_id = -2 is outside"),
        ([2.0], "integer"),
    ],
)
def test_ids_that_are_none(prompt, given, problem):
    with RequestQueue() as queue:
        generation = queue.submit(prompt, 1, end_id=given)
        serve_queue(queue)
        assert problem in str(generation.exception())


def serve_queue(queue):
    with GptManager(
        CHECKPOINT,
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        SchedulerConfig(),
        queue.get_inference_requests,
        queue.send_response,
        optional_params=OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=1000)),
    ) as manager:
        assert manager.wait_idle(50)
