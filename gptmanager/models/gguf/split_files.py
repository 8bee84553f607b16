"""`read_model`: reads the header of a GGUF model, which llama.cpp may have split into files.

The files of a split model are called NAME-00001-of-00003.gguf and so on. The first file has the
metadata of the model. Each file has a part of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gptmanager.errors import ConfigError, quoted, quoted_path
from gptmanager.memory.checkpoint.tensor_sources import tensor_name
from gptmanager.models.gguf.header import Header, StoredTensor, read_header
from gptmanager.models.gguf.metadata import Metadata

_NAME = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)")
_MAX_FILES = 1000


def read_model(path: Path) -> Header:
    """Read the header of a model. `path` is its only file, or the first of its files.

    Raises ConfigError for files that cannot be used, that are missing, or that are of another
    model.
    """
    first = read_header(path)
    metadata = Metadata(path, first.metadata)
    count = metadata.integer("split.count") or 0
    if count <= 1:
        return first
    if count > _MAX_FILES:
        raise metadata.error("split.count", f"must be at most {_MAX_FILES}")
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(_files(path, count)):
        header = first if number == 0 else read_header(file, is_kept=False)
        fields = Metadata(file, header.metadata)
        own = fields.integer("split.no"), fields.integer("split.count")
        if own != (number, count):
            raise ConfigError(
                f"{quoted_path(file)}: split.no and split.count = {quoted(own)} must be "
                f"({number}, {count})"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ConfigError(
                    f"{quoted_path(file)} has the tensor {tensor_name(name)}, which another file "
                    "of the model has"
                )
            tensors[name] = tensor
    total = metadata.integer("split.tensors.count")
    if total not in (None, len(tensors)):
        raise ConfigError(
            f"{quoted_path(path)}: the {count} files of the model have {len(tensors)} tensors, "
            f"and split.tensors.count = {quoted(total)}"
        )
    return first._replace(tensors=tensors)


def first_of_split(files: Sequence[Path]) -> Path | None:
    """Return `files[0]` if the sorted `files` are, by their names, all files of one model.

    Otherwise returns None. May raise ConfigError if `files[0]` is a later file of a model.
    """
    match = _NAME.fullmatch(files[0].name)
    if match is None or len(files) != int(match[4]):
        return None
    return files[0] if [*files] == _files(files[0], len(files)) else None


def _files(path: Path, count: int) -> list[Path]:
    """Return all files of a split model, of which `path` must be the first."""
    match = _NAME.fullmatch(path.name)
    wanted = f"-{1:05}-of-{count:05}.gguf"
    if match is None or not path.name.endswith(wanted):
        raise ConfigError(
            f"{quoted_path(path)} is one of {count} files of a model: pass the first one, with a "
            f"name that ends with {wanted}"
        )
    return [
        path.with_name(f"{match[1]}{number:05}{match[3]}{match[4]}{match[5]}")
        for number in range(1, count + 1)
    ]
