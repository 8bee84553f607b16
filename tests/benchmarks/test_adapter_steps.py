"""A whole generation step of the benchmark's small model, with adapters and without: 64 rows.

`make test` runs each once, `make bench` times them, and
`python tests/benchmarks/test_adapter_steps.py` prints their tokens a second as a share of those of
the base model, in alternating rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "support"))  # where pytest finds it too

from gptmanager.bench.load import SMALL_LLAMA, random_llama  # noqa: E402
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters  # noqa: E402
from gptmanager.memory.kv_pool import KvPool  # noqa: E402
from gptmanager.models.batch import Batch  # noqa: E402
from gptmanager.models.decoder.lora_modules import lora_modules  # noqa: E402
from gptmanager.models.model import load_model  # noqa: E402
from gptmanager.models.spec import ModelSpec  # noqa: E402

ROWS, ADAPTERS, RANK, CONTEXT = 64, 8, 8, 128
DTYPES = torch.float32, torch.bfloat16
QKV, Q, K, V, DENSE, GATE, DOWN, UP = range(8)
ATTENTION = Q, K, V, DENSE
SORTED = [row * ADAPTERS // ROWS for row in range(ROWS)]
MIXED = [row % ADAPTERS for row in range(ROWS)]
# Modules, and each row's adapter.
CASES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "8 adapters": (ATTENTION, SORTED),
    "8 adapters of attn_qkv and attn_dense": ((QKV, DENSE), SORTED),
    "8 adapters, rows in turns": (ATTENTION, MIXED),
    "8 adapters of all modules": ((Q, K, V, DENSE, GATE, DOWN, UP), SORTED),
    "1 row has one": (ATTENTION, [0] + [-1] * (ROWS - 1)),
    "no row has one": (ATTENTION, [-1] * ROWS),
}


def step_adapters(spec: ModelSpec, modules: Sequence[int], slots: Sequence[int]) -> StepAdapters:
    """Random ones of `RANK`, in `slots` of the rows."""
    every = list(lora_modules(spec).values())
    layout: dict[str, tuple[AdapterModule, ...]] = {}
    for number, it in enumerate(every):
        own = AdapterModule(number, it.first_column, it.num_columns, it.input_width)
        layout[it.matrix] = (*layout.get(it.matrix, ()), own)
    table = torch.zeros(ADAPTERS, spec.num_layers, len(every), 2, dtype=torch.int64)
    end = 0
    for slot in range(ADAPTERS):
        for layer in range(spec.num_layers):
            for number in modules:
                table[slot, layer, number] = torch.tensor([end, RANK])
                end += RANK * (every[number].input_width + every[number].num_columns)
    pool = (0.02 * torch.randn(end, generator=torch.Generator().manual_seed(0))).to(spec.dtype)
    return StepAdapters(pool, torch.tensor(slots, dtype=torch.int32), table, layout, 64)


def steps(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The base model's step, and those of `CASES`: each the same sequences' next tokens."""
    config = {**SMALL_LLAMA, "dtype": str(dtype).split(".")[-1]}
    model = load_model((config, random_llama(SMALL_LLAMA, 0)))
    spec, per_row = model.spec, CONTEXT // 64 + 1
    pool = KvPool(spec.pages, ROWS * per_row, 64, dtype=dtype)
    for it in (pool.keys, pool.values):
        it.normal_()
    every = torch.arange(ROWS)

    def step(adapters: StepAdapters | None) -> Callable[[], Tensor]:
        batch = Batch(
            token_ids=every,
            positions=torch.full((ROWS,), CONTEXT),
            row_starts=torch.arange(ROWS + 1, dtype=torch.int32),
            kv_lengths=torch.full((ROWS,), CONTEXT + 1, dtype=torch.int32),
            slots=every.to(torch.int32),
            block_tables=torch.arange(ROWS * per_row, dtype=torch.int32).view(ROWS, per_row),
            token_table=torch.zeros(ROWS, spec.max_seq_len, dtype=torch.int32),
            sample_index=every,
            sample_rows=every,
            num_context_rows=0,
            adapters=adapters,
            all_sampled=True,
        )
        return lambda: model.forward(batch, pool)

    return {"base": step(None)} | {
        name: step(step_adapters(spec, *case)) for name, case in CASES.items()
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps(benchmark: Any, dtype: torch.dtype) -> None:
    own = steps(dtype)
    base = own["base"]()
    for name, step in own.items():
        assert torch.equal(step(), base) == (name in ("base", "no row has one")), name
    benchmark.extra_info["of base"] = shares(own, 50 if benchmark.enabled else 1)
    benchmark.pedantic(own["8 adapters"], rounds=50 if benchmark.enabled else 1)


def shares(own: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Tokens a second of each, as a share of the base model's: of the medians of all rounds."""
    times: dict[str, list[float]] = {name: [] for name in own}
    for _ in range(rounds):
        for name, step in own.items():
            times[name].append(_seconds(step))
    medians = {name: sorted(it)[len(it) // 2] for name, it in times.items()}
    return {name: medians["base"] / it for name, it in medians.items()}


def _seconds(step: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            own = steps(dtype)
            shares(own, 5)
            print(f"{threads} threads, {dtype}, {1e3 * _seconds(own['base']):.1f} ms")
            for name, share in shares(own, 100).items():
                print(f"  {share:.3f} {name}", flush=True)


if __name__ == "__main__":
    main()
