"""Rules for providers: dtypes and shapes, refusals, measured choices, and plans in flight."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from attention_libraries import FlashAttn, FlashInfer, HostAttention
from kernel_cases import randn

from gptmanager import OptionalParams
from gptmanager.assembly import attention_trial
from gptmanager.assembly.attention_choice import choose
from gptmanager.assembly.attention_trial import StepLimits
from gptmanager.assembly.loading import _refuse_for_transformers
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.provider_options import is_foreign
from gptmanager.cuda.attention import flashinfer_attention, provider_libraries
from gptmanager.cuda.attention.flash_attention import FlashAttention
from gptmanager.cuda.attention.flashinfer_attention import FlashInferAttention
from gptmanager.cuda.attention.provider_libraries import find_providers
from gptmanager.errors import CallbackError, ConfigError
from gptmanager.kernels import AttentionShape, Kernels
from gptmanager.kernels.attention.attention_arguments import Pages, RowLengths
from gptmanager.kernels.provided import ProvidedCpuKernels, ProvidedKernels, Served
from gptmanager.kernels.providers import AttentionRows

SHAPE = AttentionShape(4, 2, 32, 32**-0.5)
WINDOWED = SHAPE._replace(window=9)
LIMITS = StepLimits(8, 64, 128, 16)
CUDA = torch.device("cuda")


class OnReference(ProvidedKernels, Kernels):
    pass


def test_what_attention_is_not_ours():
    """Statistics name it, and V1 and Model objects refuse it."""
    providers = ("own", "auto", "flashinfer", "flash_attn", HostAttention())
    assert [is_foreign(it) for it in providers] == [False, False, True, True, True]


class Linear:
    """Multiplies by all weights; `change` is applied to the result."""

    capturable = True

    def __init__(self, change=lambda result: result):
        self.change, self.dtypes = change, []

    def accepts(self, rows, columns, dtype):
        return True

    def __call__(self, x, weight, bias):
        self.dtypes.append(x.dtype)
        return self.change(torch.nn.functional.linear(x, weight, bias))


def test_the_result_of_a_matmul_must_have_its_shape():
    kernels = ProvidedCpuKernels()
    kernels.use_linear(Linear(lambda result: result[:, :5]))
    with pytest.raises(
        CallbackError, match=r"Linear returned the shape \(3, 5\), expected \(3, 64\)"
    ):
        kernels.linear(randn(3, 32), randn(64, 32))


def test_a_provider_of_matmuls_gets_rows_in_the_dtype_of_the_weight():
    kernels, linear = ProvidedCpuKernels(), Linear()
    kernels.use_linear(linear)
    result = kernels.linear(randn(3, 32), randn(64, 32).bfloat16())
    assert linear.dtypes == [torch.bfloat16] and result.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("head_dim", "by_flash_attn", "by_flashinfer"),
    [(64, True, True), (128, True, True), (100, False, False), (96, True, False), (256, True, True),
     (264, False, False)],
)  # fmt: skip
def test_the_sizes_of_heads_that_a_library_supports(head_dim, by_flash_attn, by_flashinfer):
    shape = SHAPE._replace(head_dim=head_dim)
    libraries = FlashAttention(FlashAttn()), FlashInferAttention(FlashInfer, torch.device("cpu"))
    for library, is_supported in zip(libraries, (by_flash_attn, by_flashinfer), strict=True):
        reason = library.refusal(shape, torch.bfloat16, 256)
        assert (reason is None) is is_supported
        assert is_supported or f"head_dim = {head_dim} must be" in reason
        assert is_supported or reason.endswith(("up to 256", "(64, 128, 256)"))


@pytest.mark.parametrize("method", ["refusal", "attend_generation", "attend_context", "accepts"])
def test_methods_of_a_provider_must_be_ordinary_functions(method):
    async def later(*given):
        """Its caller gets a coroutine instead of a result."""

    provider, option = HostAttention(), "attention_provider"
    if method == "accepts":
        provider, option = Linear(), "linear_provider"
    setattr(provider, method, later)
    with pytest.raises(ConfigError, match=f"{option}.{method} = .* is a coroutine function"):
        checked_optional_params(OptionalParams(**{option: provider}))


def test_a_library_that_breaks_at_its_import_counts_as_missing(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.11: cannot open shared object file")

    monkeypatch.setattr(provider_libraries.importlib, "import_module", broken)
    assert find_providers("auto", CUDA) == ()
    with pytest.raises(ConfigError, match="pip install flashinfer-python .*libcudart.so.11"):
        find_providers("flashinfer", CUDA)


def test_auto_looks_for_libraries_only_for_a_gpu(monkeypatch):
    monkeypatch.setattr(provider_libraries.importlib, "import_module", lambda name: FlashAttn())
    found = {"flash_attn": provider_libraries._Library("", lambda module, device: module)}
    monkeypatch.setattr(provider_libraries, "_LIBRARIES", found)
    assert find_providers("auto", torch.device("cpu")) == ()
    assert len(find_providers("auto", CUDA)) == 1


def test_a_library_that_is_named_is_found(monkeypatch):
    monkeypatch.setattr(provider_libraries.importlib, "import_module", lambda name: FlashAttn())
    (found,) = find_providers("flash_attn", CUDA)
    assert isinstance(found, FlashAttention)
    assert find_providers("own", CUDA) == ()


def test_layers_of_a_step_share_what_flash_attn_reads():
    class Noting(FlashAttn):
        def flash_attn_varlen_func(self, q, *pages, cu_seqlens_k, **options):
            seen.append(cu_seqlens_k)
            return q

    seen, library = [], FlashAttention(Noting())
    lengths = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)
    tables = torch.zeros(2, 1, dtype=torch.int32)
    rows = AttentionRows(*lengths, tables, RowLengths(*(it.numpy() for it in lengths)))
    pages = Pages(torch.zeros(1, 2, 32, 256), torch.zeros(1, 2, 256, 32), None, False)
    for _ in range(2):
        library.attend_context(torch.zeros(5, 4, 32), pages, rows, SHAPE, None)
    assert seen[0] is seen[1] and seen[0].tolist() == [0, 4, 6]


@pytest.mark.parametrize("is_context", [False, True])
def test_layers_of_a_step_share_a_plan_of_flashinfer(is_context, monkeypatch):
    planned = []
    wrapper = flashinfer_attention._Wrappers
    plan = wrapper.planned
    monkeypatch.setattr(
        wrapper, "planned", lambda *given, **options: planned.append(1) or plan(*given, **options)
    )
    library = FlashInferAttention(FlashInfer, torch.device("cpu"))
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)
    tables = torch.zeros(2, 1, dtype=torch.int32)
    values = torch.zeros(1, 2, 16, 32)
    pages = Pages(values.mT, values, None, False)
    attend = library.attend_context if is_context else library.attend_generation
    for step in (1, 2):
        rows = AttentionRows(*lengths, tables, RowLengths(*(it.numpy() for it in lengths)))
        for _ in range(3):
            attend(torch.zeros(2, 4, 32), pages, rows, SHAPE, None)
        assert len(planned) == step


def test_flashinfer_gets_no_page_before_a_window():
    starts, lengths = (np.array(it, dtype=np.int32) for it in ([0, 1, 21, 26], [42, 50, 5]))
    tables = torch.tensor([[-1, -1, 7, -1], [-1, 1, 2, 3], [4, -1, -1, -1]], dtype=torch.int32)
    given = (torch.from_numpy(it) for it in (starts, lengths))
    rows = AttentionRows(*given, tables, RowLengths(starts, lengths))
    lists = flashinfer_attention._page_lists(rows, WINDOWED, 16)
    assert [it.tolist() for it in lists] == [[0, 1, 4, 5], [7, 1, 2, 3, 4], [10, 2, 5]]
    assert flashinfer_attention._page_lists(rows, SHAPE, 16).starts.tolist() == [0, 3, 7, 8]


def test_a_model_of_transformers_has_no_matmuls_of_a_provider():
    params = checked_optional_params(OptionalParams(device="cpu", linear_provider=Linear()))
    with pytest.raises(ConfigError, match="linear_provider = .* is refused with a model that tra"):
        _refuse_for_transformers(params, None)
    params.linear_provider = None
    _refuse_for_transformers(params, None)


class Scripted(HostAttention):
    """Takes the seconds of `take(shape)`; supports only `shapes`."""

    def __init__(self, name, take, shapes=(SHAPE, WINDOWED)):
        super().__init__(capturable=True)
        self.name, self.take, self.shapes = name, take, shapes

    def refusal(self, shape, dtype, tokens_per_block):
        return None if shape in self.shapes else "another shape"

    def _attend(self, queries, pages, rows, shape, starts):
        self.taken = self.take(shape)
        return torch.zeros_like(queries)


def chosen(monkeypatch, provider, own=1.0, limits=LIMITS, shapes=(SHAPE, WINDOWED)):
    """Return what serves each shape after "auto" has timed `provider` and our kernels."""
    monkeypatch.setattr(attention_trial, "_BEYOND_CACHES", 1 << 10)

    def seconds(run, captured):
        provider.taken = None
        run()
        return own if provider.taken is None else provider.taken

    def agree(names):
        provider.agreed = list(names)
        return names

    kernels = OnReference()
    choose(kernels, (provider,), shapes, torch.float32, limits, seconds, agree)
    return kernels._served


@pytest.mark.parametrize(("taken", "is_chosen"), [(0.5, True), (0.99, False)])
def test_kinds_of_layers_that_a_provider_refuses_count_with_our_time(monkeypatch, taken, is_chosen):
    """With 0.99 for one of two kinds it is not 3 % faster in total."""
    provider = Scripted("half", lambda shape: taken, (SHAPE,))
    served = chosen(monkeypatch, provider)
    expected = Served(provider, provider) if is_chosen else Served()
    assert served == {SHAPE: expected, WINDOWED: Served()}


def test_the_shortest_of_the_runs_counts(monkeypatch):
    """The first ones may compile."""
    times = iter([9.0, 0.5, 0.7] * 2)
    provider = Scripted("slow at first", lambda shape: next(times), (SHAPE,))
    monkeypatch.setattr(attention_trial, "_MOST_SETS", 1)
    assert chosen(monkeypatch, provider, shapes=(SHAPE,))[SHAPE] == Served(provider, provider)


def test_a_provider_that_fails_after_a_fast_run_is_left_out(monkeypatch, caplog):
    times = iter([0.1])
    provider = Scripted("once", lambda shape: next(times), (SHAPE,))
    monkeypatch.setattr(attention_trial, "_MOST_SETS", 1)
    assert chosen(monkeypatch, provider, shapes=(SHAPE,))[SHAPE] == Served()
    assert "the attention provider once fails, and is not used" in caplog.text


def test_a_timed_context_is_one_row_of_at_most_the_tokens_of_a_step(monkeypatch):
    class Noting(Scripted):
        def attend_context(self, queries, pages, rows, *given):
            self.seen.append((len(queries), len(rows.lengths.row_starts) - 1))
            return super().attend_context(queries, pages, rows, *given)

        def attend_generation(self, queries, pages, rows, *given):
            self.lengths.update(rows.kv_lengths.tolist())
            return super().attend_generation(queries, pages, rows, *given)

    provider = Noting("noting", lambda shape: 0.5, (SHAPE,))
    provider.seen, provider.lengths = [], set()
    chosen(monkeypatch, provider, shapes=(SHAPE,))
    assert {*provider.seen} == {(LIMITS.max_num_tokens, 1)}
    assert provider.lengths == {LIMITS.max_seq_len}


@pytest.mark.parametrize("is_once", [False, True])
def test_keys_and_values_are_timed_as_a_step_has_them(monkeypatch, is_once):
    """A model whose keys are its values reads half as much."""

    class Noting(Scripted):
        def _attend(self, queries, pages, *given):
            self.same.append(pages.keys.data_ptr() == pages.values.data_ptr())
            return super()._attend(queries, pages, *given)

    shape = SHAPE._replace(is_once=is_once)
    provider = Noting("noting", lambda shape: 0.5, (shape,))
    provider.same = []
    chosen(monkeypatch, provider, shapes=(shape,))
    assert {*provider.same} == {is_once}


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_timed_step_reads_as_much_as_it_needs_to_exceed_caches(monkeypatch, is_fp8):
    read = []

    class Noting(Scripted):
        def attend_generation(self, queries, pages, *given):
            read.append(pages.keys.nbytes + pages.values.nbytes)
            return torch.zeros_like(queries)

    shape = SHAPE._replace(fp8=is_fp8)
    provider = Noting("noting", lambda shape: 0.5, (shape,))
    provider.taken = None
    monkeypatch.setattr(attention_trial, "_BEYOND_CACHES", 1 << 20)
    trial = attention_trial.AttentionTrial(
        *(OnReference(), torch.float32, LIMITS, lambda run, captured: len(run()), "cpu")
    )
    trial.seconds_of(attention_trial.GENERATION, shape, {"noting": provider})
    assert sum(read) == 3 * (1 << 20), "three rounds"


def test_an_error_of_our_own_kernels_is_not_hidden_and_one_of_memory_ends_the_trial(caplog):
    provider = Scripted("x", lambda shape: 0.5, (SHAPE,))
    provider.taken = None

    def result(own, others):
        given = OnReference(), torch.float32, LIMITS
        raised = iter((own, others))

        def seconds(run, captured):
            error = next(raised)
            if error is not None:
                raise error
            return 1.0

        trial = attention_trial.AttentionTrial(*given, seconds, "cpu")
        return trial.seconds_of(attention_trial.GENERATION, SHAPE, {"x": provider})

    with pytest.raises(RuntimeError, match="illegal address"):
        result(RuntimeError("illegal address"), None)
    assert result(None, torch.OutOfMemoryError("no")) == {"own": 0.0}
    assert "not enough memory to time attention" in caplog.text


def test_a_provider_that_is_three_percent_faster_is_not_clearly_faster():
    assert attention_trial.fastest({"own": 1.0, "a": 0.97}) == "own"
    assert attention_trial.fastest({"own": 1.0, "a": 0.969, "b": 0.98}) == "a"


def test_auto_is_own_if_steps_with_contexts_are_captured(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(OnReference, "plan", lambda *given, fixed=0: (given[2],))
    provider = Scripted("fast", lambda shape: 0.1)
    served = chosen(
        monkeypatch, provider, limits=LIMITS._replace(captures_mixed=True, captures=True)
    )
    assert not any(map(any, served.values())) and provider.calls["context"] == 0
    assert provider.agreed == ["own", "own"], "ranks that time attention wait for this one"
    assert "our own kernels, because steps with contexts are captured" in caplog.text


def test_attention_is_timed_if_our_own_kernels_cannot_be_captured(monkeypatch):
    """Then steps with contexts are not captured either."""
    provider = Scripted("fast", lambda shape: 0.1)
    limits = LIMITS._replace(captures=True, captures_mixed=True)
    served = chosen(monkeypatch, provider, limits=limits)
    assert {*served.values()} == {Served(provider, provider)}


def test_the_times_are_logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    chosen(monkeypatch, Scripted("fast", lambda shape: 0.25e-3), own=1e-3, shapes=(SHAPE,))
    for phase in attention_trial.PHASES:
        times = f"attention of 4/2 heads of 32, {phase}: 1000.0 us by own, 250.0 us by fast"
        assert times in caplog.text


def test_nothing_is_timed_if_the_provider_refuses_all_shapes(monkeypatch):
    def seconds(run, captured):
        pytest.fail("our own kernels have no competitor")

    kernels, provider = OnReference(), Scripted("none", lambda shape: 0.1, ())
    choose(kernels, (provider,), (SHAPE, WINDOWED), torch.float32, LIMITS, seconds)
    assert {*kernels._served.values()} == {Served()}


@pytest.mark.parametrize("phase", attention_trial.PHASES)
@pytest.mark.parametrize(
    ("num_kv_heads", "num_sets"), [(1, 8), (32, 4), (64, 2)], ids=["one", "some", "many"]
)
def test_a_run_reads_a_few_sets_of_pages_that_exceed_caches(
    monkeypatch, phase, num_kv_heads, num_sets
):
    """A run of a small model reads at most eight, so that it does not take all memory."""
    row_bytes = 2 * 64 * 64 * 32 * 4  # bytes of a row with the most heads
    monkeypatch.setattr(attention_trial, "_BEYOND_CACHES", 2 * row_bytes - 1)
    read = []

    class Noting(Scripted):
        def _attend(self, queries, pages, *given):
            read.append(pages.keys.data_ptr())
            return torch.zeros_like(queries)

    shape = SHAPE._replace(num_heads=64, num_kv_heads=num_kv_heads)
    provider = Noting("noting", lambda shape: 0.5, (shape,))
    limits = StepLimits(1, 64, 64, 16)
    trial = attention_trial.AttentionTrial(
        *(OnReference(), torch.float32, limits, lambda run, captured: len(run()), "cpu")
    )
    trial.seconds_of(phase, shape, {"noting": provider})
    assert len({*read}) == num_sets and len(read) == 3 * num_sets, "three rounds"


def test_a_plan_is_not_overwritten_before_its_copy_has_run(monkeypatch):
    """Wrappers alternate, and each waits for the copy of its last plan."""
    order = []

    class Event:
        def synchronize(self):
            order.append(("wait", self))

        def record(self):
            order.append(("record", self))

    class Wrapper:
        def plan(self, *arguments, **options):
            order.append(("plan", self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    wrappers = flashinfer_attention._Wrappers(Wrapper, CUDA)
    used = [wrappers.planned() for _ in range(4)]
    assert used[0] is used[2] is not used[1] and used[1] is used[3]
    assert [what for what, _ in order] == ["wait", "plan", "record"] * 4
    events = [it for what, it in order if what == "record"]
    assert [it for what, it in order if what == "wait"] == events
    assert events[0] is events[2] is not events[1]
