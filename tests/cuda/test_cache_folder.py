"""Compiled kernels are kept in the user's cache, or elsewhere where that cannot be written to."""

from __future__ import annotations

import os
import stat

import pytest

from gptmanager.cuda import cache_folder as module
from gptmanager.cuda.cache_folder import cache_folder
from gptmanager.errors import ConfigError


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder for temporary files; the user's cache is not a folder."""
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_the_users_cache(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache_folder("emulator") == tmp_path / "new" / "gptmanager" / "emulator"
    assert not list(cache_folder("emulator").iterdir())

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    for invalid in (None, "", "relative"):
        if invalid is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert cache_folder("cubins") == tmp_path / ".cache" / "gptmanager" / "cubins"
    assert not caplog.records


def test_a_cache_that_cannot_be_written_to(temporary, caplog):
    for _ in range(2):
        folder = cache_folder("emulator")
    assert folder == temporary / f"gptmanager-{os.getuid()}" / "emulator"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert "set XDG_CACHE_HOME to choose another one" in caplog.text and str(folder) in caplog.text


def test_a_folder_that_others_can_write_to_is_not_trusted(temporary):
    own = temporary / f"gptmanager-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to .*XDG_CACHE_HOME"):
        cache_folder("emulator")
    own.rmdir()
    own.symlink_to(temporary)
    with pytest.raises(ConfigError, match="others can write to"):
        cache_folder("emulator")
