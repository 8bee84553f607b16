"""Replicas behind one address: a Ray Serve deployment. Each replica holds a manager.

    pip install -e '.[ray]'      # in the folder of the checkout
    python examples/ray_serve_host.py [MODEL_FOLDER]
    curl -N localhost:8000 -d '{"prompt": "17 + 25 =", "max_new_tokens": 20}'

An answer is a stream of JSON lines: parts of the text, and at the end why it ended. A client that
goes away cancels its request. The number of replicas follows the managers' own statistics. A
replica that is to go takes no new requests, ends those it has, and then shuts its manager down.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gptmanager import FinishReason, GptManager, ModelType, OptionalParams, SchedulerConfig
from gptmanager.callbacks import Generation, RequestQueue, TextStream, load_tokenizer

BUNDLED = Path(__file__).parent / "tiny_llama"
SLOTS = 8  # requests that a replica runs at a time
BUSY = 0.75  # so much of their slots and memory should replicas use
DRAIN_S = 120.0


class Replica:
    """Serve makes one in each process, and calls the three methods with public names, `__call__`
    and `__del__`.
    """

    def __init__(self, folder: str) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._queue = RequestQueue.for_checkpoint(folder)
        self._record: dict[str, Any] = {}
        self._num_cancelled = 0
        self._manager = GptManager(
            *(folder, ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig()),
            *(self._queue.get_inference_requests, self._queue.send_response),
            *(self._queue.poll_stop_signal, self._keep_statistics),
            OptionalParams(max_batch_size=SLOTS),
        )
        self._queue.attach(self._manager)

    async def __call__(self, request: Request) -> Response:
        try:
            body = await request.json()
            prompt = self._tokenizer.encode(body.pop("prompt")).ids
            generation = self._queue.submit(prompt, timeout=0, is_streaming=True, **body)
        except Exception as error:
            return JSONResponse({"error": str(error)}, 400)
        generation.add_done_callback(self._count)
        lines = self._lines(generation, TextStream(self._tokenizer, prompt))
        return StreamingResponse(lines, media_type="application/jsonl")

    async def _lines(self, generation: Generation, text: TextStream) -> AsyncIterator[str]:
        with generation:  # Serve cancels this task when its client has gone: that ends it
            try:
                async for token in generation:
                    yield json.dumps({"text": text.push(token)}) + "\n"
                reason = generation.result().finish_reasons[0].name
                yield json.dumps({"text": text.flush(), "finish_reason": reason}) + "\n"
            except Exception as error:
                yield json.dumps({"error": str(error)}) + "\n"

    def _count(self, ended: Generation) -> None:
        if ended.exception() is None:
            reasons = ended.result().finish_reasons
            self._num_cancelled += FinishReason.CANCELLED in reasons

    def _keep_statistics(self, record: str) -> None:
        self._record = json.loads(record)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it now and then, and tells the policy. `busy` exceeds 1 if some wait."""
        counts = {"open": self._queue.num_open, "cancelled": self._num_cancelled}
        if not counts["open"] or not self._record:  # no record comes while nothing runs
            return {"busy": counts["open"] / SLOTS, **counts}
        wanted = self._record["Active Request Count"] + self._queue.num_pending
        memory = self._record["Used KV cache blocks"] / self._record["Max KV cache blocks"]
        return {"busy": max(wanted / SLOTS, memory), **counts}

    def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        if self._manager.exception is not None:
            raise self._manager.exception

    def __del__(self) -> None:
        """Serve calls it when the last answer has been sent, or `DRAIN_S` are over."""
        self._manager.shutdown(timeout=DRAIN_S)
        self._queue.close()


def replicas_for_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """So many that each is `BUSY`; Serve applies its delays and bounds to that."""
    busy = (context.aggregated_metrics or {}).get("busy", {})
    if len(busy) < context.current_num_replicas:  # a young one has told nothing yet
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(busy.values()) / BUSY)), {}


def application(folder: Path, max_replicas: int = 4, **scaling: Any) -> serve.Application:
    """`scaling`: other fields of AutoscalingConfig."""
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=max_replicas,
        policy=AutoscalingPolicy(policy_function=replicas_for_load),
        **scaling,
    )
    deployment = serve.deployment(
        max_ongoing_requests=4 * SLOTS,  # they wait in the manager, whose scheduler knows them
        autoscaling_config=config,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
    )
    return deployment(Replica).bind(str(folder.resolve()))


if __name__ == "__main__":
    serve.run(application(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED), blocking=True)
