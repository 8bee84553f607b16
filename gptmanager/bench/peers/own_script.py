"""A program that times this library, for the comparison with llama.cpp's benchmark programs.

The program reads a JSON object from standard input. It prints a JSON object with the tokens/s of a
prompt, of one request, and of a batch. If the input has the key `text`, which is the path of a
file, the program prints the perplexity of this file instead.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch

from gptmanager.bench.engine import Session
from gptmanager.bench.load import Request, read_config
from gptmanager.callbacks import load_tokenizer
from gptmanager.config import KvCacheConfig, OptionalParams
from gptmanager.errors import ConfigError


def measure(given: Mapping[str, Any]) -> dict[str, float]:
    """Load the model, and return the tokens/s of each of the three loads in its best round."""
    model = Path(given["model"])
    vocab = min(10_000, read_config(model)["vocab_size"])
    size, alone, (count, prompt, output) = given["prompt"], given["alone"], given["batch"]
    needed = max(size + 1, alone + 1, prompt + output)
    params = OptionalParams(
        **given["params"],
        max_seq_len=needed,
        max_batch_size=count,
        kv_cache_config=KvCacheConfig(
            max_tokens=2 * max(needed, count * (prompt + output)), enable_block_reuse=False
        ),
    )
    made = torch.Generator().manual_seed(0)

    def tokens(number: int) -> list[int]:
        found: list[int] = torch.randint(vocab, (number,), generator=made).tolist()
        return found

    loads: dict[str, tuple[int, Callable[[], list[Request]]]] = {
        "prompt": (size, lambda: [(tokens(size), 1)]),
        "alone": (alone, lambda: [(tokens(1), alone)]),
        "batch": (count * output, lambda: [(tokens(prompt), output) for _ in range(count)]),
    }
    best = dict.fromkeys(loads, 0.0)
    with Session(model, params) as session:
        session.warm_up()
        # One round is extra, because the first round is slow: its memory is new.
        for _ in range(given["rounds"] + 1):
            for name, (number, requests) in loads.items():
                made_requests = requests()
                start = time.perf_counter()
                session.results(made_requests)
                best[name] = max(best[name], number / (time.perf_counter() - start))
    return best


def perplexity(given: Mapping[str, Any]) -> dict[str, float]:
    """Compute the perplexity of a text as `llama-perplexity` does.

    The text is cut into chunks of `context` tokens. Only the first `chunks` chunks are used, and
    only the tokens after the middle of each chunk are scored. If the tokenizer adds a first token,
    this token replaces the first token of each chunk. Raise ConfigError if the text is shorter than
    a chunk.
    """
    model, context = Path(given["model"]), given["context"]
    tokenizer, text = load_tokenizer(model), Path(given["text"]).read_text("utf-8")
    tokens = tokenizer.encode(text).ids
    has_first = tokens != tokenizer.encode(text, add_special_tokens=False).ids
    firsts = tokens[:1] if has_first else []
    starts = [context * n for n in range(min(given["chunks"], len(tokens) // context))]
    if not starts:
        raise ConfigError(
            f"{given['text']} has {len(tokens)} tokens: at least {context} are needed"
        )
    params = OptionalParams(
        **given["params"],
        max_seq_len=context + 1,
        max_batch_size=1,
        kv_cache_config=KvCacheConfig(max_tokens=2 * context, enable_block_reuse=False),
    )
    chunks = [[*firsts, *tokens[at + len(firsts) : at + context]] for at in starts]
    with Session(model, params) as session:
        found = session.results([(chunk, 1) for chunk in chunks], num_prompt_log_probs=0)
    # log probability i belongs to token i + 1
    counted = [it.tensors["prompt_log_probs"][0, context // 2 :].double() for it in found]
    return {"perplexity": math.exp(-torch.cat(counted).mean().item())}


if __name__ == "__main__":
    options = orjson.loads(sys.stdin.buffer.read())
    torch.set_num_threads(options["threads"])
    found = perplexity(options) if "text" in options else measure(options)
    sys.stdout.buffer.write(orjson.dumps(found) + b"\n")
