"""A gate of the shared experts has one column; its bits must not depend on the number of rows."""

import pytest
import torch
from family_runs import family_folder
from shorthand import request

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams
from gptmanager.testing import RecordingCallbacks

PROMPT = [(37 * i + i * i) % 96 for i in range(40)]


def prompt_log_probs(folder, max_num_tokens):
    """Those of a prompt that runs in chunks of at most `max_num_tokens`."""
    host = RecordingCallbacks([request(1, PROMPT, 1, num_prompt_log_probs=0)])
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=256, tokens_per_block=8),
        max_num_tokens=max_num_tokens,
        enable_chunked_context=True,
        deterministic=True,
    )
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(folder, fused, optional_params=options, **host.keywords()) as manager:
        assert manager.wait_idle(60)
    return host.final(1).tensors["prompt_log_probs"]


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_chunks_do_not_change_a_bit(family):
    folder = family_folder(family)
    assert torch.equal(prompt_log_probs(folder, 16), prompt_log_probs(folder, 64))
