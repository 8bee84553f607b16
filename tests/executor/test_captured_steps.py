"""Generation steps that were recorded, run again: the same bits, and nothing of an older step."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, checkpoint, random_state
from family_configs import FAMILY_CONFIGS, VARIANTS
from family_runs import family_folder
from packed_logits import random_tokens, reference
from torch import Tensor

from gptmanager import GptManager, ModelType, OptionalParams
from gptmanager.callbacks import RequestQueue
from gptmanager.executor.runner import Runner
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.capture import captured_step
from gptmanager.kernels.capture.captured_step import StepCapture
from gptmanager.kernels.gemm.matmul_plan import packing_pays
from gptmanager.kernels.simd.threads import Team
from gptmanager.models import load_model
from gptmanager.models.model import capturable

needs_packing = pytest.mark.skipif(
    not packing_pays(),
    reason="torch computes the matmuls on this processor, and steps are not captured",
)
PROMPTS = 3, 11, 6
# In these two, experts have 48 rows, which no panels fit, so torch computes them.
NAMES = [
    it for it in (*FAMILY_CONFIGS, *VARIANTS) if it not in ("nemotron_h", "nemotron_h latents")
]


def captured(capture: Any) -> list[int]:
    """The numbers of rows that recordings are for."""
    return [key[0] for key, step in capture._known.items() if step is not None]


@pytest.fixture
def no_op_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once it is called, ops of the network raise."""

    def forbid() -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("an op ran")

        for name in ("linear", "attention", "rope_and_write", "embedding"):
            monkeypatch.setattr(CpuKernels, name, refuse)

    return forbid


def twins(name: str, **given: Any) -> tuple[PagedDriver, PagedDriver]:
    """Return two drivers of one model, with captured steps and without."""
    model = load_model(checkpoint(reference(name)), kernels=CpuKernels(), **given)
    dtype = model.spec.dtype
    plain, recorded = (PagedDriver(model, 3, dtype=dtype) for _ in range(2))
    recorded.step_capture = model.new_step_capture()
    return plain, recorded


@needs_packing
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.every(3)
def test_every_family_has_the_bits_of_steps_op_by_op(
    name: str, weights: str, no_op_runs: Callable[[], None]
) -> None:
    given = {"dtype": weights}
    if weights.startswith("int"):
        given = {"dtype": "bfloat16", "weights_dtype": weights}
    plain, recorded = twins(name, **given)
    compare(plain, recorded, no_op_runs)
    for pages in ("keys", "values"):
        own, other = (getattr(driver.pool, pages) for driver in (recorded, plain))
        assert torch.equal(own.nan_to_num(), other.nan_to_num())


@needs_packing
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every(16)
def test_what_sets_families_apart_is_computed_anew_in_each_recorded_step(
    name: str, weights: Any, no_op_runs: Callable[[], None]
) -> None:
    model = load_model(family_folder(name), dtype="float32", weights_dtype=weights)
    plain, recorded = (PagedDriver(model, 3) for _ in range(2))
    recorded.step_capture = model.new_step_capture()
    compare(plain, recorded, no_op_runs)


def compare(plain: PagedDriver, recorded: PagedDriver, no_op_runs: Callable[[], None]) -> None:
    """Run steps with one to three rows in both; the later ones are recorded."""
    for driver in (plain, recorded):
        driver.forward(list(enumerate(random_tokens(*PROMPTS))))
    steps: list[list[tuple[int, list[int]]]] = []
    for step in range(24):  # rows come, go and change their order
        slots = [[0, 1, 2], [2, 0], [1], [2, 1, 0]][step % 4]
        steps.append([(slot, [(7 * step + slot) % 96]) for slot in slots])
    wanted = [plain.forward(rows) for rows in steps]
    results = [recorded.forward(rows) for rows in steps[:8]]
    assert sorted(captured(recorded.step_capture)) == [1, 2, 3]
    no_op_runs()
    results += [recorded.forward(rows) for rows in steps[8:]]
    for own, other in zip(results, wanted, strict=True):
        assert torch.equal(own, other)


