"""Requests with values that no schedule expects."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch

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
