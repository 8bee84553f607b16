"""What a machine may lack."""

from __future__ import annotations

import os

import pytest


def skip(reason):
    """A machine that must have everything says so in its environment."""
    if os.environ.get("GPTMANAGER_REQUIRE_CUDA") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
