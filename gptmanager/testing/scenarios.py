"""Random scenarios for tests of schedulers.

A scenario has limits, a pool of blocks, and requests with their arrival times. The module
`scenario_run` runs a scenario; `rules` has the rules that the scheduler must keep in the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.assembly.sizing import size
from gptmanager.config import ContextChunkingPolicy, KvCacheConfig, OptionalParams, SchedulerConfig
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.testing.hosts import ScriptedSpec

VOCAB_SIZE = 100
_SIZES = 40  # scenarios grow with the seed over this many seeds, and then start small again


def next_token(history: list[int]) -> int:
    """Return a hash of the history, so that a lost or repeated token changes all later ones."""
    weighted = sum((index + 1) * token for index, token in enumerate(history))
    return (weighted * 31 + len(history)) % VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that arrives at iteration `arrives`.

    If `stopped` is not None, a stop signal for the request arrives at iteration `stopped`. The
    request generates fewer than `max_new_tokens` tokens if it reaches `end_id` or `stop_word`.
    """

    request_id: int
    arrives: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    priority: float = 0.5
    is_streaming: bool = False
    end_id: int | None = None
    stop_word: tuple[int, ...] = ()
    stopped: int | None = None

    def __str__(self) -> str:
        said = [
            f"request {self.request_id}: arrives at iteration {self.arrives}, prompt of "
            f"{len(self.prompt)}, up to {self.max_new_tokens} new tokens"
        ]
        said += [f"priority {self.priority}"] if self.priority != 0.5 else []
        said += ["streams"] if self.is_streaming else []
        num_tokens = len(self.output()) if self.end_id is not None or self.stop_word else None
        said += [f"ends itself after {num_tokens}"] if num_tokens is not None else []
        said += [f"stopped at iteration {self.stopped}"] if self.stopped is not None else []
        return ", ".join(said)

    def inference_request(self) -> InferenceRequest:
        """Return the request to submit to a manager."""
        return InferenceRequest.from_tokens(
            self.request_id,
            self.prompt,
            self.max_new_tokens,
            is_streaming=self.is_streaming,
            priority=self.priority,
            end_id=self.end_id,
            stop_words_list=[self.stop_word] if self.stop_word else None,
        )

    def output(self) -> list[int]:
        """Return the tokens that the request generates when it runs alone."""
        history = list(self.prompt)
        start, word = len(history), list(self.stop_word)
        while len(history) < start + self.max_new_tokens:
            token = next_token(history)
            if token == self.end_id:
                break
            history.append(token)
            if word and history[start:][-len(word) :] == word:
                del history[-len(word) :]
                break
        return history[start:]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One test case for a scheduler.

    If `chunking` is None, each context runs as a whole. `run_ahead` and `overlap` are the options
    `run_ahead` and `enable_trt_overlap` of `OptionalParams`.
    """

    seed: int
    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_active_requests: int | None
    chunking: ContextChunkingPolicy | None
    block_reuse: bool
    run_ahead: int
    overlap: bool
    requests: tuple[PlannedRequest, ...]

    def __str__(self) -> str:
        contexts = "whole" if self.chunking is None else f"in chunks ({self.chunking.name})"
        options = ["block reuse"] if self.block_reuse else []
        options += ["run_ahead = 1"] if self.run_ahead else []
        options += ["enable_trt_overlap"] if self.overlap else []
        lines = [
            f"{self.num_blocks} blocks of {self.tokens_per_block} tokens, "
            f"max_batch_size = {self.max_batch_size}, max_num_tokens = {self.max_num_tokens}, "
            f"max_active_requests = {self.max_active_requests}, contexts {contexts}"
            + "".join(f", {option}" for option in options)
        ]
        return "\n".join([*lines, *(f"  {request}" for request in self.requests)])

    @property
    def most_iterations(self) -> int:
        """The largest number of iterations that all requests, run one after another, can take."""
        unit = self.tokens_per_block if self.chunking is not None else self.max_seq_len
        return sum(
            -(-len(request.prompt) // unit) + request.max_new_tokens for request in self.requests
        )

    def blueprint(self, create_scheduler: Callable[..., Any]) -> Blueprint:
        """Return the settings of a loop with these limits and the scheduler to test."""
        params = OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=self.num_blocks * self.tokens_per_block,
                tokens_per_block=self.tokens_per_block,
                enable_block_reuse=self.block_reuse,
            ),
            enable_trt_overlap=self.overlap,
            run_ahead=self.run_ahead,
            enable_chunked_context=self.chunking is not None,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            max_active_requests=self.max_active_requests,
        )
        scheduler = SchedulerConfig(
            context_chunking_policy=self.chunking, create_scheduler=create_scheduler
        )
        sizes = size(params, scheduler, ScriptedSpec(VOCAB_SIZE, self.max_seq_len))
        return Blueprint(params, scheduler, sizes, VOCAB_SIZE)


def random_scenario(seed: int, *, evicts: bool = True) -> Scenario:
    """Return the scenario of this seed; small seeds have small scenarios.

    With `evicts`, the scheduler may pause requests. A paused request later computes all its tokens
    except the newest again. If contexts are not chunked, the scenario therefore limits the length
    of requests, so that these tokens fit into one step.
    """
    generator = random.Random(seed)
    tokens_per_block = generator.choice([2, 4, 4, 8])
    max_seq_len = generator.randint(12, 40)
    max_batch_size = generator.randint(1, 6)
    num_requests = 1 + seed % _SIZES * 12 // _SIZES + generator.randint(0, 2)
    tightest = -(-max_seq_len // tokens_per_block)
    num_blocks = generator.choice(
        [tightest, tightest + generator.randint(1, 3), 2 * tightest, max_batch_size * tightest + 4]
    )
    chunking = generator.choice([None, *ContextChunkingPolicy])
    max_num_tokens = generator.randint(10, 2 * max_seq_len)
    overlap_or_ahead = generator.choice(["neither", "run_ahead", "overlap"])
    # A context is a prompt, or after a pause all tokens but the newest. Without chunking, each
    # context must fit into one step.
    one_context = max_num_tokens if chunking is None else max_seq_len
    longest = min(max_seq_len, one_context + 1) if evicts else max_seq_len
    return Scenario(
        seed=seed,
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_active_requests=generator.choice([None, None, max_batch_size, 2 * max_batch_size]),
        chunking=chunking,
        block_reuse=generator.random() < 0.5,
        run_ahead=int(overlap_or_ahead == "run_ahead"),
        overlap=overlap_or_ahead == "overlap",
        requests=_requests(generator, num_requests, longest, one_context, max_seq_len),
    )


def _requests(
    generator: random.Random, count: int, longest: int, longest_prompt: int, max_seq_len: int
) -> tuple[PlannedRequest, ...]:
    """Return requests that arrive all at once, in bursts, or one by one."""
    beginning = [generator.randrange(VOCAB_SIZE) for _ in range(max_seq_len)]
    arrivals = generator.choice(["at once", "in bursts", "one by one"])
    requests, now = [], 0
    for number in range(count):
        if arrivals == "one by one" or (arrivals == "in bursts" and generator.random() < 0.3):
            now += generator.randint(1, 8)
        requests.append(_request(generator, number, now, beginning, longest, longest_prompt))
    return tuple(requests)


def _request(
    generator: random.Random,
    number: int,
    now: int,
    beginning: list[int],
    longest: int,
    longest_prompt: int,
) -> PlannedRequest:
    """Return a request of at most `longest` tokens, new ones included. It may share a prefix."""
    prompt_len = generator.randint(1, min(longest - 1, longest_prompt))
    shared = generator.randint(0, prompt_len)
    rest = [generator.randrange(VOCAB_SIZE) for _ in range(prompt_len - shared)]
    prompt = tuple(beginning[:shared] + rest)
    max_new_tokens = generator.randint(1, longest - prompt_len)
    output = PlannedRequest(number, now, prompt, max_new_tokens).output()
    end, index = generator.random(), generator.randrange(max_new_tokens)
    return PlannedRequest(
        number,
        now,
        prompt,
        max_new_tokens,
        priority=generator.choice([0.5, 0.5, 0.5, 0.1, 0.9]),
        is_streaming=generator.random() < 0.3,
        end_id=output[index] if end < 0.25 else None,
        stop_word=tuple(output[index : index + 2]) if 0.25 < end < 0.4 else (),
        stopped=now + generator.randint(0, 20) if generator.random() < 0.15 else None,
    )
