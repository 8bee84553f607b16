"""What `GPTMANAGER_CUDA` switches off: each word changes a launch, and no token."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from devices import finals, prompt
from ptx_text import ptx_of
from requirements import skip

from gptmanager import InferenceRequest, KvCacheConfig, OptionalParams
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.cuda import moe
from gptmanager.cuda.attention.context_attention import PROGRAM as CONTEXT
from gptmanager.cuda.attention.generation_attention import PROGRAM as GENERATION
from gptmanager.cuda.attention.warpgroup_attention import PROGRAM as WARPGROUPS
from gptmanager.cuda.attention.warpgroup_attention import takes
from gptmanager.cuda.device import compiler, launch
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import DeviceStream, EmulatedStream
from gptmanager.cuda.device.thread_contexts import ThreadContexts
from gptmanager.cuda.features import VARIABLE, Features
from gptmanager.cuda.gemm import gemv, lora
from gptmanager.cuda.gemm.gemm import PROGRAM as TILED
from gptmanager.cuda.gemm.gemv_int4 import PROGRAM as INT4
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.errors import ConfigError
from gptmanager.kernels.attention.attention_arguments import AttentionShape

SHAPE = AttentionShape(4, 2, 64, 0.125)


def without(*words):
    return Features.parse(",".join(words))


def test_words():
    assert Features.parse("") == Features() == Features.asked({})
    assert Features().words == ()
    given = Features.asked({VARIABLE: " no-early, extra-syncwarp,carveout,,no-async-copies"})
    assert given == Features(early=False, async_copies=False, carveout=True, extra_syncwarp=True)
    assert given.words == ("no-early", "no-async-copies", "carveout", "extra-syncwarp")
    assert given.compiler_options == ("-DCOPIES_AT_ONCE", "-DEXTRA_SYNCWARP")
    known = (
        "no-early, no-warpgroups, no-products, no-tiled, no-graphs, no-mixed-graphs, no-split, "
        "no-async-copies, no-pinned, carveout, extra-syncwarp$"
    )
    for word in ("early", "no-carveout", "no-erly", "NO-EARLY"):
        with pytest.raises(
            ConfigError, match=f"unknown word '{word}' in GPTMANAGER_CUDA; .*{known}"
        ):
            Features.parse(f"no-tiled,{word}")
    with pytest.raises(ConfigError) as error:
        Features.parse("x" * 10**6)
    assert len(str(error.value)) < 500


def test_launchers_read_the_variable(monkeypatch, toolchain):
    monkeypatch.setenv(VARIABLE, "no-everything")
    for made in (EmulatedStream, launch.DeviceLauncher):
        with pytest.raises(ConfigError, match="unknown word 'no-everything'"):
            made()
    monkeypatch.setenv(VARIABLE, "no-graphs,no-products")
    launcher = EmulatedStream().launcher
    assert launcher.features == Features(graphs=False, products=False)
    assert not EmulatorLauncher(has_matmuls=True).has_matmuls


def test_no_graphs(toolchain):
    for features in (Features(), without("no-graphs")):
        stream = EmulatedStream(EmulatorLauncher(features=features))
        assert DeviceBackend(stream, OptionalParams())._cuda_graphs is features.graphs


def test_no_early_and_no_async_copies(toolchain, monkeypatch):
    found = []

    class Module:
        def __init__(self, options, **rest):
            self.options = options

        def get_function(self, name):
            found.append(SimpleNamespace(options=self.options))
            return found[-1]

    monkeypatch.setattr(launch.emulator, "Module", Module)
    launch._emulated.cache_clear()
    for features in (Features(), without("no-early"), without("no-async-copies")):
        EmulatorLauncher(features=features).kernel(GENERATION, GENERATION.kernels[0])
    launch._emulated.cache_clear()  # of what is no module
    assert [kernel.dependent for kernel in found] == [True, False, True]
    macros = [[it for it in kernel.options if it.startswith("-D")] for kernel in found]
    assert macros == [[], [], ["-DCOPIES_AT_ONCE"]]


def test_no_warpgroups(toolchain):
    for features in (Features(), without("no-warpgroups")):
        launcher = EmulatorLauncher(has_warpgroups=True, features=features)
        assert takes(launcher, SHAPE, torch.bfloat16) is features.warpgroups


def test_no_tiled(toolchain):
    x, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (20, 32))
    for features in (Features(), without("no-tiled")):
        own = OwnMatmuls(EmulatorLauncher(has_matmuls=True, features=features))
        assert own.covers(x, weight) is features.tiled
        assert own.covers(x[:16], weight)  # few rows are another kernel's


def test_no_split(toolchain):
    starts, lengths = np.arange(3, dtype=np.int32), np.array([4000, 70], np.int32)
    sizes = []
    for features in (Features(), without("no-split")):
        kernels = CudaKernels(EmulatorLauncher(features=features))
        plans = [kernels.plan([SHAPE], starts, lengths, 0, fixed) for fixed in (False, True)]
        pieces = [items[items[:, 2] > 0] for _, items, *_ in plans]
        assert all((len(own) > 2) is features.split for own in pieces)
        sizes.append([len(array) for array in plans[1]])
    assert sizes[0] == sizes[1]  # a recorded step has arrays of one size


def test_no_pinned(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: asked.append(options))
    for features in (Features(), without("no-pinned")):
        stream = SimpleNamespace(launcher=SimpleNamespace(features=features))
        DeviceStream.staging(stream, 16)
    assert [options["pin_memory"] for options in asked] == [True, False]


@pytest.mark.every(3)
@pytest.mark.timeout(240)  # it compiles a few kernels anew
@pytest.mark.parametrize(
    "words",
    [
        "no-async-copies",
        "no-graphs,no-split,no-early,no-warpgroups,no-pinned",
        "carveout,extra-syncwarp",
    ],
)
def test_the_tokens_are_the_same(words, toolchain, monkeypatch):
    def requests():
        return [InferenceRequest.from_tokens(i, prompt(i, 40 + 9 * i), 5) for i in range(3)]

    cache = KvCacheConfig(max_tokens=512, tokens_per_block=16)
    answers = []
    for disabled in ("", words):
        monkeypatch.setenv(VARIABLE, disabled)
        found = finals(requests(), "emulator", cache=cache, dtype="bfloat16")
        answers.append([response.tensors["output_ids"].tolist() for response in found])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("program", [GENERATION, TILED, WARPGROUPS], ids=lambda it: it.file)
@pytest.mark.every(3)
def test_copies_at_once_compile_to_no_copies_in_the_background(program, tmp_path):
    try:
        compiler.find_nvrtc()
    except ConfigError as error:
        skip(str(error))
    kernel = next(name for name in program.kernels if "bfloat16" in name)
    codes = [
        compiler.compile(program.path, "sm_90a", [kernel], features.compiler_options)
        for features in (Features(), without("no-async-copies"))
    ]
    assert codes[0].code != codes[1].code
    assert all(re.search(rb"\.(debug|nv_debug)_line", own.code) for own in codes)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("program", "kernel"),
    [
        *((it, it.path.stem) for it in (GENERATION, CONTEXT, WARPGROUPS, TILED)),
        *((gemv.PROGRAM, "gemv"), (INT4, "gemv_int4")),
        *((lora.PROGRAM, "shrink"), (moe.PROGRAM, "expert_gemm")),
    ],
)
def test_extra_syncwarp_is_in_every_kernel_that_uses_tensor_cores(program, kernel):
    name = next(it for it in program.kernels if it.startswith(f"{kernel}<__nv_bfloat16"))
    counts = [
        ptx_of(program, [name], "compute_90a", features.compiler_options).count("bar.warp.sync")
        for features in (Features(), without("extra-syncwarp"))
    ]
    assert counts[0] < counts[1]


class Runtime:
    """CuPy's runtime; `threads` in which a device was set."""

    def __init__(self):
        self.threads = []

    def setDevice(self, device):  # noqa: N802 - as CuPy calls it
        self.threads.append((threading.get_ident(), device))


def test_each_thread_has_a_context_before_its_first_call():
    runtime = Runtime()
    contexts = ThreadContexts(runtime, 1)

    def work():
        contexts.ensure()
        contexts.ensure()

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runtime.threads == [(threading.get_ident(), 1), (thread.ident, 1)]
