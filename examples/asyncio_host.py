"""An asyncio host: several conversations at once, one of them cancelled half way.

python examples/asyncio_host.py [MODEL_FOLDER]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gptmanager import GptManager, ModelType, SchedulerConfig
from gptmanager.callbacks import RequestQueue, TextStream, load_tokenizer

BUNDLED = Path(__file__).parent / "tiny_llama"
PROMPTS = ("17 + 25 =", "40 - 13 =", "Count from 1 to 12:")


async def complete(queue: RequestQueue, tokenizer, prompt: str, max_tokens_shown: int) -> str:
    """Stream a completion; leave early after `max_tokens_shown` tokens."""
    ids = tokenizer.encode(prompt).ids
    text = TextStream(tokenizer, ids)
    completion = ""
    with queue.submit(ids, 40, is_streaming=True) as generation:  # an early end cancels it
        shown = 0
        async for token in generation:
            completion += text.push(token)
            shown += 1
            if shown == max_tokens_shown:
                break
    return completion + text.flush()


async def converse(queue: RequestQueue, tokenizer) -> list[str]:
    return await asyncio.gather(*(complete(queue, tokenizer, prompt, 12) for prompt in PROMPTS))


def main(folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    with (
        RequestQueue.for_checkpoint(folder) as queue,
        GptManager(
            *(folder, ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig()),
            *(queue.get_inference_requests, queue.send_response, queue.poll_stop_signal),
        ) as manager,
    ):
        queue.attach(manager)
        completions = asyncio.run(converse(queue, tokenizer))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"{prompt}|{completion}")
    return completions


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED)
