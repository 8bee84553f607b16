"""`gptmanager bench e2e`: a whole model behind a manager, part by part, beside transformers.

Decides which parts run and in what order, what is left out when time runs short, and what becomes
of a part that fails. The model is a checkpoint, or one of random weights made on the device.
"""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmanager.bench.dense_reference import compare, why_not
from gptmanager.bench.device_trace import watch
from gptmanager.bench.engine import IterationLog, Session
from gptmanager.bench.load import (
    LLAMA_8B,
    SMALL_LLAMA,
    Request,
    Source,
    random_llama,
    read_checkpoint,
    uniform_requests,
)
from gptmanager.bench.machine import find_gpu, header
from gptmanager.bench.pressure import compare_policies
from gptmanager.bench.roofline import Ceilings, ModelShape, measure_ceilings
from gptmanager.bench.scale import CPU_SCALE, GPU_SCALE, Scale
from gptmanager.bench.serving_parts import Stage, time_load, time_steps, trace_steps
from gptmanager.bench.timing import Budget, ClockTimer, DeviceTimer
from gptmanager.bench.transformers_peer import TooSlow, TransformersPeer
from gptmanager.config import KvCacheConfig, OptionalParams, ProgressCallback
from gptmanager.errors import ConfigError

PARTS = ("check", "steps", "load", "transformers", "saturated", "pressure")
# what a manager does otherwise; run only where they are asked for
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "deterministic": {"deterministic": True},
    "no graphs": {"cuda_graphs": False},
}
_ON_CPU = ("cpu", "emulator")
_LONG = ("saturated", "pressure")
_PEER_LIMIT_S = 60.0
_STEP_GOALS_MS = {1: 4.2, 32: 5.4, 128: 9.0, 256: 15.5}
_LOAD_GOAL, _PEER_GOAL = 9300, 3.0


@dataclass(frozen=True, slots=True)
class EndToEndOptions:
    """`device`: as in OptionalParams. `dtype` None: the checkpoint's, or of random weights bfloat16
    on a GPU, float32 on a CPU. `run_ahead` None: the device's. `ablations`: names of ABLATIONS.
    """

    device: str = "cuda"
    model: Path | None = None
    scale: Scale | None = None  # None: the device's
    only: tuple[str, ...] = ()
    dtype: str | None = None
    run_ahead: int | None = None
    quick: bool = False
    minutes: float | None = None
    seed: int = 0
    command: tuple[str, ...] = ()
    ablations: tuple[str, ...] = ()


