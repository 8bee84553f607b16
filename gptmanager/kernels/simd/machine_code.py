"""Compile the functions ("bodies") that `Team`'s threads run, and cache their machine code on disk.

Only this module uses Numba's cache. Numba chooses the folder: `NUMBA_CACHE_DIR`, else `__pycache__`
next to the sources, else the user's cache folder. If a cached file is damaged, or no folder can be
used, the body is compiled, and a warning is logged once. Processes that share a folder compile each
body once: the process that compiles a body locks it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import numpy as np
from numba import types
from numba.core import registry
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys

from gptmanager.lifecycle.clock import monotonic

logger = logging.getLogger("gptmanager")

Body = Callable[[int], None]

_SIGNATURE: Any = types.void(types.int64)
_CONSTANTS = (int, float, np.generic, np.dtype)
_DIGEST_BYTES = hashlib.sha256().digest_size
# How long to wait for a process that compiles a body. The longest compile time of a body is 10 s,
# but other work may slow the process down. A process that dies loses its locks at once.
_PATIENCE_S, _POLL_S = 30.0, 0.05


@functools.cache
def compiled(body: Body) -> int:
    """Return the address of the body's machine code, which is loaded from disk or compiled.

    If another process is compiling the body, wait for that process.
    """
    started = monotonic()
    while (address := compile_if_free(body)) is None:
        if monotonic() - started > _PATIENCE_S:
            logger.warning(
                "another process has been compiling the kernel %s for %.0f s: this process "
                "compiles it too",
                body.__name__,
                _PATIENCE_S,
            )
            _function(body).compile()
        time.sleep(_POLL_S)
    return address


def compile_if_free(body: Body) -> int | None:
    """Do the same as `compiled`, but return None if another process is compiling the body."""
    function = _function(body)
    with _lock(function._cache) as is_free:
        if is_free and function.address is None:
            function.compile()
    return cast("int | None", function.address)


@functools.cache
def _function(body: Body) -> Any:
    """Return the function of a body, which is neither loaded nor compiled yet."""
    stamped = _stamped(body)
    function: Any = CFunc(stamped, (_SIGNATURE.args, _SIGNATURE.return_type), {}, {})
    function._cache = _cache_of(stamped) or function._cache
    return function


def is_kept(body: Body) -> bool:
    """Return whether machine code for this processor is on disk, without reading it."""
    cache = _cache_of(_stamped(body))
    return cache is not None and cache.has(_SIGNATURE)


def has_folder(body: Body) -> bool:
    """Return whether compiled code can be cached on disk."""
    return folder_of(body) is not None


def folder_of(body: Body) -> str | None:
    """Return the folder that caches the compiled code; None if no folder can be used."""
    cache = _cache_of(_stamped(body))
    return None if cache is None else str(cache.cache_path)


def _stamped(body: Body) -> FunctionType:
    """Return a copy of the function with a name that contains a digest of all that it depends on.

    That is all files of `kernels/` and of the function's own folder, and the constants that it uses
    from other files. The name is necessary because Numba's cache notices changes only in the file
    of the body, not in the files of the intrinsics that the body calls.
    """
    digest = hashlib.sha256()
    for folder in sorted({Path(__file__).parents[1], Path(body.__code__.co_filename).parent}):
        digest.update(_digest(folder))
    used: dict[FunctionType, str] = {}
    _find_constants(cast("FunctionType", body), used)
    digest.update(repr([*used.values()]).encode())
    name = f"{body.__name__}_{digest.hexdigest()[:12]}"
    stamped = FunctionType(body.__code__, body.__globals__, name)
    stamped.__qualname__ = name
    return stamped


def _find_constants(function: FunctionType, used: dict[FunctionType, str]) -> None:
    """Add the numbers and dtypes that a function uses, and those of the functions that it calls."""
    used[function] = ""
    _, named, _, _ = inspect.getclosurevars(function)
    values = [getattr(value, "py_func", value) for value in named.values()]
    used[function] = repr([value for value in values if isinstance(value, _CONSTANTS)])
    for value in values:
        if isinstance(value, FunctionType) and value not in used:
            _find_constants(value, used)


@functools.cache
def _digest(folder: Path) -> bytes:
    """Return a digest of the sources in a folder, as they are at the first call."""
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


class _UserCacheLocator(UserWideCacheLocator):
    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        """Return None if Numba would cache in the current folder.

        Numba caches there if XDG_CACHE_HOME is relative or empty. It also caches there if this
        variable is not set and no home folder exists.
        """
        if not os.path.isabs(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~"))):
            return None
        return super().from_function(function, file)


class _CacheImpl(CompileResultCacheImpl):
    """Stores only the machine code and the name of its entry point.

    Numba would also store types, and import the modules that define them.
    """

    _locator_classes = [UserProvidedCacheLocator, InTreeCacheLocator, _UserCacheLocator]

    def reduce(self, result: Any) -> tuple[Any, str]:
        return result.library.serialize_using_object_code(), result.fndesc.llvm_cfunc_wrapper_name

    def rebuild(self, context: Any, kept: tuple[Any, str]) -> Any:
        code, name = kept
        library = context.codegen().unserialize_library(code)
        return SimpleNamespace(
            library=library, fndesc=SimpleNamespace(llvm_cfunc_wrapper_name=name)
        )


class _SealedFile(IndexDataCacheFile):
    """Numba's files, with a digest before the data, so that damaged data are never unpickled.

    The data name the version and the processor that they are for. Otherwise a full disk, or
    processors that share a folder without locks, could leave data that do not match the index.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._version, key, data))

    def load(self, key: Any) -> Any:
        version, of_key, data = super().load(key) or (None, None, None)
        return data if (version, of_key) == (self._version, key) else None

    def _save_data(self, name: str, content: Any) -> None:
        data = self._dump(content)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(data).digest() + data)

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError(f"{name} does not match its digest")
        return pickle.loads(data)


