"""Settings that hold for every test, and fixtures of tests in several folders."""

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import sys
import zlib
from collections import Counter, defaultdict

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from fuzz import ALL_CASES, FUZZ
from hypothesis import HealthCheck, settings

import gptmanager
from gptmanager import callbacks  # imports torch when used: xdist's controller never needs it

# The machines are shared: time says nothing about a test. The same examples every run.
settings.register_profile(
    "gptmanager",
    max_examples=50 * FUZZ,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gptmanager")

# Hypothesis also draws constants from the source of all imported modules. To read these takes
# seconds, and which are imported depends on the tests that ran before: the examples would differ.
with contextlib.suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    if FUZZ == 1 and hasattr(providers, "_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants

# Tests that a shell runs in the background ignore Ctrl-C, those under `nohup` ignore SIGHUP, and so
# would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Each call of `httpx.post` creates a context for TLS, which takes 20 ms: one is enough. Where GPU
# tests run alone, httpx may be missing.
with contextlib.suppress(ImportError):
    import httpx

    httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)
    # A server on a busy machine may answer after the 5 s that httpx waits by default.
    vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(vars(httpx.Timeout(60)))

gc.disable()  # until all tests are collected

_EXIT_S = 60.0  # a run that has ended may wait so long for its threads

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let each second worker collect from the other end.

    Without kept byte code, each of two workers thus compiles half of the files for both.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and _WORKER[2:] and int(_WORKER[2:]) % 2:
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config, items):
    """Leave out tests marked `slow`, and of those marked `every(k)` all but one case in k.

    `make marathon`, `make mutants` and a call that names a test run all of them. The name of the
    test decides the first case, so that tests of one table run different cases.
    """
    # the names of tests must be the same in all workers, so they must not contain addresses
    assert not [item.nodeid for item in items if " at 0x" in item.nodeid]
    if _WORKER:  # all workers must have the same order
        items.sort(key=lambda item: item.path.parts)
    if ALL_CASES or any("::" in argument for argument in config.args):
        return
    cases, every = defaultdict(list), {}
    left_out = {item for item in items if item.get_closest_marker("slow") is not None}
    for item in (item for item in items if item not in left_out):
        marker = item.get_closest_marker("every")
        if marker is not None and item.get_closest_marker("gpu") is None:
            test = item.nodeid.partition("[")[0]
            cases[test].append(item)
            every[test] = marker.args[0]
    for test, its_cases in cases.items():
        first = zlib.crc32(test.encode()) % min(every[test], len(its_cases))
        left_out.update(its_cases)
        left_out.difference_update(_one_in(every[test], its_cases, first))
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def _one_in(k, cases, first):
    """Yield one case in k, from `first` on, with each value of each parameter if possible.

    Each k-th case would have a single value of a parameter of k values.
    """
    chosen, taken = cases[first::k], Counter()
    values = {case: _values(case) for case in [*chosen, *cases]}
    for _ in chosen:
        best = min(values, key=lambda case: sorted(taken[value] for value in values[case]))
        taken.update(values.pop(best))
        yield best


def _values(case):
    parameters = getattr(case, "callspec", None)
    return [(name, id(value)) for name, value in parameters.params.items()] if parameters else []


def pytest_collection_finish():
    """Exempt what exists now from garbage collection: ten thousand items and all imported modules.

    A full collection would take 0.35 s otherwise, also in each test that asks for one.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """End the process of a test that has not ended long after its limit, with all stacks.

    The signal of the limit raises an error in the main thread, which does not notice it in code of
    C that never returns. xdist's controller tells which test its worker ran, and starts another.
    """
    stderr = item.config.stash.get(fault_handler_stderr_fd_key, 2)  # not the captured one
    faulthandler.dump_traceback_later(2 * settings.timeout, exit=True, file=stderr)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item):
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    """End the process even if a thread that a test has left never ends: Python waits for it."""
    faulthandler.dump_traceback_later(_EXIT_S, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="module")
def tokenizer():
    return callbacks.load_tokenizer("examples/tiny_llama")


@pytest.fixture(scope="module")
def guided():
    return callbacks.load_guided_decoding("examples/tiny_llama")


@pytest.fixture(scope="module")
def byte_guided():
    """One token a byte: what may come next can be told by hand."""
    from text_checkpoint import END_ID, byte_tokenizer

    return gptmanager.GuidedDecoding(byte_tokenizer(), [END_ID])


@pytest.fixture(scope="module")
def source():
    """A small Llama with random weights: its config, and its tensors."""
    from checkpoints import CONFIGS, checkpoint, random_model

    return checkpoint(random_model(CONFIGS["llama"]))


@pytest.fixture
def one_thread():
    """Beside other work, and in a small network, a second thread mostly spins."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
