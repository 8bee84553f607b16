"""`gptmanager bench`: a synthetic load through the public interface, beside a peer in one run.

Timed from the first submit to the last final response. Engines run in alternation, so that what
else the machine does hits both; the best of the repeats counts, and a ratio is made of two figures
of the same run only.
"""

from __future__ import annotations

import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import torch
from torch import Tensor
from tqdm import tqdm

from gptmanager.callbacks import RequestQueue
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import ConfigError, GptManagerError, RequestError
from gptmanager.manager import GptManager
from gptmanager.run import FetchTimes, latencies

# the model that CPU figures are compared on when no checkpoint is given
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

_WARM_UP = [0] * 16  # a prompt before the first timed one
_BLOCK = 256  # tokens in a block of transformers' KV cache, its default
_PEER_BATCH_TOKENS = 512  # in an iteration of transformers: the dense mask grows with it

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
    model: Path | None = None  # None: random weights of `SMALL_LLAMA`
    load: Load = field(default_factory=Load)
    repeats: int = 3
    peer: Literal["transformers"] | None = None
    params: OptionalParams = field(default_factory=OptionalParams)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one engine."""

    seconds: float
    outputs: tuple[tuple[int, ...], ...]
    latencies: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def bench(options: BenchOptions) -> dict[str, Any]:
    """Run the load on each engine; ConfigError if it does not fit the model."""
    source = options.model or (SMALL_LLAMA, random_llama(SMALL_LLAMA, options.load.seed))
    config = source[0] if isinstance(source, tuple) else _read_config(source)
    requests = options.load.requests(config["vocab_size"])
    engines: dict[str, Callable[[], Figures]] = {
        "gptmanager": lambda: run_manager(
            source, requests, options.params, options.scheduler, options.model_type
        )
    }
    if options.peer is not None:
        peer = TransformersPeer(source, options.params)
        engines["transformers"] = lambda: peer.run(requests)
    runs: dict[str, list[Figures]] = {name: [] for name in engines}
    rounds = [name for _ in range(options.repeats) for name in engines]
    with tqdm(rounds, unit="run", leave=False, disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            runs[name].append(engines[name]())
            speed = runs[name][-1].tokens_per_second
            bar.write(f"{name:12} {speed:10,.1f} output tokens/s", file=sys.stderr)
    return _report(options, config, requests, runs)


def run_manager(
    source: Source,
    requests: Sequence[Request],
    params: OptionalParams,
    scheduler: SchedulerConfig,
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING,
) -> Figures:
    """All requests at once, greedy, none ends early."""
    queue = RequestQueue(max_pending=None)
    fetched_at = FetchTimes(queue.get_inference_requests)
    with (
        queue,
        GptManager(
            source,
            model_type,
            1,
            scheduler,
            fetched_at,
            queue.send_response,
            queue.poll_stop_signal,
            None,
            params,
        ) as manager,
    ):
        queue.attach(manager)
        try:
            queue.submit(_WARM_UP, 2).result()  # what is compiled or touched once is no figure
            started = time.monotonic()
            generations = [queue.submit(prompt, new_tokens) for prompt, new_tokens in requests]
            results = [generation.result() for generation in generations]
        except RequestError as error:
            raise ConfigError(f"the load does not fit the model: {error}") from error
        seconds = time.monotonic() - started
    outputs = tuple(result.generated_ids[0] for result in results)
    for output, (prompt, new_tokens) in zip(outputs, requests, strict=True):
        if len(output) < new_tokens:
            total = f"{len(prompt)} + {new_tokens} tokens exceed max_seq_len"
            raise ConfigError(f"the load does not fit the model: {total}")
    waits = [fetched_at.by_id[result.request_id] - started for result in results]
    return Figures(seconds, outputs, latencies([result.metrics for result in results], waits))


class TransformersPeer:
    """transformers' continuous batching (paged attention through SDPA) on the same weights."""

    def __init__(self, source: Source, params: OptionalParams) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError("--peer transformers needs `pip install transformers`") from error
        library: Any = transformers
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        auto = library.AutoModelForCausalLM
        if isinstance(source, tuple):
            config = library.AutoConfig.for_model(**source[0])
            self._model = auto.from_config(config, dtype=getattr(torch, params.dtype or "float32"))
            self._model.load_state_dict(source[1])
        else:
            self._model = auto.from_pretrained(source, dtype=params.dtype or "auto")
        self._model.eval().set_attn_implementation("paged|sdpa")
        self._configure = library.ContinuousBatchingConfig
        self._generation = library.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1 << 20
        )

    def run(self, requests: Sequence[Request]) -> Figures:
        needed = sum(-(-(len(prompt) + new_tokens) // _BLOCK) for prompt, new_tokens in requests)
        batching = self._configure(
            block_size=_BLOCK, num_blocks=2 * needed + 2, max_batch_tokens=_PEER_BATCH_TOKENS
        )
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=self._generation,
                continuous_batching_config=batching,
                timeout=10,
                warmup=False,  # of CUDA graphs
            ) as engine,
        ):
            try:
                _collect(engine, [(_WARM_UP, 2)])
                started = time.monotonic()
                outputs = _collect(engine, requests)
                seconds = time.monotonic() - started
            except BaseException:
                engine.stop(hard_stop=True)  # without it, leaving waits for what still runs
                raise
        return Figures(seconds, outputs)


