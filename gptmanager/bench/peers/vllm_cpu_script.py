"""A load through vLLM's CPU build, as a program for the interpreter that has it.

Without arguments it tells which vLLM that is; with a JSON file it runs the load in it. The answer
is one line of JSON on the standard output. Nothing of gptmanager is imported, because that
interpreter need not have it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from importlib import import_module
from typing import Any


def main() -> None:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM and its processes print is no answer
    # Modules beside this file have names of other packages, such as `kernels`.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    if os.getpgrp() == os.getpid():  # started by gptmanager, in a group of its own
        threading.Thread(target=_end_with_parent, daemon=True).start()
    told = _run(sys.argv[1]) if len(sys.argv) > 1 else _describe()
    print(json.dumps(told), file=answer, flush=True)


def _end_with_parent() -> None:
    """The standard input ends when the parent does, however that came."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _describe() -> dict[str, Any]:
    vllm = import_module("vllm")
    platform = import_module("vllm.platforms").current_platform
    assert vllm.LLM and vllm.SamplingParams  # naming them imports most of vLLM
    return {"version": vllm.__version__, "device": platform.device_type}


def _run(path: str) -> dict[str, Any]:
    """Seconds from the first request to the last token, and the ids of each output."""
    vllm = import_module("vllm")
    with open(path, encoding="utf-8") as file:
        load = json.load(file)
    engine = vllm.LLM(
        **load["engine"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(requests: list[tuple[list[int], int]]) -> list[list[int]]:
        results = engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                vllm.SamplingParams(
                    temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
                )
                for _, new_tokens in requests
            ],
            use_tqdm=False,
        )
        return [list(result.outputs[0].token_ids) for result in results]

    generate([load["warm_up"]])
    started = time.monotonic()
    outputs = generate(load["requests"])
    return {"seconds": time.monotonic() - started, "outputs": outputs}


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
