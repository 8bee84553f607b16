"""Settings that hold for every test."""

from hypothesis import HealthCheck, settings

# The machines are shared: time says nothing about a test. The same examples every run.
settings.register_profile(
    "gptmanager", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gptmanager")
