"""The emulator names every planted bug with its line, and lets correct kernels pass."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from gptmanager.cuda import emulator

SOURCE = Path(__file__).with_name("faulty_kernels.cu")
CUDA = Path(__file__).resolve().parents[2] / "cuda"
NAMES = tuple(re.findall(r"^__global__ void (\w+)", SOURCE.read_text(), re.MULTILINE))

pytestmark = pytest.mark.usefixtures("toolchain")

NAMED_IN_FAST_MODE = {
    "divergent_barrier": "divergent __syncthreads: .* waits in __syncthreads at faulty_kernels.cu",
    "early_return": r"deadlock in block .*: .*\) in __syncthreads at .*; 1 thread \(5\) returned$",
    "past_the_array": "access to byte 256 of argument 0, which has 256 bytes",
    "past_dynamic_shared": "access to byte 256 of dynamic shared memory, which has 256 bytes",
    "half_a_warp": "includes lane 16, which has returned|deadlock in block",
    "absent_lane": "lane 0 reads lane 20, which does not participate",
    "stack_overflow": "stack overflow: more than 256 KiB",
    "null_pointer": "access through a null pointer",
    "failing_assertion": "assertion x",
    "misaligned_vector": "misaligned access: the address ends in 0x.4",
    "misaligned_struct": "misaligned access: the address ends in 0x.4",
    "misaligned_register": "misaligned access: the address ends in 0x.a",
    "misaligned_row": "ldmatrix of a row that is not aligned to 16 bytes",
    "misaligned_source": "cp.async with an address that is not aligned to 16 bytes",
    "misaligned_destination": "cp.async with an address that is not aligned to 16 bytes",
    "overwritten_source": "the source of cp.async was written to before cp_async_wait",
    "overwritten_copy": "the destination of cp.async was written to before cp_async_wait",
    "copied_twice": "the destination of cp.async was written to before cp_async_wait",
    "parted_matrices": "mma with mask 0xffffffff, but lane . is in mma with mask 0xffffffff at",
    "wide_shift": "shift by 32 bits",
    "too_large_for_int": "conversion of a float that does not fit the integer type",
}
NAMED_IN_FAST_MODE |= {
    "product_without_fence": "wgmma without a warpgroup_fence since its registers",
    "product_changed_early": "the result registers of wgmma were changed before warpgroup_wait",
    "product_overwritten": "the operands of wgmma were changed before warpgroup_wait",
    "product_never_waited": r"wgmma without warpgroup_wait in warp \d",
    "product_of_other_registers": "warpgroup_wait for other registers than those of wgmma at",
    "product_of_three_warps": "wgmma.fence of a warpgroup was not issued by its warp 3",
    "product_misplaced": "wgmma descriptor of a pattern that is not aligned to 1024 bytes",
    "product_of_parted_descriptors": "wgmma with descriptors that differ between warps",
}
SOONER_IN_CHECK_MODE = {  # at the access, and not when what it spoils is complete
    "overwritten_copy": "write to the destination of a cp.async before cp_async_wait",
    "copied_twice": "write to the destination of a cp.async before cp_async_wait",
    "product_changed_early": "write of a register of wgmma before warpgroup_wait",
    "product_overwritten": "race on shared memory: a read by thread .* not ordered before a write",
}
NAN_IN_FAST_MODE = ("past_static_shared", "uninitialized", "never_written", "missing_barrier")
NAN_IN_FAST_MODE += ("missing_wait", "product_read_early", "product_of_another_group")
NAMED_IN_CHECK_MODE = {
    "before_the_array": "access to byte -4 of argument 0, which has 256 bytes",
    "past_static_shared": "array index 64 out of bounds",
    "past_the_last_member": "array index 4 out of bounds",
    "uninitialized": "read of uninitialized shared memory",
    "never_written": "read of uninitialized shared memory",
    "missing_barrier": "read of uninitialized shared memory",
    "missing_wait": "read of the destination of a cp.async before cp_async_wait",
    "early_copy": "race on shared memory: a read by thread .* not ordered before a write",
    "missing_sync_warp": "race on shared memory: a write by thread .* not ordered before a read",
    "missing_atomics": "race on argument 0: .*by thread . of block .* at faulty_kernels.cu:",
    "race_after_many_barriers": "race on shared memory: a (read|write) by",
    "rows_without_sync": "race on shared memory: a write by thread .* not ordered before a read",
    "product_changed_after_fence": "wgmma without a warpgroup_fence since its registers",
    "product_read_early": "read of a register of wgmma before warpgroup_wait",
    "product_of_another_group": "read of a register of wgmma before warpgroup_wait",
    "product_without_proxy_fence": "wgmma reads what thread .* wrote .* without fence_proxy",
    "product_with_late_proxy_fence": "wgmma reads what thread .* wrote .* without fence_proxy",
    "product_without_barrier": "(read of uninitialized shared memory|race on shared memory)",
    "missing_fence": "race on argument 1: a write by thread 0 of .* not ordered before a read",
    "missing_release": "race on argument 1: a write by thread .* not ordered before a read",
    "missing_release_barrier": "race on argument 1: a write by thread .* not ordered before a read",
}
CONTROLS = ("with_sync_warp", "many_sync_warps", "shared_half", "with_atomics", "with_wait")
LAST_BLOCK = ("last_block", "last_block_own_fences", "last_block_released")
CONTROLS += (*LAST_BLOCK, "joined_matrices", "reused_copy", "rows_with_sync", "product")
DTYPES = {"stack_overflow": np.int32, "wide_shift": np.uint32, "misaligned_register": np.float16}
NUM_BLOCKS = {"missing_atomics": 2, "with_atomics": 2}
WITH_TICKETS = (*LAST_BLOCK, "missing_fence", "missing_release", "missing_release_barrier")
NUM_BLOCKS |= dict.fromkeys(WITH_TICKETS, 4)


@functools.cache
def module(check, order="forward"):
    options = (f"-I{CUDA}",)
    return emulator.Module(
        path=SOURCE, name_expressions=NAMES, options=options, check=check, order=order
    )


def run(name, check, order="forward"):
    """The result of a kernel, whose argument is 1 to 64."""
    values = np.arange(1, 65)
    if name == "failing_assertion":
        values[-1] = 0
    x = emulator.asarray(values.astype(DTYPES.get(name, np.float32)))
    arguments = [np.uint64(0) if name == "null_pointer" else x]
    if name in WITH_TICKETS:
        partial = emulator.empty(64 * 4)
        arguments += [partial, emulator.asarray(np.zeros(1, np.uint32))]
    kernel = module(check, order).get_function(name)
    threads, shared = (128, 2048) if name.startswith("product") else (64, 256)
    kernel((NUM_BLOCKS.get(name, 1),), (threads,), tuple(arguments), shared_mem=shared)
    return emulator.asnumpy(x)


def check_error(name, check, pattern):
    with pytest.raises(emulator.EmulatorError) as caught:
        run(name, check)
    text = str(caught.value)
    assert text.startswith(f"{name}: ")
    assert re.search(pattern, text), text
    lines = SOURCE.read_text().splitlines()
    marked = [i for i, line in enumerate(lines, 1) if line.endswith(f"// HERE {name}")]
    assert all(f"faulty_kernels.cu:{line}" in text for line in marked), text


def test_every_kernel_is_tested():
    tested = [*NAMED_IN_FAST_MODE, *NAMED_IN_CHECK_MODE, *CONTROLS]
    assert sorted(tested) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMED_IN_FAST_MODE)
def test_a_bug_that_both_modes_name(name):
    check_error(name, False, NAMED_IN_FAST_MODE[name])
    check_error(name, True, SOONER_IN_CHECK_MODE.get(name, NAMED_IN_FAST_MODE[name]))


@pytest.mark.parametrize("name", NAN_IN_FAST_MODE)
def test_a_bug_that_gives_nan(name):
    assert np.isnan(run(name, check=False)).any()


@pytest.mark.parametrize("name", NAMED_IN_CHECK_MODE)
def test_a_bug_that_the_check_mode_names(name):
    check_error(name, True, NAMED_IN_CHECK_MODE[name])


@pytest.mark.parametrize("order", ["forward", "reverse", 7])
@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("name", CONTROLS)
def test_a_correct_kernel_passes(name, check, order):
    x = np.arange(1, 65, dtype=np.float32)
    swapped = x.reshape(-1, 2)[:, ::-1].reshape(-1)
    expected = {
        "with_sync_warp": x + swapped,
        "many_sync_warps": x + swapped,
        "with_atomics": x + 128 * (np.arange(64) == 0),
        "with_wait": 2 * x,
    }
    assert np.array_equal(run(name, check, order), expected.get(name, 4 * x))


def test_the_process_goes_on_after_a_bug():
    check_error("past_the_array", False, "byte 256 of argument 0")
    assert np.isfinite(run("with_wait", check=False)).all()