def _collect(engine: Any, requests: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
    """Run requests through transformers' manager; their outputs in the same order."""
    for index, (prompt, new_tokens) in enumerate(requests):
        engine.add_request(prompt, request_id=str(index), max_new_tokens=new_tokens)
    outputs: dict[int, tuple[int, ...]] = {}
    while len(outputs) < len(requests):
        result = engine.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise GptManagerError(f"transformers failed: {result.error}")
        if result is not None and result.is_finished():
            outputs[int(result.request_id)] = tuple(result.generated_tokens)
        elif result is None and not engine.is_running():
            raise GptManagerError("transformers' generation loop has ended early")
    return tuple(outputs[index] for index in range(len(requests)))


def random_llama(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """A state dict by Hugging Face's names: normal(0, 0.02), norms 1."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    table = (config["vocab_size"], hidden)
    shapes = {"model.embed_tokens": table, "lm_head": table, "model.norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    for weight in weights.values():
        if weight.ndim == 2:
            weight.normal_(0, 0.02, generator=generator)
    return weights


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {folder}: config.json: {error}") from error
    if "vocab_size" not in config:
        raise ConfigError(f"--model {folder}: config.json names no vocab_size")
    return config


def _report(
    options: BenchOptions,
    config: Mapping[str, Any],
    requests: Sequence[Request],
    runs: Mapping[str, Sequence[Figures]],
) -> dict[str, Any]:
    speed = operator.attrgetter("tokens_per_second")
    best = {name: max(figures, key=speed) for name, figures in runs.items()}
    load = options.load
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in ("torch", "numpy", "numba")},
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "active"),
        "model": {key: config.get(key) for key in ("model_type", "hidden_size", "vocab_size")},
        "requests": len(requests),
        "prompt_len": "{}:{}".format(*load.prompt_len),
        "output_len": "{}:{}".format(*load.output_len),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": sum(new_tokens for _, new_tokens in requests),
        "engines": {
            name: {
                "output_tokens_per_second": round(speed(best[name]), 1),
                "of_every_run": [round(speed(figure), 1) for figure in figures],
                **best[name].latencies,
            }
            for name, figures in runs.items()
        },
    }
    if "transformers" in runs:
        ours, theirs = best["gptmanager"], best["transformers"]
        same = sum(a == b for a, b in zip(ours.outputs, theirs.outputs, strict=True))
        report["ratio_to_transformers"] = round(speed(ours) / speed(theirs), 2)
        report["same_outputs"] = f"{same} of {len(requests)}"
    return report