@needs_packing
def test_logits_of_a_step_stay_as_they_are_when_others_run() -> None:
    _, recorded = twins("llama")
    recorded.forward(list(enumerate(random_tokens(*PROMPTS))))
    results = [recorded.forward([(0, [step])]) for step in range(5)]
    copies = [result.clone() for result in results]
    recorded.forward([(0, [9])])
    assert len({result.data_ptr() for result in results}) == 5
    assert all(torch.equal(*pair) for pair in zip(results, copies, strict=True))


@needs_packing
def test_weights_that_are_loaded_later_count() -> None:
    plain, recorded = twins("qwen2")
    model = plain.model
    for driver in (plain, recorded):
        driver.forward(list(enumerate(random_tokens(*PROMPTS))))
        for token in range(3):
            driver.forward([(0, [token])])
    assert captured(recorded.step_capture) == [1]
    _, tensors = checkpoint(reference("qwen2"))
    model.weights.load({name: tensor * 1.1 for name, tensor in tensors.items()})
    assert torch.equal(plain.forward([(0, [5])]), recorded.forward([(0, [5])]))


@needs_packing
def test_another_table_of_angles_makes_recordings_stale() -> None:
    plain, recorded = twins("llama")
    for driver in (plain, recorded):
        driver.forward(list(enumerate(random_tokens(*PROMPTS))))
    for token in range(3):
        assert torch.equal(*(driver.forward([(0, [token])]) for driver in (plain, recorded)))
    (old,) = recorded.step_capture._known.values()
    plain.model.reserve_positions(5000)
    assert torch.equal(*(driver.forward([(0, [5])]) for driver in (plain, recorded)))
    (new,) = recorded.step_capture._known.values()
    assert old is not None and new is not None and new is not old


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x * 2,
        lambda x: x[:, 16:].contiguous(),
        lambda x: x.t().flatten(),
        lambda x: x.to(torch.bfloat16),
    ],
)
def test_what_torch_computes_or_a_subclass_may_do_is_never_recorded(
    op: Callable[[Tensor], Tensor],
) -> None:
    class Own(CpuKernels):
        pass

    assert Kernels().new_step_capture() is None and Own().new_step_capture() is None
    capture = StepCapture(Team())
    kernels = CpuKernels()
    kernels._team = capture._team

    @torch.inference_mode()
    def compute(inputs: Sequence[Tensor]) -> Tensor:
        own = op(inputs[0]).view(-1, 16)
        return kernels.rms_norm(own, torch.ones(16, dtype=own.dtype), 1e-5)

    for seed in range(4):
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(capture.run((x,), None, compute), compute((x,)))
    assert captured(capture) == [] and len(capture._known) == 1


def test_a_step_whose_last_task_does_not_write_its_result_is_never_recorded() -> None:
    kernels, weight = CpuKernels(), torch.ones(16)
    capture = kernels.new_step_capture()
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        result = kernels.rms_norm(inputs[0], weight, 1e-5)
        kernels.rms_norm(result, weight, 1e-5)
        return result

    for seed in range(4):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(capture.run((x,), None, compute), compute((x,)))
    assert captured(capture) == [] and len(capture._known) == 1


def test_new_tensors_of_a_recording_have_the_strides_that_torch_gives_them() -> None:
    kernels, weight, strides = CpuKernels(), torch.ones(16), []
    capture = kernels.new_step_capture()
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        strides.append(torch.empty_like(inputs[0].t()).stride())
        return kernels.rms_norm(inputs[0], weight, 1e-5)

    for _ in range(3):
        capture.run((torch.ones(2, 16),), None, compute)
    assert strides == [(1, 16)] * 3


