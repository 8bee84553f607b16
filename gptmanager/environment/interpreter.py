"""Checks that the package is imported in the main interpreter of the process."""

from __future__ import annotations

import ctypes


def require_main_interpreter() -> None:
    """Raise ImportError in a sub-interpreter, where the import of torch would never return."""
    python = ctypes.pythonapi
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", python))
    number = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(
        ("PyInterpreterState_GetID", python)
    )
    if number(current()) != 0:
        raise ImportError(
            "gptmanager must be imported in the main interpreter: torch cannot be imported in a "
            "sub-interpreter (under mod_wsgi, set WSGIApplicationGroup to %{GLOBAL})"
        )
