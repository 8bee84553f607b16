"""A manager that serves guided requests, and what their texts are."""

from __future__ import annotations

import numpy as np
import torch
from text_checkpoint import END_ID, byte_tokenizer

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart
from gptmanager.testing import ContractChecker, RecordingCallbacks

MODEL = "examples/tiny_llama"
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": -5, "maximum": 120},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def serve(requests, source=MODEL, policy=MAX_UTILIZATION, max_tokens=None, **options):
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    options = {"max_batch_size": 32, "exclude_input_in_output": True, **options}
    kv_cache = KvCacheConfig(max_tokens=max_tokens or 40000, tokens_per_block=8)
    with GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        options.pop("max_beam_width", 1),
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        optional_params=OptionalParams(kv_cache_config=kv_cache, **options),
    ) as manager:
        assert manager.wait_idle(50)
    checker.check(manager)
    return host


def asked(tokenizer, request_id, processor, max_new_tokens=200, **more):
    more = {"end_id": 0, "temperature": 1.0, "random_seed": request_id, **more}
    return InferenceRequest.from_tokens(
        request_id,
        tokenizer.encode("Tom had a red ball. ").ids,
        max_new_tokens,
        logits_post_processor=processor,
        **more,
    )


def text(tokenizer, host, request_id):
    final = host.final(request_id)
    assert not final.error and final.tensors["finish_reasons"].tolist() == [[1]], final
    return tokenizer.decode(host.output(request_id), skip_special_tokens=False)


def allowed(processor, history, end_id=END_ID, vocab_size=END_ID + 1, prompt_len=2, handle=None):
    """The tokens that may follow `history`, which begins with the prompt."""
    processor.compiled.exception()  # wait
    processing = PostProcessing(Lines(3))
    handle = handle or RequestProcessor(processor)
    params = SamplingParams(end_ids=() if end_id < 0 else (end_id,))
    processing.start(SequenceStart(1, (), prompt_len, params, handle))
    tokens = np.zeros((3, 100), dtype=np.int32)
    tokens[1, : len(history)] = history
    logits = torch.zeros(4, vocab_size)
    slots = np.array([0, 2, 1, 2], dtype=np.int64)
    lengths = np.array([5, 5, len(history), 5], dtype=np.int64)
    errors = processing.run(logits, [0, 0, 9, 0], slots, lengths, tokens)
    assert not logits[[0, 1, 3]].any()
    if errors:
        raise errors[2]
    assert set(logits[2].tolist()) <= {0.0, -float("inf")}
    return set(torch.isfinite(logits[2]).nonzero()[:, 0].tolist())


def ids(letters):
    tokenizer = byte_tokenizer()
    return {tokenizer.encode(letter).ids[0] for letter in letters}


def encoded(letters):
    return byte_tokenizer().encode(letters).ids
