"""Settings that hold for every test, and what tests of guided decoding share."""

import signal

import pytest
from hypothesis import HealthCheck, settings

from gptmanager.callbacks import load_guided_decoding, load_tokenizer

# The machines are shared: time says nothing about a test. The same examples every run.
settings.register_profile(
    "gptmanager", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gptmanager")

# Tests that a shell runs in the background ignore Ctrl-C, those under `nohup` ignore SIGHUP, and so
# would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("examples/tiny_llama")


@pytest.fixture(scope="module")
def guided():
    return load_guided_decoding("examples/tiny_llama")
