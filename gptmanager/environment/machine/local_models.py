"""Finds the models on this machine: in a checkout, in installed packages, in the hub's cache.

Nothing is downloaded, and no model is read.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[3]
_REPOSITORY = "models--"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"(.+)-(\d{5})(-of-\d{5}\.gguf)")  # the name of a file of a split model


class LocalModel(NamedTuple):
    """A checkpoint folder, or a GGUF file (the first file of a split model).

    `origin`: where the model was found, such as "hub cache".
    """

    name: str
    origin: str
    path: Path

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes of the weight files that loading reads."""
        files = [self.path]
        if self.path.is_dir():
            files = _files_of_folder(self.path)
        elif (part := _PART.fullmatch(self.path.name)) is not None:
            files = [*self.path.parent.glob(f"{glob.escape(part[1])}-?????{part[3]}")]
        return sum(file.stat().st_size for file in files if file.is_file())


def local_models() -> list[LocalModel]:
    """Return all models; the models of the checkout come first."""
    return [*_bundled(), *_packaged(), *_cached()]


def find_model(name: str) -> Path | None:
    """Return the path of the model with this name; None if no model or several models match.

    Case is ignored, and a unique prefix of a name is enough.
    """
    wanted, found = name.lower(), local_models()
    exact = {model.path for model in found if model.name.lower() == wanted}
    begun = {model.path for model in found if model.name.lower().startswith(wanted)}
    for paths in (exact, begun):
        if len(paths) == 1:
            return paths.pop()
    return None


def name_of(path: Path) -> str:
    """Return a name for a checkpoint: that of its file or folder, or its id in the hub's cache."""
    path = Path(os.path.abspath(path))  # `resolve` would follow the cache's links to blobs
    snapshots = path.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith(_REPOSITORY):
        return _id_of(snapshots.parent)
    return path.name.removesuffix(".gguf")


def _id_of(repository: Path) -> str:
    return repository.name.removeprefix(_REPOSITORY).replace("--", "/")


def download_hint(name: str) -> str | None:
    """Return the command that downloads a model from the hub; None if `name` cannot be its id."""
    owner, slash, rest = name.partition("/")
    is_id = slash and owner and rest and "/" not in rest and not name.startswith((".", "~"))
    letters = name.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
    return f"hf download {name}" if is_id and letters.isalnum() and letters.isascii() else None


def missing_hint(path: str) -> str:
    """Return a hint to add to the error for a path that does not exist; "" if there is none."""
    if os.path.islink(path):
        return "; it is a link to a path that does not exist"
    if path.startswith("~"):
        return "; ~ is not expanded: write the home folder in full"
    if (found := find_model(path)) is not None:
        return f"; the model of this name is {os.fspath(found)!r}: pass this path"
    command = download_hint(path)
    hint = f"; if it is a model of the Hugging Face hub, download it with `{command}`"
    return "" if command is None else hint


def _bundled() -> Iterator[LocalModel]:
    if not (_ROOT / "setup.cfg").is_file():  # not a checkout, but site-packages
        return
    for config in sorted(_ROOT.glob("examples/*/config.json")):
        yield LocalModel(config.parent.name, "example", config.parent)


def _packaged() -> Iterator[LocalModel]:
    from importlib import metadata  # slow to import, and most commands do not list models

    for info in _infos_of_packages():
        package = metadata.Distribution.at(info)
        origin = f"package {package.metadata['Name']} {package.version}"
        for file in package.files or []:
            if (name := _model_name(file.name)) is not None:
                yield LocalModel(name, origin, Path(str(package.locate_file(file))))


def _infos_of_packages() -> Iterator[Path]:
    """Yield the metadata folders (`*.dist-info`) of installed packages with GGUF files.

    importlib.metadata would take 0.1 s for a few hundred packages.
    """
    for folder in map(Path, sys.path):
        for record in sorted(folder.glob("*.dist-info/RECORD")):
            with suppress(OSError):  # an uninstallation at the same time
                if b".gguf," in record.read_bytes():
                    yield record.parent


def _cached() -> Iterator[LocalModel]:
    """Yield the checkpoint folders and GGUF files in each repository's snapshot of `main`.

    A folder with GGUF files is a checkpoint only if it also has safetensors. A single GGUF model in
    such a folder is left out, because the folder is a model itself.
    """
    try:
        cache = _hub_cache()
    except RuntimeError:  # no home folder
        return
    for repository in sorted(cache.glob(f"{_REPOSITORY}*")):
        name = _id_of(repository)
        try:
            commit = (repository / "refs" / "main").read_text("utf-8").strip()
        except (OSError, ValueError):
            continue
        folder = repository / "snapshots" / Path(commit).name
        names = {file: _model_name(file.name) for file in sorted(folder.glob("*.gguf"))}
        found = {file: own for file, own in names.items() if own is not None}
        is_checkpoint = not found or any((folder / name).is_file() for name in (_SINGLE, _INDEX))
        if is_checkpoint and (folder / "config.json").is_file():
            yield LocalModel(name, "hub cache", folder)
            found = {} if len(found) == 1 else found
        for file, own in found.items():
            yield LocalModel(name if len(found) == 1 else f"{name}/{own}", "hub cache", file)


def _files_of_folder(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint folder, which may have copies in other formats."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        return sorted({folder / name for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # loading fails, and names the reason


def _model_name(file: str) -> str | None:
    """Return the name of the model in a file.

    Return None for a later file of a split model, and for a file that is not a GGUF file.
    """
    part = _PART.fullmatch(file)
    if part is not None:
        return part[1] if int(part[2]) == 1 else None
    return file.removesuffix(".gguf") if file.endswith(".gguf") else None


def _hub_cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache, "huggingface")) / "hub"
