"""The folder for compiled kernels: in the user's cache, or a private temporary one.

Each file ends with a digest of its content, so that a damaged kernel is never run.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from gptmanager.errors import ConfigError
from gptmanager.lifecycle.log import logger


def cache_folder(name: str) -> Path:
    """Return the writable folder `gptmanager/name` in the user's cache; create it if necessary.

    If the cache is not writable (a read-only home), log a warning and use a private folder below
    the folder for temporary files. Raise `ConfigError` if the private folder is not writable, or if
    other users can write to it, because libraries are loaded from it.
    """
    try:
        folder = _user_cache() / "gptmanager" / name
        folder.mkdir(parents=True, exist_ok=True)
        _write_to(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        folder = _temporary(name, error)
        logger.warning(
            "compiled kernels are stored in %s, because the cache folder is not writable (%s); "
            "set XDG_CACHE_HOME to choose another one",
            folder,
            error,
        )
    return folder


def seal(content: bytes) -> bytes:
    """Return `content` followed by its digest. Loaders of ELF files ignore bytes at the end."""
    return content + hashlib.sha256(content).digest()


def unseal(path: Path) -> bytes | None:
    """Return the content that was sealed; None if the file is unreadable, or damaged (logged)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[:-size]).digest() == content[-size:]:
        return content[:-size]
    logger.warning("%s is damaged: compiling it again", path)
    return None


def _user_cache() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"  # relative: not valid


def _write_to(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


def _temporary(name: str, reason: Exception) -> Path:
    try:
        own = Path(tempfile.gettempdir()) / f"gptmanager-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"others can write to {own}")
        folder = own / name
        folder.mkdir(exist_ok=True)
        _write_to(folder)
    except OSError as error:
        raise ConfigError(
            f"no writable folder for compiled kernels: neither the cache folder ({reason}) nor the "
            f"folder for temporary files ({error}); set the environment variable XDG_CACHE_HOME"
        ) from error
    return folder
