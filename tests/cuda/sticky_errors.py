"""Hooks of pytest for a GPU whose context an error has broken: all later calls fail with it.

After a failed GPU test the device is waited for. If that fails too, the session ends with a
sentence, so that one error is not reported as hundreds.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch


class StickyErrors:
    """`device`: what has `is_initialized` and `synchronize`, as `torch.cuda`."""

    def __init__(self, device=torch.cuda, leave=os._exit):
        self._device = device
        self._leave = leave
        self._sentence = ""

    def sentence(self):
        """Why nothing more can run in this process; empty where it can."""
        try:
            if self._device.is_initialized():
                self._device.synchronize()
        except Exception as error:  # torch has several kinds
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return (
                f"the GPU's context is broken: {lines[0]}. Only the first failure of this process "
                "means anything; the tests that are left need a process of their own"
            )
        return ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and item.get_closest_marker("gpu") and not self._sentence:
            self._sentence = item.session.shouldfail = self.sentence()
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        """What CUDA's own end would do with a broken context may hang."""
        if self._sentence:
            sys.stdout.flush()
            sys.stderr.flush()
            self._leave(pytest.ExitCode.TESTS_FAILED)
