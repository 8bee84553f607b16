"""Requests that are right: those of real clients, and some for fields that they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BODIES = Path(__file__).resolve().parents[1] / "server" / "client_bodies"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MODEL = "tiny_llama"
OWN: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Tom had a red", "max_tokens": 4, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [9, 30, 71], "max_tokens": 4, "n": 2, "stop": ["a", "b"], "seed": 1}),
    (COMPLETIONS, {"prompt": "Tom", "max_tokens": 8, "guided_regex": "[a-z]+", "stream": True}),
    (COMPLETIONS, {"prompt": "Tom", "max_tokens": 8, "guided_choice": ["red", "blue"]}),
    (COMPLETIONS, {"prompt": "Tom", "max_tokens": 8, "guided_json": {"type": "object"}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "logit_bias": {"9": 1.5}, "stream": True}),
    ("/tokenize", {"prompt": "Tom had a red ball"}),
    ("/detokenize", {"tokens": [9, 30, 71]}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "small"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/v2/models/ensemble/generate", {"text_input": "Tom", "max_tokens": 4, "bad_words": ["a"]}),
    ("/v2/models/tensorrt_llm_bls/generate_stream", {"text_input": "Tom", "max_tokens": 4,
                                                     "stream": True, "stop_words": ["b"]}),
    ("/v2/models/tensorrt_llm/generate", {"input_ids": [9, 30], "input_lengths": 2,
                                          "request_output_len": 4, "beam_width": 2}),
    ("/v2/models/tensorrt_llm/infer", {"id": "x", "inputs": [
        {"name": "input_ids", "shape": [1, 3], "datatype": "INT32", "data": [9, 30, 71]},
        {"name": "input_lengths", "shape": [1, 1], "datatype": "INT32", "data": [3]},
        {"name": "request_output_len", "shape": [1, 1], "datatype": "INT32", "data": [4]}],
        "outputs": [{"name": "output_ids", "parameters": {"binary_data": False}},
                    {"name": "sequence_length"}]}),
)  # fmt: skip


def client_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Route and body of each, short enough for a small server; in a fixed order."""
    found = list(OWN)
    for path in sorted(BODIES.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            body = {**case["body"], "model": MODEL}
            if "max_tokens" in body or "max_completion_tokens" not in body:
                body["max_tokens"] = 4
            else:
                body["max_completion_tokens"] = 4
            found.append((case.get("route", CHATS), body))
    return found