def test_new_tensors_of_a_recording_have_all_their_bytes() -> None:
    kernels, weight, sizes = CpuKernels(), torch.ones(16), []
    capture = kernels.new_step_capture()
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        sizes.append([len(torch.empty(size, dtype=torch.int8)) for size in range(1, 35)])
        return kernels.rms_norm(inputs[0], weight, 1e-5)

    for _ in range(2):
        capture.run((torch.ones(1, 16),), None, compute)
    assert sizes == [[*range(1, 35)]] * 2 and captured(capture) == [1]


def test_tasks_of_a_recording_share_no_cache_line() -> None:
    kernels, weight = CpuKernels(), torch.ones(16)
    capture = kernels.new_step_capture()
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        return kernels.rms_norm(kernels.rms_norm(inputs[0], weight, 1e-5), weight, 1e-5)

    for _ in range(2):
        capture.run((torch.ones(1, 16),), None, compute)
    (step,) = capture._known.values()
    (_, first, _), (_, second, _) = step._calls.tolist()
    assert first % 64 == second % 64 == 0 < second - first


def test_the_first_recording_imports_nothing() -> None:
    """Torch's compiler would be 800 modules, in the middle of a host's first request."""
    program = """
import sys, torch
from gptmanager.kernels import CpuKernels
kernels, weight = CpuKernels(), torch.ones(16)
capture, before = kernels.new_step_capture(), set(sys.modules)
for _ in range(3):
    capture.run((torch.ones(1, 16),), None, lambda x: kernels.rms_norm(x[0], weight, 1e-5))
new = {name for name in set(sys.modules) - before if name.startswith(("torch", "sympy"))}
assert list(capture._known.values()) != [None] and not new, new
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_the_least_used_recording_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_step, "MAX_CAPTURED_STEPS", 2)
    kernels, weight, calls = CpuKernels(), torch.ones(16), 0
    capture = kernels.new_step_capture()
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return kernels.rms_norm(inputs[0], weight, 1e-5)

    for rows in (1, 1, 2, 2, 1, 3, 3, 3):
        capture.run((torch.full((rows, 16), float(rows)),), None, compute)
    assert captured(capture) == [1, 3] and calls == 6


def test_a_recording_takes_memory_that_its_ops_are_through_with() -> None:
    kernels, weight = CpuKernels(), torch.ones(1 << 16)
    capture = kernels.new_step_capture()
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        for _ in range(100):
            x = kernels.rms_norm(x, weight, 1e-5)
        return x

    for rows in (1, 1, 1, 5, 5, 5, 7, 7, 8, 8, 8):
        x = torch.randn(rows, 1 << 16, generator=torch.Generator().manual_seed(rows))
        result = capture.run((x,), None, compute)
        assert torch.equal(result, compute((x,)))
    assert captured(capture) == [1, 5, 7, 8]
    largest = 8 * 4 << 16
    taken = sum(own.nbytes for own in capture._memory._kept)
    assert taken < 3.5 * largest  # two, and two of a single row


@needs_packing
def test_recordings_of_deep_models_take_no_more_memory() -> None:
    """Tensors and scratch of a layer are those of the layer before."""
    taken = []
    for num_layers in (2, 6):
        config = {**CONFIGS["llama"], "num_hidden_layers": num_layers}
        model = load_model((config, random_state(config)), kernels=CpuKernels())
        recorded = PagedDriver(model, 1)
        recorded.step_capture = capture = model.new_step_capture()
        for _ in range(3):
            recorded.forward([(0, [5])])
        assert capture is not None and captured(capture) == [1]
        taken.append([own.nbytes for own in capture._memory._kept])
    assert taken[0] == taken[1]


def test_a_step_that_fails_during_capture_leaves_no_trace() -> None:
    kernels, weight = CpuKernels(), torch.ones(16)
    capture, fails = kernels.new_step_capture(), False
    assert capture is not None

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        result = kernels.rms_norm(inputs[0], weight, 1e-5)
        if fails:
            raise MemoryError
        return result

    x = torch.ones(1, 16)
    capture.run((x,), None, compute)
    fails = True
    with pytest.raises(MemoryError):
        capture.run((x,), None, compute)
    fails = False
    assert captured(capture) == []
    capture.run((x,), None, compute)
    assert captured(capture) == [1]


class Wrapper:
    """Has of a model what that has, and a `forward` of its own."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Any, kv_pool: Any) -> Tensor:
        self.calls += 1
        return self.model.forward(batch, kv_pool)


