"""`ReleasedMemory`: returns the memory of tensors to the system, and allocates it again later."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, error_summary


class ReleasedMemory:
    """The memory of `tensors`. After `release`, they must not be used until `restore`.

    `restore` also restores what a `release` that has failed half-way has released. On the CPU, only
    memory pages are returned to the system: the tensors keep their addresses, so pointers to them
    stay valid. On a device, the tensors get new addresses.

    The constructor saves the contents of the tensors `kept` until `restore`: tensors on the CPU in
    a temporary file, tensors on a device in CPU memory. After `restore`, a tensor that was not kept
    has the contents of its file if it is mapped from a file, and otherwise zeros or its old
    contents. If the temporary file cannot be written, the constructor raises ConfigError.
    """

    def __init__(self, tensors: Iterable[Tensor], kept: Iterable[Tensor] = ()) -> None:
        kept = [*kept]
        self._on_cpu, self._on_device = _by_device(tensors)
        self._from_file, kept_on_device = _by_device(kept)
        self._copies = [(tensor, tensor.cpu()) for tensor in kept_on_device]
        self._file = _saved(self._from_file) if self._from_file else None
        storages = (tensor.untyped_storage() for tensor in self._on_device)
        by_id = {id(storage): storage for storage in storages}
        self._storages = [(storage, storage.nbytes()) for storage in by_id.values()]

    def release(self) -> None:
        """Return the memory to the system."""
        for tensor in self._on_cpu:
            _release_pages(tensor)
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again. Raises torch's out-of-memory errors, and OSError."""
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        with torch.inference_mode():
            for tensor in self._on_device:
                tensor.zero_()
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        if self._file is not None:
            self._file.seek(0)
            for tensor in self._from_file:
                left = _bytes(tensor)
                while left:
                    left = left[self._file.readinto(left) or len(left) :]
        self.close()

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _by_device(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors on the CPU, and the tensors on a device, without empty ones."""
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for tensor in tensors:
        if tensor.nbytes:
            found[tensor.device.type != "cpu"].append(tensor)
    return found


def _saved(tensors: Iterable[Tensor]) -> Any:
    """Write the bytes of the tensors to a temporary file without a name, and return the file."""
    file: Any = None
    try:
        file = tempfile.TemporaryFile(prefix="gptmanager-weights-", buffering=0)
        for tensor in tensors:
            left = _bytes(tensor)
            while left:  # one call writes at most 2 GiB
                left = left[file.write(left) :]
    except OSError as error:
        if file is not None:
            file.close()
        folder = tempfile.tempdir or "a temporary folder"  # None if no folder could be written to
        raise ConfigError(
            f"sleep: the weights cannot be written to {folder} (TMPDIR): {error_summary(error)}; "
            "sleep(keep_weights=False) needs no file"
        ) from error
    return file


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _release_pages(tensor: Tensor) -> None:
    """Return to the system the pages that are completely inside this tensor."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
