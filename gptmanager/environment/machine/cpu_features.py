"""The features of the processor that compiled code uses, such as AVX-512."""

from __future__ import annotations

from llvmlite import binding  # type: ignore[import-untyped]
from numba.core import config


def cpu_features() -> dict[str, bool]:
    """Return LLVM's names of features -> whether the processor has them and Numba may use them.

    The variable NUMBA_CPU_FEATURES replaces the processor's features for Numba; it is empty with
    NUMBA_CPU_NAME=generic. Without it, NUMBA_ENABLE_AVX=0 excludes AVX, and so does Numba itself
    for some processors. Code with an instruction that is excluded ends the process while it is
    compiled.
    """
    features: dict[str, bool] = binding.get_host_cpu_features()
    given: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if given is not None:
        named = {word.strip() for word in given.split(",")}
        return {name: has and f"+{name}" in named for name, has in features.items()}
    has_avx = bool(config.ENABLE_AVX)  # type: ignore[attr-defined]
    return {name: has and (has_avx or not name.startswith("avx")) for name, has in features.items()}
