"""The features of the processor that compiled code uses, and runs that exclude some of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptmanager.environment.machine import cpu_features as module
from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.kernels.attention.paged_attention import attention
from gptmanager.kernels.compiled_bodies import bodies_of_model
from gptmanager.kernels.embedding_lookup import embed
from gptmanager.kernels.gemm.int4_matrix import INT4
from gptmanager.kernels.gemm.matmul_plan import matmul_bodies
from gptmanager.kernels.per_token_kernels import normalize
from gptmanager.kernels.simd.dtypes import HAS_FLOAT16

ROOT = Path(__file__).resolve().parents[2]
HAS = {"sse2": True, "avx2": True, "f16c": True, "avx512f": False}


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, {"sse2", "avx2", "f16c"}),
        ("", set()),
        ("+sse2,+avx2", {"sse2", "avx2"}),
        ("+avx512f, +f16c,-avx2", {"f16c"}),  # a processor does not get what it lacks
    ],
)
def test_the_features_are_those_of_the_processor_that_numba_may_use(monkeypatch, given, used):
    monkeypatch.setattr(module.binding, "get_host_cpu_features", lambda: HAS)
    monkeypatch.setattr(module.config, "CPU_FEATURES", given)
    monkeypatch.setattr(module.config, "ENABLE_AVX", 1)
    found = cpu_features()
    assert found.keys() == HAS.keys()
    assert {name for name, has in found.items() if has} == used


def test_numba_may_exclude_avx_without_a_list_of_features(monkeypatch):
    monkeypatch.setattr(module.binding, "get_host_cpu_features", lambda: HAS)
    monkeypatch.setattr(module.config, "CPU_FEATURES", None)
    monkeypatch.setattr(module.config, "ENABLE_AVX", 0)
    assert cpu_features() == {**HAS, "avx2": False}


def test_what_a_model_runs_is_compiled_at_its_start():
    assert bodies_of_model(torch.float64, (), deterministic=False) == []
    found = bodies_of_model(torch.float32, ("int8",), deterministic=True)
    assert {attention, embed, normalize} < {*found}
    assert any(it.__name__.startswith("multiply_int8") for it in found)
    for kind in ("int4", "e2m1", "iq4"):  # the last two are codebooks, which other code looks up
        needed = {*matmul_bodies(INT4, False, kind != "int4")} if HAS_FLOAT16 else set()
        assert needed <= {*bodies_of_model(torch.float32, (kind,), deterministic=False)}


@pytest.mark.slow  # each compiles all kernels anew
@pytest.mark.parametrize(
    "options",
    [("--dtype", "float16"), ("--weights-dtype", "int8"), ("--weights-dtype", "int4")],
    ids=" ".join,
)
def test_a_processor_without_avx(tmp_path, options):
    """LLVM ends the process at an instruction for float16 that the processor does not have."""
    limits = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gptmanager", "run", "--model", "examples/tiny_llama"]
        + ["--prompt", "17 + 25 =", *options],
        cwd=ROOT,
        env={**os.environ, **limits, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, " 42\n"), done.stderr


@pytest.mark.slow  # compiles all matmuls anew
def test_an_emulated_matrix_unit(tmp_path):
    """What is compiled for Intel's AMX runs and is right, also where no processor has it."""
    own = {"PYTHONPATH": str(ROOT / "tests/support"), "NUMBA_CACHE_DIR": str(tmp_path)}
    files = (f"tests/kernels/test_{name}.py" for name in ("packed_matmul", "int4_matmul"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + ["-p", "emulated_unit", "-k", "unit or both", "-rs", *files],
        cwd=ROOT,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "has no matrix unit" not in done.stdout, done.stdout
