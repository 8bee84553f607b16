"""Reinforcement learning: generate stories, score them, train one step, update the weights.

The bundled model ends a story in many ways. The reward of a story is higher the shorter it is, so
the model learns to tell short ones. Needs torch and transformers; no download, no GPU.

    python examples/rollout_loop.py [--steps 30] [--sleep]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from tiny_corpus import documents
from torch import Tensor
from transformers import LlamaForCausalLM

from gptmanager import GptManager, ModelType, SchedulerConfig
from gptmanager.callbacks import RequestQueue, load_tokenizer

BUNDLED = Path(__file__).parent / "tiny_llama"
NUM_PROMPTS, NUM_SAMPLES, LONGEST = 4, 8, 64  # samples of each prompt; their tokens at most
PAD = 1


def story_prompts(tokenizer, seed: int) -> list[list[int]]:
    """Prompts that begin a story."""
    stories = (it.prompt for it in documents(Random(seed)) if it.task == "story")
    return [tokenizer.encode(next(stories)).ids for _ in range(NUM_PROMPTS)]


def generate(queue: RequestQueue, prompts: list[list[int]], step: int) -> list[list[int]]:
    """Sample NUM_SAMPLES completions of each prompt, all in one batch."""
    generations = [
        queue.submit(prompt, LONGEST, temperature=1.0, random_seed=step * 1000 + number)
        for number, prompt in enumerate(it for it in prompts for _ in range(NUM_SAMPLES))
    ]
    return [list(generation.result().generated_ids[0]) for generation in generations]


def score(completions: list[list[int]]) -> Tensor:
    """Rewards from 0 to 1: the share of LONGEST that a completion leaves unused."""
    return torch.tensor([1 - len(tokens) / LONGEST for tokens in completions])


def train(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    prompts: list[list[int]],
    completions: list[list[int]],
    rewards: Tensor,
) -> None:
    """Make one policy gradient step; a reward counts relative to those of the same prompt."""
    groups = rewards.view(NUM_PROMPTS, NUM_SAMPLES)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    own = [prompt for prompt in prompts for _ in range(NUM_SAMPLES)]
    longest = max(len(a) + len(b) for a, b in zip(own, completions, strict=True))
    rows = torch.full((len(own), longest), PAD)
    is_generated = torch.zeros(len(own), longest, dtype=torch.bool)
    for row, prompt, tokens in zip(range(len(own)), own, completions, strict=True):
        end = len(prompt) + len(tokens)
        rows[row, :end] = torch.tensor(prompt + tokens)
        is_generated[row, len(prompt) : end] = True
    logits = model(rows[:, :-1]).logits  # the padding follows the tokens, so none of them sees it
    log_probs = logits.log_softmax(dim=-1).gather(2, rows[:, 1:, None])[..., 0]
    gains = (log_probs * is_generated[:, 1:]).sum(dim=1) * advantages
    (-gains.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def main(steps: int = 30, sleeps: bool = False, seed: int = 0) -> list[float]:
    """Run the loop; return the mean reward of each step."""
    tokenizer = load_tokenizer(BUNDLED)
    model = LlamaForCausalLM.from_pretrained(BUNDLED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    rewards = []
    with (
        RequestQueue.for_checkpoint(BUNDLED) as queue,
        GptManager(
            *(BUNDLED, ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig()),
            *(queue.get_inference_requests, queue.send_response, queue.poll_stop_signal),
        ) as manager,
    ):
        queue.attach(manager)
        prompts = story_prompts(tokenizer, seed)
        for step in range(steps):
            completions = generate(queue, prompts, step)
            scores = score(completions)
            if sleeps:  # the trainer needs the memory
                manager.sleep(keep_weights=False)
            train(model, optimizer, prompts, completions, scores)
            version = manager.update_weights(model.state_dict())
            if sleeps:
                manager.wake()
            rewards.append(scores.mean().item())
            print(f"step {step}: reward {rewards[-1]:.3f}, now weights {version}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--sleep", action="store_true", help="release memory while training")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.sleep)
