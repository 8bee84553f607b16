"""`gptmanager bench`: a synthetic load through the public interface, beside a peer in one run.

Timed from the first submit to the last final response. Engines run in alternation, so that what
else the machine does hits both; the best of the repeats counts, and a ratio is made of two figures
of the same run only.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor
from tqdm import tqdm

from gptmanager.callbacks import RequestQueue
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import ConfigError
from gptmanager.manager import GptManager
from gptmanager.run import percentiles

# the model that CPU figures are compared on when no checkpoint is given
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}

Request = tuple[list[int], int]  # prompt, new tokens
Source = Path | tuple[Mapping[str, Any], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths are drawn uniformly from ranges, both ends included."""

    num_requests: int = 64
    prompt_len: tuple[int, int] = (16, 256)
    output_len: tuple[int, int] = (16, 128)
    seed: int = 7

    def requests(self, vocab_size: int) -> list[Request]:
        chance = np.random.default_rng(self.seed)
        draw = chance.integers
        return [
            (
                draw(0, vocab_size, draw(*self.prompt_len, endpoint=True)).tolist(),
                int(draw(*self.output_len, endpoint=True)),
            )
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`model` None: random weights of `SMALL_LLAMA`."""

    model: Path | None = None
    load: Load = field(default_factory=Load)
    repeats: int = 3
    peer: str | None = None
    params: OptionalParams = field(default_factory=OptionalParams)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one engine."""

    seconds: float
    output_tokens: int
    outputs: tuple[tuple[int, ...], ...]
    latencies: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def bench(options: BenchOptions) -> dict[str, Any]:
    """Run the load `repeats` times on each engine; returns the report."""
    source = options.model or (SMALL_LLAMA, random_llama(SMALL_LLAMA, options.load.seed))
    config = _config(source)
    requests = options.load.requests(config["vocab_size"])
    engines: dict[str, Callable[[], Figures]] = {
        "gptmanager": lambda: run_manager(source, requests, options.params, options.scheduler)
    }
    if options.peer is not None:
        if options.peer != "transformers":
            raise ConfigError(f"--peer {options.peer!r}: only transformers is known")
        peer = TransformersPeer(source, options.params)
        engines["transformers"] = lambda: peer.run(requests)
    runs: dict[str, list[Figures]] = {name: [] for name in engines}
    rounds = [name for _ in range(options.repeats) for name in engines]
    for name in tqdm(rounds, unit="run", leave=False):
        runs[name].append(engines[name]())
    return _report(options, config, requests, runs)


def run_manager(
    source: Source,
    requests: Sequence[Request],
    params: OptionalParams,
    scheduler: SchedulerConfig,
) -> Figures:
    """All requests at once, greedy, none ends early."""
    with (
        RequestQueue(max_pending=None) as queue,
        GptManager(
            source,
            ModelType.INFLIGHT_FUSED_BATCHING,
            1,
            scheduler,
            queue.get_inference_requests,
            queue.send_response,
            queue.poll_stop_signal,
            None,
            params,
        ) as manager,
    ):
        queue.attach(manager)
        queue.submit(requests[0][0], 2).result()  # what is compiled or touched once is no figure
        started = time.perf_counter()
        generations = [queue.submit(prompt, new_tokens) for prompt, new_tokens in requests]
        results = [generation.result() for generation in generations]
        seconds = time.perf_counter() - started
    outputs = tuple(result.generated_ids[0] for result in results)
    metrics = [result.metrics for result in results]
    return Figures(
        seconds,
        sum(map(len, outputs)),
        outputs,
        {
            "time_to_first_token_ms": percentiles([m["first_token_s"] for m in metrics]),
            "time_per_output_token_ms": percentiles(
                [
                    (m["last_token_s"] - m["first_token_s"]) / (m["generated_tokens"] - 1)
                    for m in metrics
                    if m["generated_tokens"] > 1
                ]
            ),
        },
    )


class TransformersPeer:
    """transformers' continuous batching (paged attention through SDPA) on the same weights."""

    def __init__(self, source: Source, params: OptionalParams) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError("--peer transformers needs `pip install transformers`") from error
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, params.dtype or "float32")
        auto: Any = transformers.AutoModelForCausalLM
        if isinstance(source, tuple):
            config = transformers.AutoConfig.for_model(**source[0])
            self._model = auto.from_config(config, dtype=dtype)
            self._model.load_state_dict(source[1], strict=False)
        else:
            self._model = auto.from_pretrained(source, dtype=dtype)
        self._model.eval()
        self._model.set_attn_implementation("paged|sdpa")
        self._generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=1 << 20
        )
        self._batching = transformers.ContinuousBatchingConfig(
            max_batch_tokens=512, num_blocks=128
        )

    def run(self, requests: Sequence[Request]) -> Figures:
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=self._generation,
                continuous_batching_config=self._batching,
                block=True,
                timeout=10,
                warmup=False,
            ) as manager,
        ):
            started = time.perf_counter()
            for index, (prompt, new_tokens) in enumerate(requests):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=new_tokens)
            outputs: dict[int, tuple[int, ...]] = {}
            while len(outputs) < len(requests):
                result = manager.get_result(timeout=10)
                if result is not None and result.is_finished():
                    outputs[int(result.request_id)] = tuple(result.generated_tokens)
            seconds = time.perf_counter() - started
        ordered = tuple(outputs[index] for index in range(len(requests)))
        return Figures(seconds, sum(map(len, ordered)), ordered)


def random_llama(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """A state dict by Hugging Face's names: normal(0, 0.02), norms 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    norms = ["model.norm"]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {prefix + name: shape for name, shape in layer.items()}
        norms += [prefix + "input_layernorm", prefix + "post_attention_layernorm"]
    weights = {
        f"{name}.weight": torch.empty(shape).normal_(0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }
    return weights | {f"{name}.weight": torch.ones(hidden) for name in norms}


def _config(source: Source) -> Mapping[str, Any]:
    if isinstance(source, tuple):
        return source[0]
    try:
        config: dict[str, Any] = orjson.loads((source / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(f"--model {str(source)!r} has no config.json") from error
    return config


def _report(
    options: BenchOptions,
    config: Mapping[str, Any],
    requests: Sequence[Request],
    runs: Mapping[str, Sequence[Figures]],
) -> dict[str, Any]:
    best = {name: max(figures, key=lambda f: f.tokens_per_second) for name, figures in runs.items()}
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in ("torch", "numpy", "numba")},
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "active"),
        "model": {key: config.get(key) for key in ("model_type", "hidden_size", "vocab_size")},
        "requests": len(requests),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": best["gptmanager"].output_tokens,
        "engines": {
            name: {
                "best_output_tokens_per_second": round(best[name].tokens_per_second, 1),
                "all": [round(f.tokens_per_second, 1) for f in figures],
                **best[name].latencies,
            }
            for name, figures in runs.items()
        },
    }
    if "transformers" in runs:
        ours, theirs = best["gptmanager"], best["transformers"]
        same = sum(a == b for a, b in zip(ours.outputs, theirs.outputs, strict=True))
        report["ratio_to_transformers"] = round(
            ours.tokens_per_second / theirs.tokens_per_second, 2
        )
        report["same_outputs"] = f"{same} of {len(requests)}"
    return report
