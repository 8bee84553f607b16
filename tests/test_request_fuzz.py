"""Mutated requests in front of a manager: each gets one final response, and harms nobody.

GPTMANAGER_FUZZ=n sends n times as many (1: some 1,500).
"""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from loop_driver import expected_output
from shorthand import params
from test_manager import start

from gptmanager import InferenceRequest, KvCacheConfig
from gptmanager.lifecycle.state import ManagerState
from gptmanager.request.inference_request import KEYWORDS, TENSORS
from gptmanager.testing import RecordingCallbacks

BATCH = 24
VOCAB_SIZE = 100


class Raising:
    """Raises at whatever is done with it."""

    def __init__(self, error):
        self.error = error

    def _raise(self, *args, **kwargs):
        raise self.error

    __array__ = __len__ = __iter__ = __index__ = __float__ = __int__ = __bool__ = _raise
    __eq__ = __hash__ = __repr__ = __str__ = __call__ = __getitem__ = __lt__ = __gt__ = _raise


class RaisingAttributes:
    def __getattribute__(self, name):
        raise SystemExit(name)


def hostile_values(chance):
    """One of the values that no tensor should have."""
    edges = [0, 1, 2, 99, 100, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, 2**70]
    number = chance.choice([-1, 1]) * chance.choice(edges)
    return chance.choice(
        [
            lambda: None,
            lambda: number,
            lambda: chance.choice([0.5, -0.0, 1e300, 1e-300, float("nan"), float("inf"), -1e30]),
            lambda: chance.choice([True, False]),
            lambda: chance.choice(["", "x", "42", b"\x00", 1j, {}, {1: 2}, set(), object()]),
            lambda: [number] * chance.choice([0, 1, 2, 5]),
            lambda: [[number]],
            lambda: [[[number]]],
            lambda: [[1], [2, 3]],
            lambda: [1, None],
            lambda: np.array([number], dtype=object),
            lambda: np.full(chance.choice([(), (0,), (1,), (2,), (1, 3), (2, 2), (1, 2, 4)]), 3),
            lambda: np.array(chance.choice([3, 3.0, True]), dtype=chance.choice("bBhHiIlLqQfdge?")),
            lambda: np.array([1 + 2j]),
            lambda: np.array(["a"]),
            lambda: np.array(["2020-01-01"], dtype="datetime64[s]"),
            lambda: np.zeros(2, dtype=[("a", int)]),
            lambda: np.arange(10)[::-2],
            lambda: np.broadcast_to(np.int64(1), (2**40,)),
            lambda: np.broadcast_to(np.float32(1), (1, 2**36)),
            lambda: np.ma.masked_array([1, 2, 3], [0, 1, 0]),
            lambda: np.matrix([1, 2]),
            lambda: np.arange(6, dtype=">i4"),
            lambda: torch.zeros(chance.choice([(), (0,), (1,), (1, 3), (2, 2)])),
            lambda: torch.ones(3, dtype=chance.choice([torch.bfloat16, torch.half, torch.int8])),
            lambda: torch.ones(3, requires_grad=True),
            lambda: torch.zeros(3, device="meta"),
            lambda: torch.ones(3).to_sparse(),
            lambda: torch.ones(1, dtype=torch.int64).expand(2**40),
            lambda: torch.ones(3, dtype=torch.complex64),
            lambda: np.full(VOCAB_SIZE, chance.choice([-np.inf, np.inf, np.nan, 0, 1e38])),
            lambda: np.full((2, VOCAB_SIZE), chance.choice([-np.inf, np.nan, 0.0])),
            lambda: Raising(chance.choice([ValueError("v"), SystemExit("s"), KeyboardInterrupt()])),
            lambda: RaisingAttributes(),
        ]
    )()


def processor(chance):
    """A logits post-processor that does something else than it should."""

    def fill(value):
        def process(request_id, logits, tokens, stream, client_id):
            logits.fill_(value)

        return process

    def raises(*args):
        raise chance.choice([ValueError("p"), SystemExit("p"), KeyboardInterrupt()])

    def unready(done):
        future = Future()
        future.set_running_or_notify_cancel()
        future.set_exception(chance.choice([ValueError("f"), SystemExit("f")]))
        kinds = [lambda self, device: future, raises, lambda self, device: None]
        return type("P", (), {"prepare": chance.choice(kinds), "__call__": done})()

    return chance.choice(
        [
            lambda: raises,
            lambda: lambda *args: torch.zeros(chance.choice([1, 7])),
            lambda: lambda *args: "logits",
            lambda: lambda: None,
            lambda: fill(float("nan")),
            lambda: fill(float("inf")),
            lambda: fill(float("-inf")),
            lambda: unready(lambda self, *args: None),
            lambda: type("P", (), {"process_batch": raises})(),
            lambda: hostile_values(chance),
        ]
    )()


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
@pytest.mark.filterwarnings("ignore")  # of NumPy, about what is converted
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
