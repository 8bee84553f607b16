"""Compile functions that only other compiled functions call.

Numba would optimize each of them three or more times: alone, for calls from Python, and again with
each of its direct and indirect callers. Here only the outermost function, a body, is optimized and
compiled, together with all functions that it calls. That saves a third of the time or more.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import functools
from typing import Any

from numba import njit
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler


def compiled_inside(function: Any) -> Any:
    """Return the function for calls from compiled code; division by zero is not checked."""
    return njit(function, error_model="numpy", pipeline_class=_InnerCompiler)


class _InnerCompiler(Compiler):
    def compile_extra(self, func: Any) -> Any:
        self.state.flags.no_cpython_wrapper = self.state.flags.no_cfunc_wrapper = True
        self.state.library = _codegen().create_library(func.__qualname__)
        return super().compile_extra(func)


class _InnerCode(JITCodeLibrary):
    """A function before its optimization."""

    def _optimize_final_module(self) -> None:
        """Do nothing: the callers' code is optimized with this code in it."""

    def _finalize_final_module(self) -> None:
        """Compile nothing: the code can be linked now."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int | None:
        """Return the address of a function that raises TypeError, for calls from Python."""
        return ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class _InnerCodegen(JITCPUCodegen):
    _library_class = _InnerCode

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: only code that calls Python uses its environment."""


@functools.cache
def _codegen() -> _InnerCodegen:
    return _InnerCodegen("inner functions")
