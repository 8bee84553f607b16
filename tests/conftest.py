"""Settings that hold for every test."""

import signal

from hypothesis import HealthCheck, settings

# The machines are shared: time says nothing about a test. The same examples every run.
settings.register_profile(
    "gptmanager", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gptmanager")

# Tests that a shell runs in the background ignore Ctrl-C, and so would what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
