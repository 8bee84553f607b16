"""Tokens a second of one request with prompt lookup against without, in alternating runs.

    python tests/benchmarks/measure_prompt_lookup.py [MODEL]

Copying text gains; text without repeats must not lose. Ratios of the best of several runs.
"""

from __future__ import annotations

import json
import sys
import time

from gptmanager import GptManager, InferenceRequest, ModelType, OptionalParams, PromptLookup
from gptmanager.callbacks.text.checkpoint import load_tokenizer
from gptmanager.testing import RecordingCallbacks

ROUNDS = 7
COPIES = ("Say 6 times: red kite blue boat =", "Say 6 times: apples pears red box =")
LOADS = {
    "copies": (COPIES, 48, {}),
    "runs on": (("copy: " + "one two three four " * 6,), 200, {}),
    "no repeats": (("The quick brown fox",), 200, {"temperature": 5.0, "random_seed": 3}),
}


class Engine:
    """One manager, which serves one request at a time."""

    def __init__(self, model: str, lookup: PromptLookup | None) -> None:
        self.host = RecordingCallbacks()
        self.manager = GptManager(
            model,
            ModelType.INFLIGHT_FUSED_BATCHING,
            optional_params=OptionalParams(speculative_decoding_config=lookup),
            **self.host.keywords(),
        )
        self.host.manager = self.manager
        self._ids = 0

    def seconds(self, prompt: list[int], new_tokens: int, options: dict[str, float]) -> float:
        self._ids += 1
        request = InferenceRequest.from_tokens(self._ids, prompt, new_tokens, **options)
        started = time.perf_counter()
        self.host.submit(request)
        self.manager.notify()
        self.host.final(self._ids, timeout=60)
        return time.perf_counter() - started

    def drafts(self) -> str:
        counts = json.loads(self.host.statistics[-1])["gptmanager"]["draft_tokens"]
        return f"{counts['accepted']} of {counts['drafted']} guesses right"


def main(model: str) -> None:
    tokenizer = load_tokenizer(model)
    for name, (prompts, new_tokens, options) in LOADS.items():
        engines = Engine(model, None), Engine(model, PromptLookup())
        ids = [tokenizer.encode(prompt).ids for prompt in prompts]
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for place, engine in enumerate(engines):
                taken = sum(engine.seconds(prompt, new_tokens, options) for prompt in ids)
                best[place] = min(best[place], taken)
        rates = [len(ids) * new_tokens / seconds for seconds in best]
        told = f"{rates[0]:8.0f} {rates[1]:8.0f} tokens/s, ratio {rates[1] / rates[0]:.2f}"
        print(f"{name:12} {told}; {engines[1].drafts()}")
        for engine in engines:
            engine.manager.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["examples/tiny_llama"])
