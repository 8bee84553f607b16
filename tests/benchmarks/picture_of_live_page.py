"""Makes docs/pictures/live_page.png: the live page of a load, in a headless Chromium.

PYTHONPATH=tests/support .venv/bin/python tests/benchmarks/picture_of_live_page.py \\
  docs/pictures/live_page.png
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

from chromium import Chromium

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import LivePage
from gptmanager.testing import RecordingCallbacks, ScriptedModel

_STEP_S, _WATCHED_S = 0.06, 11.0


class Load(RecordingCallbacks):
    """About as many requests as the KV cache holds, now and then more."""

    def __init__(self):
        super().__init__()
        self._ids, self._draw, self._due = itertools.count(1), random.Random(6), 0.0

    def get_inference_requests(self, max_num_requests):
        if time.monotonic() < self._due or max_num_requests == 0:
            return []
        self._due = time.monotonic() + self._draw.choice((0.1, 0.3, 0.5))
        return [
            InferenceRequest.from_tokens(
                next(self._ids),
                [1] * self._draw.choice((12, 40, 90, 180)),
                self._draw.randrange(20, 110),
            )
        ]


def main(path):
    host, model = Load(), ScriptedModel(lambda history: 1, vocab_size=4)
    forward = model.forward

    def slow_forward(*arguments):
        time.sleep(_STEP_S)
        return forward(*arguments)

    model.forward = slow_forward
    params = OptionalParams(
        max_batch_size=14,
        max_num_tokens=64,
        max_active_requests=24,
        kv_cache_config=KvCacheConfig(max_tokens=1000, tokens_per_block=16),
    )
    policy = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with (
        LivePage() as page,
        tempfile.TemporaryDirectory() as profile,
        GptManager(model, fused, 1, policy, **host.keywords(), optional_params=params) as manager,
        Chromium(profile, width=1120, height=812) as browser,
    ):
        page.attach(manager)
        browser.prefer("light")
        browser.open(page.serve())
        time.sleep(_WATCHED_S)
        Path(path).write_bytes(browser.screenshot())
        manager.shutdown(drain=False)


if __name__ == "__main__":
    main(sys.argv[1])