def bench_end_to_end(
    options: EndToEndOptions,
    *,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
    on_part: Callable[[str, Any], None] = lambda name, result: None,
    on_report: Callable[[Mapping[str, Any]], None] = lambda report: None,
    on_progress: ProgressCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The report. ConfigError without a GPU, where `device` asks for one, and for unknown parts.

    A part that fails is told and the others run. Interrupted, the report is of the parts until
    then and has `interrupted`. `on_report` gets the one so far after each part: whoever is killed
    has that. `on_start` gets the name of each part before it, its number from 0, and how many there
    are; `on_progress`: as in OptionalParams, for each manager.
    """
    for word in options.only:
        if word not in PARTS:
            raise ConfigError(f"--only {word}: there is no such part; there are {', '.join(PARTS)}")
    if options.device not in _ON_CPU:
        find_gpu("--device cpu runs a small model on the CPU")
    budget = Budget(None if options.minutes is None else 60 * options.minutes, clock)
    run = _Run(options, budget, on_progress)
    with _current(run.device):
        return _report(run, on_start, on_part, on_report)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Timers, the trace and what a card is asked are those of torch's current device."""
    if device.type != "cuda":
        return nullcontext()
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device='{device}': there are {count} CUDA devices")
    current: AbstractContextManager[Any] = torch.cuda.device(device)
    return current


def _report(
    run: _Run,
    on_start: Callable[[str, int, int], None],
    on_part: Callable[[str, Any], None],
    on_report: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    report = header(run.options.command, run.device)

    def part_done(name: str, result: Any) -> None:
        on_part(name, result)
        on_report({**report, "seconds": round(run.budget.used, 1), "notes": run.notes})

    try:
        run.all_parts(report, on_start, part_done)
    except KeyboardInterrupt:
        report["interrupted"] = True
        run.notes.append("interrupted")
    finally:
        run.close()
    report["seconds"] = round(run.budget.used, 1)
    report["notes"] = run.notes
    return report


@dataclass(eq=False)
class _Run:
    options: EndToEndOptions
    budget: Budget
    on_progress: ProgressCallback | None = None
    notes: list[str] = field(default_factory=list)
    managers: list[dict[str, Any]] = field(default_factory=list)  # what each took to be made
    session: Session | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # of a manager's parameters

    def __post_init__(self) -> None:
        is_gpu = self.options.device not in _ON_CPU
        self.device = torch.device(self.options.device if is_gpu else "cpu")
        own = CPU_SCALE if self.device.type == "cpu" else GPU_SCALE
        self.scale = self.options.scale or own
        self.log = IterationLog()

    def all_parts(
        self,
        report: dict[str, Any],
        on_start: Callable[[str, int, int], None],
        on_part: Callable[[str, Any], None],
    ) -> None:
        started = self.budget.used
        self.source, self.config, self.weights = self._model()
        report["construction"] = {
            "weights_s": round(self.budget.used - started, 1),
            "managers": self.managers,
        }
        dtype = self.weights["model.norm.weight"].dtype if self.weights else torch.float32
        self.ceilings = self._ceilings(dtype)
        kv_itemsize = 4 if self.options.device == "cpu" else dtype.itemsize
        self.shape = ModelShape.of(self.config, dtype.itemsize, kv_itemsize)
        report["model"] = {
            **{name: self.config.get(name) for name in ("model_type", "hidden_size",
                                                        "num_hidden_layers", "vocab_size")},
            "dtype": str(dtype).removeprefix("torch."),
            "weights": str(self.options.model or "random"),
        }  # fmt: skip
        report["ceilings"] = self.ceilings.report()
        report["prepared_s"] = round(self.budget.used - started, 1)
        names = [name for name in PARTS if not self.options.only or name in self.options.only]
        if self.options.quick and not self.options.only:
            names = [name for name in names if name not in _LONG]
        if not self.scale.saturated:
            names = [name for name in names if name != "saturated"]
        if self.options.ablations:  # before what takes long
            names.insert(names.index("load") + 1 if "load" in names else len(names), "ablations")
        parts: dict[str, Callable[[], Any]] = {
            "check": self.check,
            "steps": self.steps,
            "load": self.load,
            "ablations": self.ablations,
            "transformers": self.peer,
            "saturated": self.saturated,
            "pressure": self.pressure,
        }
        for number, name in enumerate(names):
            on_start(name, number, len(names))
            report[name] = self._part(name, parts[name])
            on_part(name, report[name])

    def _part(self, name: str, work: Callable[[], Any]) -> Any:
        if self.budget.is_spent:
            self.notes.append(f"{name}: no time left, skipped")
            return {"status": "skipped", "note": "no time left"}
        try:
            return work()
        except Exception as error:  # of whatever library a peer comes from
            text = (str(error).splitlines() or [""])[0]
            self.notes.append(f"{name}: failed: {text}")
            self.close()  # the next part gets a manager of its own
            return {"status": "failed", "note": f"{type(error).__name__}: {text}"}

    # Parts -----------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        why = why_not(self.config)
        if why or self.weights is None:
            return {"status": "skipped", "note": why or "no weights at hand"}
        vocab_size = self.config["vocab_size"]
        lengths = [(5, 5), (17, 17), (40, 40), (63, 63)]
        requests = [
            (uniform_requests(1, length, (1, 1), vocab_size)[0][0], 16) for length in lengths
        ]
        return compare(self.stage().session, self.config, self.weights, requests)

    def steps(self) -> list[dict[str, Any]]:
        stage, rows = self.stage(), []
        steps = self.scale.steps // 4 if self.options.quick else self.scale.steps
        contexts = self.scale.contexts[:1] if self.options.quick else self.scale.contexts
        cases = [(batch, context) for context in contexts for batch in self.scale.batches
                 if context == contexts[0] or batch < max(self.scale.batches)]  # fmt: skip
        for batch, context in cases:
            if self.budget.is_spent:
                self.notes.append(f"steps of {batch} x {context}: no time left, skipped")
                continue
            goal = _STEP_GOALS_MS.get(batch) if self._is_goal_shape and context == 1024 else None
            rows.append(time_steps(stage, batch, context, steps, goal))
        if stage.trace is not None and not self.budget.is_spent:
            trace = trace_steps(stage, max(self.scale.batches), contexts[0], 4 * steps)
            rows.append({"trace": trace})
        return rows

    def load(self) -> list[dict[str, Any]]:
        stage, goal = self.stage(), _LOAD_GOAL if self._is_goal_shape else None
        rows = [time_load(stage, self._requests, goal=goal)]
        if not self.options.quick and not self.budget.is_spent:
            rows.append(time_load(stage, self._requests, streaming=True))
        return rows

    def ablations(self) -> list[dict[str, Any]]:
        """The load, and steps of the smallest and the largest batch, plain and each other way."""
        rows = [self._ablated("plain", {})]
        rows += [self._ablated(name, ABLATIONS[name]) for name in self.options.ablations]
        for row in rows:
            speeds = (it["output_tokens_per_second"] for it in (row, rows[0]))
            row["ratio"] = round(operator.truediv(*speeds), 3)
        return rows

    def _ablated(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """In a manager of its own."""
        self.close()
        try:
            self.changes = changes
            stage, context = self.stage(), self.scale.contexts[0]
            batches = sorted({min(self.scale.batches), max(self.scale.batches)})
            steps = [time_steps(stage, batch, context, self.scale.steps // 4) for batch in batches]
            return {"name": name, **time_load(stage, self._requests), "steps": steps}
        finally:
            self.changes = {}
            self.close()

    def peer(self) -> dict[str, Any]:
        """Both on the same of the requests, and each alone on the device."""
        if find_spec("transformers") is None:
            self.notes.append("transformers: not installed: skipped")
            return {"status": "skipped", "note": "not installed"}
        requests = self._requests[: self.scale.peer_requests]
        ours = max(self.stage().session.run(requests).tokens_per_second for _ in range(2))
        self.close()
        params = OptionalParams(dtype=self._dtype)
        row: dict[str, Any] = {"requests": len(requests), "gptmanager": round(ours, 1)}
        engine = TransformersPeer(self.source, params, self.device)
        try:
            theirs = engine.run(requests, _PEER_LIMIT_S).tokens_per_second
        except TooSlow as error:
            theirs = sum(new_tokens for _, new_tokens in requests) / _PEER_LIMIT_S
            row["note"] = f"{error}: at most this fast"
        ratio = ours / theirs
        goal = {"text": f">= {_PEER_GOAL:g} x", "met": ratio >= _PEER_GOAL}
        return {
            "status": "ok",
            **row,
            "transformers": round(theirs, 1),
            "ratio": round(ratio, 3),
            **({"goal": goal} if self._is_goal_shape else {}),
        }

    def saturated(self) -> list[dict[str, Any]]:
        """Loads that fill the KV cache, in batches as large as it allows."""
        rows: list[dict[str, Any]] = []
        self.close()
        stage = self.stage(2 * self.scale.max_batch_size) if self.scale.saturated else None
        for prompt, new_tokens, count in self.scale.saturated:
            name = f"{prompt}/{new_tokens}"
            if stage is None or self.budget.is_spent:
                self.notes.append(f"saturated {name}: no time left, skipped")
                continue
            lengths = (prompt, prompt), (new_tokens, new_tokens)
            requests = uniform_requests(count, *lengths, self.config["vocab_size"])
            rows.append({"name": name, **time_load(stage, requests)})
        return rows

    def pressure(self) -> dict[str, Any]:
        """Each policy in a manager of its own."""
        self.close()
        params = self._params(self.scale.max_batch_size)
        vocab_size = self.config["vocab_size"]
        return compare_policies(self.source, params, self.scale.pressure, vocab_size)

    # What they stand on ----------------------------------------------------------------------

    def stage(self, max_batch_size: int | None = None) -> Stage:
        """A manager of these sizes, started if there is none."""
        size = max_batch_size or self.scale.max_batch_size
        if self.session is None:
            started = time.perf_counter()
            self.session = Session(self.source, self._params(size), log=self.log)
            made = time.perf_counter()
            self.session.warm_up()
            took = {"made_s": made - started, "first_request_s": time.perf_counter() - made}
            took = {name: round(seconds, 2) for name, seconds in took.items()}
            self.managers.append({"max_batch_size": size, **self.changes, **took})
        return Stage(
            session=self.session,
            log=self.log,
            vocab_size=self.config["vocab_size"],
            max_num_tokens=self.scale.max_num_tokens,
            max_batch_size=size,
            ceilings=self.ceilings,
            shape=self.shape,
            trace=watch if self.device.type == "cuda" else None,
        )

    def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _params(self, max_batch_size: int) -> OptionalParams:
        limit = self.config.get("max_position_embeddings") or self.scale.max_seq_len
        return OptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=self.scale.kv_cache_tokens),
            max_batch_size=max_batch_size,
            max_num_tokens=self.scale.max_num_tokens,
            max_seq_len=min(self.scale.max_seq_len, limit),
            run_ahead=self.options.run_ahead,
            device=self.options.device,
            dtype=self._dtype,
            black_box_iterations=0,
            on_progress=self.on_progress,
            **self.changes,
        )

    def _model(self) -> tuple[Source, dict[str, Any], dict[str, Tensor] | None]:
        """What a manager loads; config; weights for the reference, where it knows the model."""
        if self.options.model is not None:
            config, read = read_checkpoint(self.options.model)
            where: dict[str, Any] = {
                "dtype": getattr(torch, self._dtype or "", None),
                "device": self.device,
            }
            weights = {name: weight.to(**where) for name, weight in read.items()}
            return self.options.model, config, None if why_not(config) else weights
        config = SMALL_LLAMA if self.device.type == "cpu" else LLAMA_8B
        dtype = getattr(torch, self._dtype or "float32")
        weights = random_llama(config, self.options.seed, dtype=dtype, device=self.device)
        return (config, weights), config, weights

    @property
    def _dtype(self) -> str | None:
        if self.options.dtype is not None or self.options.model is not None:
            return self.options.dtype
        return "float32" if self.device.type == "cpu" else "bfloat16"

    @property
    def _is_goal_shape(self) -> bool:
        return self.config is LLAMA_8B and self.scale is GPU_SCALE

    @property
    def _requests(self) -> Sequence[Request]:
        lengths = self.scale.lengths
        return uniform_requests(self.scale.requests, lengths, lengths, self.config["vocab_size"])

    def _ceilings(self, dtype: torch.dtype) -> Ceilings:
        timer = ClockTimer() if self.device.type == "cpu" else DeviceTimer()
        sizes = (self.scale.copy_bytes, self.scale.product_width)
        return measure_ceilings(timer, self.device, dtype, *sizes)
