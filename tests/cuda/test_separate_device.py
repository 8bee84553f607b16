"""Steps on a device that shares nothing with the host: what a GPU would refuse is refused here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import check_same, prompt
from mixed_schedules import mixed
from separate_device import DEVICE, DeviceTensor, SeparateDevice, SeparateStream

from gptmanager import InferenceRequest, KvCacheConfig
from gptmanager.config import PromptLookup

from_tokens = InferenceRequest.from_tokens
pytestmark = pytest.mark.timeout(180)  # the emulator beside busy neighbors


@pytest.fixture(autouse=True)
def always_separate(separate):
    return separate


def test_what_the_device_refuses():
    with SeparateDevice():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        assert type(there) is DeviceTensor and there.device == DEVICE != there.cpu().device
        there[:2].copy_(here[:2])
        assert torch.equal((there + 1).cpu(), here + 1)
        with pytest.raises(RuntimeError, match="add.* of tensors on two devices"):
            there + here
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()


def test_copies_come_late():
    stream, event = SeparateStream(), None
    pinned, other = stream.staging(4), stream.staging(4)
    pinned.fill_(1)
    with stream:
        there = torch.zeros(4, dtype=torch.uint8, device=DEVICE)
        event = stream.event()
        event.synchronize()  # no copy precedes it
        there.copy_(pinned, non_blocking=True)
        other.copy_(there + 1, non_blocking=True)
        event.record()
        assert other.tolist() == [0xFB] * 4
        event.synchronize()
        assert other.tolist() == [2] * 4
        pinned.fill_(2)
        there.copy_(pinned, non_blocking=True)
        event.record()
        pinned.fill_(3)
        with pytest.raises(AssertionError, match="written to before its copy"):
            event.synchronize()
    with pytest.raises(AssertionError, match="another stream"):
        event.record()


def test_recordings_run_again_what_ran_and_not_how_it_came_to_that():
    stream, added = SeparateStream(), [5]
    with stream:
        memory = torch.zeros(3, device=DEVICE)
        replay, result = stream.capture(lambda: (memory * 2).add_(added.pop() if added else 7))
        for value in (1, 4):
            memory.fill_(value)
            replay()
            assert result.tolist() == [2 * value + 7] * 3
        for forbidden in (
            lambda: memory.cpu(),
            lambda: memory.copy_(stream.staging(12).view(torch.float32), non_blocking=True),
            lambda: stream.synchronize(),
        ):
            with pytest.raises(RuntimeError, match="cannot be recorded"):
                SeparateStream.capture(stream, forbidden)
            stream.recording = None


def test_requests_of_all_kinds():
    check_same("emulator", mixed, run_ahead=1)


def test_beams():
    def requests():
        wide = [from_tokens(i, prompt(i, 9), 6, beam_width=2) for i in (1, 2)]
        return [*wide, from_tokens(3, prompt(3, 9), 6, return_log_probs=True)]

    check_same("emulator", requests, max_beam_width=2)


def test_drafts():
    def requests():
        return [from_tokens(i, prompt(4, 12) * 3, 9) for i in range(2)]

    lookup = PromptLookup(max_draft_tokens=4)
    check_same("emulator", requests, speculative_decoding_config=lookup, run_ahead=1)


def test_logits_post_processors():
    def forbid(request_id, logits, tokens, stream, client_id):
        logits[..., tokens[0][-1]] = -torch.inf

    def requests():
        return [
            from_tokens(i, prompt(i, 12), 5, logits_post_processor=forbid if i % 2 else None)
            for i in range(3)
        ]

    check_same("emulator", requests, run_ahead=1)


def test_virtual_tokens():
    table = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)

    def requests():
        own = {"prompt_embedding_table": table, "prompt_vocab_size": 3}
        return [from_tokens(1, [96, 97, 98, 5], 6, **own), from_tokens(2, prompt(2, 9), 6)]

    check_same("emulator", requests)


def test_the_host_tier():
    def requests():
        shared = [prompt(4, 48), prompt(9, 48), prompt(2, 48)]
        return [from_tokens(i, shared[i % 3] + prompt(i, 5), 5) for i in range(7)]

    cache = KvCacheConfig(
        max_tokens=160,
        tokens_per_block=16,
        enable_block_reuse=True,
        host_cache_size=16 * 2 * 2 * 16 * 64 * 4,
        host_swap="always",
    )
    check_same("emulator", requests, cache=cache)
