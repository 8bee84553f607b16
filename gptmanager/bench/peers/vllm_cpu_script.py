"""A program that runs a load through vLLM's CPU build, in an interpreter that has vLLM.

Without arguments it prints vLLM's version and device type. With the path of a JSON file it runs the
load that the file describes. The result is one line of JSON on the standard output. The program
does not import gptmanager, which may be missing in that interpreter.
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
    """Print the version or the result of the load as JSON; see the module docstring."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stderr receives what vLLM prints: only the answer may be on stdout
    # Modules in this file's folder could shadow packages of the same name.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    if os.getpgrp() == os.getpid():  # started by gptmanager, in its own process group
        threading.Thread(target=_end_with_parent, daemon=True).start()
    result = _run(sys.argv[1]) if len(sys.argv) > 1 else _describe()
    print(json.dumps(result), file=answer, flush=True)


def _end_with_parent() -> None:
    """Wait for the parent's end, which closes the standard input; then kill this process group."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _describe() -> dict[str, Any]:
    vllm = import_module("vllm")
    platform = import_module("vllm.platforms").current_platform
    assert vllm.LLM and vllm.SamplingParams  # accessing them imports most of vLLM
    return {"version": vllm.__version__, "device": platform.device_type}


def _run(path: str) -> dict[str, Any]:
    """Run the load of the file `path`; return its duration in seconds and the output tokens."""
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


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
