"""Mutated requests in front of a manager: each gets one final response, and harms nobody.

GPTMANAGER_FUZZ=n sends n times as many (1: some 1,500).
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from fuzz import FUZZ
from loop_driver import expected_output
from odd_requests import VOCAB_SIZE, hostile_values, processor
from shorthand import params
from started_manager import start

from gptmanager import InferenceRequest, KvCacheConfig
from gptmanager.lifecycle.state import ManagerState
from gptmanager.request.inference_request import KEYWORDS, TENSORS
from gptmanager.testing import RecordingCallbacks

BATCH = 24


def subclass(chance):
    """A request class whose attributes raise, or that was never initialised."""
    name = chance.choice(["request_id", "tensors", *KEYWORDS])
    error = chance.choice([ValueError("c"), SystemExit("c")])

    def raises(self):
        raise error

    if chance.random() < 0.5:
        return type("Mine", (InferenceRequest,), {name: property(raises)})
    return type("Mine", (InferenceRequest,), {"__init__": lambda self, *args, **more: None})


def mutated(chance, request_id):
    """A request with something wrong, most of the time."""
    item = InferenceRequest.from_tokens(request_id, [1, 2, 3], chance.randint(1, 6))
    names = [*TENSORS, "no such tensor", 7]
    tensors = item.tensors
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        kind = chance.random()
        if kind < 0.55:
            tensors[chance.choice(names)] = hostile_values(chance)
        elif kind < 0.75:
            item.__dict__[chance.choice(KEYWORDS)] = hostile_values(chance)
        elif kind < 0.9:
            item.__dict__["logits_post_processor"] = processor(chance)
        elif kind < 0.93:
            item.__dict__["tensors"] = hostile_values(chance)
        elif kind < 0.96:
            item.__dict__["request_id"] = hostile_values(chance)
            return item
        else:
            own_class = subclass(chance)
            if "__init__" in vars(own_class):
                return own_class()
            object.__setattr__(item, "__class__", own_class)
    return item


def answerable(item):
    """The id under which it is answered; None: it has none."""
    try:
        number = item.request_id
        is_integer = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
        return int(number) if is_integer and 0 <= number < 2**64 else None
    except BaseException:  # noqa: B036 - what is tried here
        return None


def good(request_id, prompt_len):
    prompt = [(request_id + 7 * i) % VOCAB_SIZE for i in range(prompt_len)]
    return prompt, InferenceRequest.from_tokens(request_id, prompt, 5)


@pytest.mark.timeout(60 * FUZZ)
@pytest.mark.filterwarnings("ignore")  # NumPy's, about conversions
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_mutated_requests_have_one_final_each_and_leave_their_neighbours_alone(run_ahead):
    chance = random.Random(run_ahead)
    cache = KvCacheConfig(max_tokens=1024, tokens_per_block=4, enable_block_reuse=True)
    options = params(
        kv_cache_config=cache,
        max_get_failures=1 << 30,
        run_ahead=run_ahead,
        max_batch_size=8,
        max_active_requests=None,
    )
    host = RecordingCallbacks()
    with start(host, options=options) as manager:
        for round_ in range(30 * FUZZ):
            host.responses.clear()
            base = 1000 * (round_ + 1)
            items = [mutated(chance, base + i) for i in range(BATCH)]
            neighbours = [good(base + 500 + i, 1 + i * 3) for i in range(3)]
            due = [number for item in items if (number := answerable(item)) is not None]
            mixed = [*items, *(item for _, item in neighbours)]
            chance.shuffle(mixed)
            host.submit(*mixed)
            assert manager.wait_idle(60)
            assert manager.state is ManagerState.RUNNING, manager.exception
            finals = [r.request_id for r in host.responses if r.is_final]
            assert sorted(finals) == sorted(due + [base + 500 + i for i in range(3)]), round_
            for i, (prompt, _) in enumerate(neighbours):
                assert host.output(base + 500 + i) == prompt + expected_output(prompt, 5), round_
            if round_ % 10 == 0:
                report = manager.audit()
                assert report.ok and report.used_blocks == 0
