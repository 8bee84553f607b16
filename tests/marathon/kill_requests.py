"""The requests of `marathon_kill.py`, and a manager for them whose answers do not vary."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from marathon_soak import MODEL, adapter

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import load_guided_decoding
from gptmanager.config import PromptLookup

KINDS = (
    *("greedy", "seeded", "unseeded", "log_probs", "beams", "regex", "schema", "drafts", "lookup"),
    *("adapter", "adapter_task", "stop_words", "deadline"),
)
DEADLINE_S = 0.6  # of the kind "deadline": some lives end before it, some after
_VOCAB = 600
_TASK = 3
# one token in 25 ends an output, and one in 3 may begin a stop word, so tokens are held back
_STOP_WORDS = [*([it] for it in range(5, _VOCAB, 25)), *([it, 1] for it in range(6, _VOCAB, 3))]


class Life(NamedTuple):
    """The options of a manager that may differ from life to life without another answer."""

    run_ahead: int = 0
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    max_tokens: int = 4096
    sync: Any = 20
    segment_bytes: int = 64 << 20


class Requests:
    """Makes the requests 0 .. `count` - 1: each kind in turn, at first streamed, then not."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._guided = load_guided_decoding(MODEL)
        self._adapter = adapter(_TASK)
        self._grammars: dict[str, Any] = {}

    def compile(self) -> None:
        """Begin to compile the grammars, on threads: only in a process that does not fork."""
        guided = self._guided
        self._grammars = {
            "regex": guided.regex(r"[A-Z][a-z]{2,5} (had|lost) a (red|blue|green) ball\."),
            "schema": guided.json_schema(
                {"type": "array", "items": {"enum": [7, 8, 9]}, "minItems": 6, "maxItems": 12}
            ),
        }

    @staticmethod
    def kind(number: int) -> str:
        return KINDS[number % len(KINDS)]

    @staticmethod
    def streams(number: int) -> bool:
        return number // len(KINDS) % 2 == 0

    def make(self, number: int, *, has_adapter: bool) -> InferenceRequest:
        """A new request. `has_adapter`: the manager has had the adapter already, so that its task
        is enough.
        """
        kind, chance = self.kind(number), random.Random(number)
        prompt = [chance.randrange(2, _VOCAB) for _ in range(chance.randint(3, 20))]
        named: dict[str, Any] = {"is_streaming": self.streams(number)}
        if kind in ("seeded", "regex", "schema", "stop_words", "adapter", "adapter_task"):
            named |= {"temperature": 1.0, "runtime_top_k": 20, "random_seed": number}
        if kind == "unseeded":
            named |= {"temperature": 1.0, "runtime_top_p": 0.9}
        if kind == "log_probs":
            named["return_log_probs"] = True
        if kind == "beams":
            named["beam_width"] = 2
        if kind in ("regex", "schema"):
            named |= {"end_id": 0, "logits_post_processor": self._grammars[kind]}
        if kind == "drafts":
            named["draft_input_ids"] = [chance.randrange(2, _VOCAB) for _ in range(3)]
        if kind == "lookup":
            prompt = prompt[:4] * 4
        if kind.startswith("adapter"):
            is_bare = kind == "adapter_task" and has_adapter
            named |= {"lora_task_id": _TASK} if is_bare else self._adapter
        if kind == "stop_words":
            named["stop_words_list"] = _STOP_WORDS
        if kind == "deadline":
            named["deadline_s"] = DEADLINE_S
        return InferenceRequest.from_tokens(number, prompt, chance.randint(24, 64), **named)


def start(
    host: Any, life: Life, *, journal: Path | None = None, restores: bool = False
) -> GptManager:
    """A manager for `host`, which has `get` and `send`, and `restore` if it `restores`."""
    return GptManager(
        MODEL,
        ModelType.INFLIGHT_FUSED_BATCHING,
        2,
        SchedulerConfig(life.policy),
        host.get,
        host.send,
        optional_params=OptionalParams(
            journal_path=journal,
            journal_sync=20 if journal is None else life.sync,
            journal_max_resumes=1000,
            restore_cb=host.restore if restores else None,
            kv_cache_config=KvCacheConfig(
                max_tokens=life.max_tokens, tokens_per_block=8, enable_block_reuse=True
            ),
            max_batch_size=8,
            max_active_requests=16,
            max_num_tokens=128,
            max_seq_len=160,
            run_ahead=life.run_ahead,
            deterministic=True,
            exclude_input_in_output=True,
            speculative_decoding_config=PromptLookup(),
        ),
    )
