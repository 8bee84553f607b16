"""A checkpoint of 8,192 positions with random weights, a template with tools, and short answers."""

import json
from pathlib import Path
from shutil import copy

import torch
from running_server import MODEL
from safetensors.torch import save_file

from gptmanager.bench.load import random_llama
from gptmanager.callbacks import load_tokenizer

TEMPLATES = Path(__file__).parents[1] / "server" / "chat_templates"
NAME = "test-model"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 704,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
# of logits: texts end soon, and so do texts and lists within JSON
_LIKELY = {"<|endoftext|>": 6.0, '"': 5.0, "}": 4.0, "]": 4.0}


def save_client_model(folder):
    """Write the checkpoint into a folder that exists."""
    for name in ("tokenizer_config.json", "generation_config.json"):
        copy(MODEL / name, folder)
    copy(TEMPLATES / "qwen.jinja", folder / "chat_template.jinja")
    tokenizer = load_tokenizer(MODEL)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    weights = random_llama(_CONFIG, 5)
    # one direction that all hidden states share, so that a row of the head has a bias
    weights["model.embed_tokens.weight"][:, 0] += 1.0
    head = weights["lm_head.weight"]
    head.mul_(20)
    head[:, 0] = 0.0
    for text, bias in _LIKELY.items():
        head[tokenizer.token_to_id(text), 0] = bias / torch.tensor(64.0).sqrt()
    save_file(weights, folder / "model.safetensors")
