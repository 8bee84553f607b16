"""Options of `vllm serve` and `llama-server`, and what takes their place here.

tests/server/test_porting_page.py compares them with the tables of docs/porting.md.
"""

from __future__ import annotations

from collections.abc import Collection

# an option there -> the option here, which need not be similar
_OURS = {
    "a": "served-model-name",
    "alias": "served-model-name",
    "allowed-origins": "cors-origin",
    "api-prefix": "root-path",
    "async-scheduling": "overlap",
    "b": "max-num-tokens",
    "batch-size": "max-num-tokens",
    "block-size": "tokens-per-block",
    "c": "kv-cache-tokens",
    "cache-type-k": "kv-cache-dtype",
    "cache-type-v": "kv-cache-dtype",
    "chat-template-file": "chat-template",
    "ctk": "kv-cache-dtype",
    "ctv": "kv-cache-dtype",
    "ctx-size": "kv-cache-tokens",
    "enable-chunked-prefill": "chunked-context",
    "enable-log-requests": "log-prompts",
    "enable-lora": "adapter",
    "enable-prefix-caching": "block-reuse",
    "gpu-layers": "device",
    "gpu-memory-utilization": "kv-cache-tokens",
    "hf": "model",
    "hf-repo": "model",
    "kv-offloading-size": "host-tier-bytes",
    "lora": "adapter",
    "lora-modules": "adapter",
    "m": "model",
    "max-cpu-loras": "max-adapters",
    "max-loras": "max-adapters",
    "max-model-len": "max-seq-len",
    "max-num-batched-tokens": "max-num-tokens",
    "max-num-seqs": "max-batch-size",
    "md": "prompt-lookup",
    "model-draft": "prompt-lookup",
    "model-impl": "model-backend",
    "n": "max-new-tokens",
    "n-gpu-layers": "device",
    "n-predict": "max-new-tokens",
    "ngl": "device",
    "no-enable-prefix-caching": "no-block-reuse",
    "np": "max-batch-size",
    "num-gpu-blocks-override": "kv-cache-tokens",
    "p": "prompt",
    "parallel": "max-batch-size",
    "pp": "pipeline-parallel-size",
    "predict": "max-new-tokens",
    "q": "weights-dtype",
    "quantization": "weights-dtype",
    "reasoning-format": "reasoning-parser",
    "repeat-penalty": "repetition-penalty",
    "s": "seed",
    "spec-type": "prompt-lookup",
    "speculative-config": "prompt-lookup",
    "ssl-cert-file": "tls-cert",
    "ssl-certfile": "tls-cert",
    "ssl-key-file": "tls-key",
    "ssl-keyfile": "tls-key",
    "swap-space": "host-tier-bytes",
    "t": "threads",
    "temp": "temperature",
    "timeout": "request-timeout",
    "to": "request-timeout",
    "tp": "tensor-parallel-size",
    "ub": "max-num-tokens",
    "ubatch-size": "max-num-tokens",
}
# advice on options there that no option here replaces
_ADVICE = {
    "leave it out": (
        *("cache-reuse", "cb", "cont-batching", "disable-log-requests", "disable-log-stats"),
        *("enable-auto-tool-choice", "enforce-eager", "fa", "flash-attn", "jinja", "load-format"),
        *("metrics", "mlock", "no-mmap", "numa", "scheduling-policy", "slot-save-path", "slots"),
        "tokenizer-mode",
    ),
    "set a field of each request instead": (
        *("frequency-penalty", "max-tokens", "min-p", "n", "n-predict", "predict"),
        *("presence-penalty", "repeat-penalty", "temp", "temperature", "top-k", "top-p"),
    ),
    "start several servers behind a load balancer": ("data-parallel-size", "dp"),
    "the files in the model's folder are used": ("generation-config", "tokenizer"),
    "run `hf download` first": ("download-dir", "revision"),
    "code in a checkpoint is never run": ("trust-remote-code",),
    "this server only generates text from text": (
        *("embedding", "embeddings", "mmproj", "rerank", "reranking"),
    ),
}
_ADVICE_OF = {option: advice for advice, options in _ADVICE.items() for option in options}


def replacement(option: str, names: Collection[str], prefix: str = "") -> str:
    """Return what takes the place of another server's `option`: a short text, or "".

    `names` are the options here. `option` and `names` have no leading dashes; `prefix` is written
    before a name.
    """
    ours = _OURS.get(option)
    return f"did you mean {prefix}{ours}?" if ours in names else _ADVICE_OF.get(option, "")
