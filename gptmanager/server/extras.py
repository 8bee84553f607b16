"""Import modules that need the packages of an extra, only when the server uses the modules."""

from __future__ import annotations

import importlib
from typing import Any

from gptmanager.environment.distribution import install_command, too_old
from gptmanager.errors import ConfigError

_PACKAGES = {
    "server": ("starlette", "uvicorn", "uvloop", "httptools", "jinja2", "prometheus_client"),
    "triton": ("google", "grpc", "tritonclient"),
}


def load_extra(extra: str, module: str) -> Any:
    """Import and return `module`.

    Raises ConfigError if a package of `extra` is not installed, or too old.
    """
    if (old := too_old(extra)) is not None:
        raise ConfigError(f"gptmanager serve needs {old}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _PACKAGES[extra]:
            raise
        raise ConfigError(
            f"gptmanager serve needs {error.name}, which is not installed: {install_command(extra)}"
        ) from error