def test_a_forward_of_a_hosts_own_runs_in_every_step() -> None:
    model = load_model(checkpoint(reference("llama")), kernels=CpuKernels())
    wrapper = Wrapper(model)
    assert capturable(model) is model and capturable(wrapper) is None

    class Own(type(model)):
        def forward(self, batch: Any, kv_pool: Any) -> Tensor:
            return super().forward(batch, kv_pool)

    own = Own(model.spec, model.weights, CpuKernels(), "cpu")
    assert model.new_step_capture() is not None and own.new_step_capture() is None
    model.forward = wrapper.forward
    assert model.new_step_capture() is None
    del model.forward
    queue = RequestQueue()
    with GptManager(
        *(wrapper, ModelType.INFLIGHT_FUSED_BATCHING, 1, None),
        *(queue.get_inference_requests, queue.send_response),
    ):
        queue.submit([1, 2, 3], 12).result()
    assert wrapper.calls == 12


@needs_packing
def test_a_manager_records_its_generation_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[Runner] = []
    old = Runner.__init__

    def remember(self: Runner, *arguments: Any, **given: Any) -> None:
        old(self, *arguments, **given)
        runners.append(self)

    monkeypatch.setattr(Runner, "__init__", remember)

    def tokens(records: bool) -> list[Any]:
        if not records:
            monkeypatch.setattr(CpuKernels, "new_step_capture", lambda _: None)
        queue = RequestQueue()
        with GptManager(
            *(checkpoint(reference("qwen3")), ModelType.INFLIGHT_FUSED_BATCHING, 1, None),
            *(queue.get_inference_requests, queue.send_response),
            optional_params=OptionalParams(max_batch_size=4),
        ):
            waiting = [queue.submit(prompt, 20) for prompt in random_tokens(3, 9, 20)]
            return [result.result().generated_ids for result in waiting]

    assert tokens(True) == tokens(False)
    capture, none = (runner._step_capture for runner in runners)
    assert none is None and 3 in captured(capture)


def test_a_step_releases_the_interpreter_lock_if_its_last_run_was_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, weight = CpuKernels(), torch.ones(16)
    capture = kernels.new_step_capture()
    assert capture is not None
    begun: list[bool] = []

    def run(seconds: float | None = None) -> Tensor:
        if seconds is not None:
            (step,) = capture._known.values()
            assert step is not None
            step._seconds = seconds
        return capture.run(
            (torch.arange(16.0).view(1, 16),),
            None,
            lambda x: kernels.rms_norm(x[0], weight, 1e-5),
            begun.append,
        )

    unlocked: list[bool] = []
    for name, value in (("_run_locked", False), ("_run_unlocked", True)):
        real = getattr(captured_step, name)
        monkeypatch.setattr(
            captured_step, name, lambda real=real, value=value: unlocked.append(value) or real()
        )
    start = time.perf_counter()
    first = run()
    results = [run(), run(), run(1.0), run(0.0), run(captured_step.LONG_S)]
    elapsed = time.perf_counter() - start
    assert all(torch.equal(result, first) for result in results)
    assert begun == [False, False, False, True, False, False]
    assert unlocked == begun[2:], "the replays"
    (step,) = capture._known.values()
    assert step is not None and 0 < step._seconds < elapsed
    assert step._seconds != captured_step.LONG_S  # measured anew


def test_other_threads_run_while_a_long_step_computes() -> None:
    keeps_lock = ctypes.pythonapi._FuncPtr._flags_ & ~ctypes.CDLL(None)._FuncPtr._flags_
    locked, unlocked = captured_step._run_locked(), captured_step._run_unlocked()
    assert type(locked)._flags_ & keeps_lock and not type(unlocked)._flags_ & keeps_lock