class _Cache(FunctionCache):
    """Numba's cache of one function. Errors of loading and saving are logged, not raised."""

    _impl_class = _CacheImpl

    def __init__(self, function: FunctionType) -> None:
        """Open the cache. Raises RuntimeError or OSError if no folder can be used."""
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _SealedFile(self._cache_path, self._impl.filename_base, stamp)

    def has(self, signature: Any) -> bool:
        """Return whether the folder has machine code of the function for this processor."""
        try:
            key = self._index_key(signature, registry.cpu_target.target_context.codegen())
            name = self._cache_file._load_index().get(key)
            return name is not None and Path(self._cache_file._data_path(name)).exists()
        except Exception:  # a damaged index: `load_overload` reports it
            return False

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled function, or None if its machine code is not on disk, or damaged.

        This method replaces Numba's own, which first declares every function that Numba supports
        and thus takes 0.3 s longer. Machine code needs only the symbols of Numba's runtime, and a
        compilation declares all functions itself.
        """
        try:
            rtsys.initialize(context)
            return self._load_overload(signature, context)
        except Exception as error:  # unpickling damaged data may raise any error
            logger.debug("%s: %s: %s", self._name, type(error).__name__, error)
            _log_damage(self.cache_path)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        try:
            super().save_overload(signature, data)
        except Exception as error:  # the disk is full, or a damaged index cannot be replaced
            _log_no_cache(f"{type(error).__name__}: {error}")


@contextmanager
def _lock(cache: Any) -> Iterator[bool]:
    """Lock a function until the end of the block; yield False if another process has locked it.

    Machine code that is on disk needs no lock. Without a folder, or on a file system without locks,
    nothing is locked. The lock file is removed at the end, unless the process is killed.
    """
    is_free = True
    with ExitStack() as stack:
        if isinstance(cache, _Cache) and not cache.has(_SIGNATURE):
            path = Path(f"{cache.cache_path}/{cache._impl.filename_base}.lock")
            try:
                flock(stack.enter_context(path.open("wb")), LOCK_EX | LOCK_NB)
                stack.callback(_remove, path)
            except BlockingIOError:
                is_free = False
            except OSError as error:
                logger.debug("%s: %s", path, error)
        yield is_free


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _cache_of(function: FunctionType) -> _Cache | None:
    try:
        return _Cache(function)
    except (RuntimeError, OSError) as error:
        logger.debug("%s: %s", function.__name__, error)
        _log_no_cache("no folder can be written to")
        return None


@functools.cache
def _log_damage(folder: str) -> None:
    logger.warning("compiled kernels in %s are damaged: they are compiled again", folder)


@functools.cache
def _log_no_cache(reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be cached, so every start compiles them again (%s); set the "
        "environment variable NUMBA_CACHE_DIR to a folder that can be written to",
        reason,
    )
