"""Where what was compiled is kept: the user's cache folder, or a private one where that cannot be.

What is kept ends with its digest, because a damaged library would run. It knows nothing else of
what is kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from gptmanager.errors import ConfigError

logger = logging.getLogger("gptmanager")


def cache_folder(name: str) -> Path:
    """The folder `gptmanager/name` of the user's cache, made if need be, that can be written to.

    Where the cache cannot be (a read-only home), one below the folder for temporary files, and a
    warning in the log. `ConfigError` where that is another user's: libraries are loaded from it.
    """
    try:
        folder = _user_cache() / "gptmanager" / name
        folder.mkdir(parents=True, exist_ok=True)
        _write_to(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home
        folder = _temporary(name, error)
        logger.warning(
            "compiled kernels are kept in %s, because the cache folder cannot be written to (%s); "
            "XDG_CACHE_HOME names another one",
            folder,
            error,
        )
    return folder


def seal(content: bytes) -> bytes:
    """`content` with its digest behind it. What loads an ELF file does not mind."""
    return content + hashlib.sha256(content).digest()


def unseal(path: Path) -> bytes | None:
    """Return what was sealed; None without a file, and for a damaged one, with a warning."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[:-size]).digest() == content[-size:]:
        return content[:-size]
    logger.warning("%s is damaged: it is compiled anew", path)
    return None


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


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
            f"compiled kernels can be kept nowhere: not in the cache folder ({reason}), and not "
            f"among temporary files ({error}); name a folder in the environment variable "
            "XDG_CACHE_HOME"
        ) from error
    return folder
