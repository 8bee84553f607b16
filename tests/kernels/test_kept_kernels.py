"""Machine code on disk: it is kept, read again, and compiled anew where that cannot be."""

import ctypes
import logging
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
from numba import carray
from numba.core.codegen import JITCodeLibrary

from gptmanager.kernels.simd import machine_code
from gptmanager.kernels.simd.lanes import get_long, loop, pointer_to, put_long


def body(address: int) -> None:
    carray(pointer_to(address), 1, np.int64)[0] += 41


@loop
def plus_one(number: int) -> int:
    return number + 1


@loop
def plus_two(number: int) -> int:
    return plus_one(plus_one(number))


def caller(address: int) -> None:
    put_long(address, 0, plus_two(get_long(address, 0)))


def uses_constant() -> int:
    return CONSTANT  # noqa: F821


def calls(address: int) -> None:
    put_long(address, 0, uses_constant())


def forget() -> None:
    machine_code.compiled.cache_clear()
    machine_code._function.cache_clear()


def answer(function=body) -> int:
    """What the function makes of 1, as a process would that starts now."""
    forget()
    number = ctypes.c_int64(1)
    address = machine_code.compiled(function)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)(ctypes.addressof(number))
    return number.value


@pytest.fixture(autouse=True)
def new_process(monkeypatch, tmp_path, caplog):
    """Nothing is compiled or reported yet, and the cache is in a folder of its own."""
    caplog.set_level(logging.WARNING)
    for told in (machine_code._log_damage, machine_code._log_no_cache):
        told.cache_clear()
    monkeypatch.setenv(
        "NUMBA_CACHE_DIR", str(tmp_path / "cache")
    )  # Numba reads it from time to time
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    yield
    forget()


@pytest.fixture
def compilations(monkeypatch):
    """Appended to by each compilation."""
    found = []
    compile_it = machine_code.CFunc._compile_uncached
    monkeypatch.setattr(
        machine_code.CFunc,
        "_compile_uncached",
        lambda function: (found.append(function.__name__), compile_it(function))[1],
    )
    return found


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.rglob(f"*.{kind}"))


def test_a_body_is_kept_and_read_again(tmp_path, compilations, caplog):
    assert answer() == 42 and answer() == 42
    assert len(compilations) == 1
    assert [len(files(tmp_path, kind)) for kind in ("nbi", "nbc")] == [1, 1]
    assert not caplog.records


def test_a_body_that_is_read_declares_none_of_numbas_functions(monkeypatch, compilations):
    assert answer() == 42
    monkeypatch.delattr("numba.core.base.BaseContext.refresh")
    assert answer() == 42
    assert len(compilations) == 1


def flipped(content: bytes) -> bytes:
    """One bit of the machine code is another: it would still be loaded."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "garbage": lambda content: bytes(range(256)) * 8,
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("kinds", [("nbi",), ("nbc",), ("nbi", "nbc")], ids="+".join)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.every(5)
def test_a_damaged_file_is_written_anew(tmp_path, compilations, caplog, kinds, damage):
    assert answer() == 42
    kept = [path for kind in kinds for path in files(tmp_path, kind)]
    for path in kept:
        path.write_bytes(damage(path.read_bytes()))
    assert answer() == 42 and answer() == 42
    assert len(compilations) == 2  # the third process reads what the second has written
    assert [record.message for record in caplog.records] == [
        f"compiled kernels in {kept[0].parent} are damaged: they are compiled again"
    ]


def test_machine_code_with_a_wrong_bit_is_never_run(tmp_path, compilations, caplog):
    assert answer() == 42
    (path,) = files(tmp_path, "nbc")
    path.write_bytes(flipped(path.read_bytes()))
    assert answer() == 42
    assert len(compilations) == 2 and "damaged" in caplog.text


def test_machine_code_of_another_processor_or_version_is_never_loaded(
    monkeypatch, tmp_path, compilations
):
    """The disk was full after the index, and the data are those of an earlier index."""
    assert answer() == 42
    files(tmp_path, "nbi")[0].unlink()  # Numba ignores the index of another version

    def full(*_):
        raise OSError(28, "No space left on device")

    of_this_one = machine_code._Cache._index_key
    monkeypatch.setattr(machine_code._Cache, "_index_key", lambda *it: (of_this_one(*it), "older"))
    with monkeypatch.context() as patch:
        patch.setattr(machine_code._SealedFile, "_save_data", full)
        assert answer() == 42
    assert answer() == 42 and answer() == 42
    assert len(compilations) == 3


def test_damaged_files_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    assert answer() == 42
    for path in files(tmp_path, "nbi"):
        path.write_bytes(b"")

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(machine_code.IndexDataCacheFile, "_open_for_write", refuse)
    assert answer() == 42 and answer() == 42
    assert len(caplog.records) == 2 and "NUMBA_CACHE_DIR" in caplog.text


def test_a_body_compiles_where_no_folder_can_hold_its_cache(monkeypatch, compilations, caplog):
    monkeypatch.setattr(machine_code._CacheImpl, "_locator_classes", ())
    assert answer() == 42 and answer() == 42
    assert len(compilations) == 2
    (record,) = caplog.records
    assert "no folder can be written to" in record.message and "NUMBA_CACHE_DIR" in record.message


@pytest.mark.parametrize("cache", [None, "", "relative"])
def test_no_folder_is_made_in_the_current_one_where_there_is_no_home(monkeypatch, tmp_path, cache):
    monkeypatch.delenv("HOME", raising=False)
    if cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        machine_code._CacheImpl, "_locator_classes", (machine_code._UserCacheLocator,)
    )
    assert answer() == 42
    assert not list(tmp_path.iterdir())


def test_machine_code_of_other_sources_is_never_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_code, "__file__", str(tmp_path / "machine_code.py"))
    (tmp_path / "lanes.py").write_text("one")
    first = machine_code._stamped(body).__qualname__
    assert machine_code._stamped(body).__qualname__ == first
    (tmp_path / "lanes.py").write_text("two")
    machine_code._digest.cache_clear()
    assert machine_code._stamped(body).__qualname__ != first


@pytest.mark.parametrize("values", [(1, 2), (np.dtype("i4"), np.dtype("i8"))])
def test_machine_code_for_another_constant_or_layout_is_never_loaded(values):
    """The constant may come from a file that no digest is taken of, and a callee may use it."""
    names = set()
    for value in values:
        callee = FunctionType(uses_constant.__code__, {"CONSTANT": value})
        body = FunctionType(calls.__code__, {"uses_constant": callee})
        names.add(machine_code._stamped(body).__qualname__)
        assert machine_code._stamped(body).__qualname__ in names
    assert len(names) == 2


def test_machine_code_is_only_made_of_a_body_with_its_loops(monkeypatch):
    made, make = [], JITCodeLibrary._finalize_specific
    monkeypatch.setattr(
        JITCodeLibrary,
        "_finalize_specific",
        lambda code: (made.append(code.name), make(code))[1],
    )
    assert answer(caller) == 3
    assert made == [machine_code._stamped(caller).__qualname__]


def test_a_loop_cannot_be_called_from_python():
    with pytest.raises(TypeError):
        plus_one(1)
