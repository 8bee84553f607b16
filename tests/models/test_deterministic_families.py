"""With deterministic kernels, a token has the same logits in any batch and chunk, bit for bit."""

import pytest
import torch
from checkpoints import PagedDriver
from family_configs import FAMILY_CONFIGS, VARIANTS
from family_runs import LONG, SHORT, family_folder

from gptmanager.kernels import CpuKernels
from gptmanager.models import load_model

# How many tokens of LONG are in each step, and how many of SHORT are before them in the batch.
PIECES = [(1, 0), (2, 3), (1, 2), (3, 4), (5, 0), (7, 3), (11, 5), (16, 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", [*FAMILY_CONFIGS, *VARIANTS])
@pytest.mark.every(6)
def test_a_token_has_its_bits_in_any_batch_and_chunk(name: str, dtype: str) -> None:
    """torch computes some elements without SIMD. Which elements depends on the number of rows."""
    kernels = CpuKernels(deterministic=True)
    model = load_model(family_folder(name), dtype=dtype, kernels=kernels)
    together = PagedDriver(model, 1, dtype=model.spec.dtype).forward([(0, LONG)])
    driver, given, found = PagedDriver(model, 2, dtype=model.spec.dtype), iter(SHORT), []
    for count, others in PIECES:
        start = sum(map(len, found))
        rows = [(1, [next(given) for _ in range(others)]), (0, LONG[start : start + count])]
        logits = driver.forward([row for row in rows if row[1]])
        found.append(logits[others:])
    assert torch.equal(torch.cat(found), together)
