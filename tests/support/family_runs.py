"""Random models of every family, and the ways in which their tokens are computed."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from checkpoints import PagedDriver, exact_logits, in_float64, new_model
from family_configs import FAMILY_CONFIGS, VARIANTS, WIDE
from renamed_families import RENAMED
from safetensors.torch import save_file
from torch import Tensor

from gptmanager.memory.kv_pool import KvPool
from gptmanager.models import load_model
from gptmanager.models.model import state_shapes


def _published(name: str) -> tuple[str, dict[str, Any]]:
    return name.split(" ")[0], {**FAMILY_CONFIGS, **VARIANTS, **WIDE}[name]


@cache
def family_model(name: str) -> Any:
    """transformers' model in float32, all of its parameters random, also norms and biases."""
    family, config = _published(name)
    if family in RENAMED:
        family, config = RENAMED[family].family, RENAMED[family].config(config)
    model = new_model({"model_type": family, **config})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        buffers = [
            it
            for key, it in model.named_buffers()
            if re.search("correction_bias|layer_scalar", key)
        ]
        for parameter in [*model.parameters(), *buffers]:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            is_one = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(noise + 1 if is_one else noise)
    return model


@cache
def family_folder(name: str) -> Path:
    """The checkpoint of that model, as `save_pretrained` writes it, or as it is published."""
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model, (family, config) = family_model(name), _published(name)
    if family not in RENAMED:
        model.save_pretrained(folder)
        return folder
    state = RENAMED[family].state(model.state_dict(), config)
    save_file({key: it.contiguous() for key, it in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    return folder


@cache
def exact_model(name: str) -> Any:
    return in_float64(family_model(name))


class SharingDriver(PagedDriver):
    """A driver whose sequences may be dropped, and begin with the pages of another one."""

    def drop(self, slot: int) -> None:
        """Forget a sequence, as a pause does; its pages hold NaN again."""
        for block in self._block_tables[slot].tolist():
            for pages in chain.from_iterable(it.tokens for it in self.pool.stacks):
                pages[:, block] = torch.nan
        self.pool.states.clear(slot)
        self._lengths[slot] = 0

    def share(self, source: int, slot: int, length: int) -> None:
        """Begin `slot` with the first tokens of `source`: whole blocks are shared, rests copied."""
        pool: KvPool = self.pool
        whole, rest = divmod(length, pool.tokens_per_block)
        tables = self._block_tables
        tables[slot, :whole] = tables[source, :whole]
        if rest:
            pool.copy([(int(tables[source, whole]), int(tables[slot, whole]), rest)])
        self._token_table[slot, :length] = self._token_table[source, :length]
        self._lengths[slot] = length


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 96, (count,), generator=generator).tolist()


LONG, SHORT = tokens(46, 1), tokens(19, 2)
REUSED, BEAM = LONG[:16] + tokens(7, 3), LONG[:37] + tokens(9, 4)


def all_logits(name: str, **options: Any) -> list[tuple[list[int], Tensor]]:
    """The logits of four sequences: packed, in chunks, paused, reused and as beams."""
    model = load_model(family_folder(name), **options)
    driver = SharingDriver(model, 4, tokens_per_block=8, dtype=model.spec.dtype)
    found: list[list[Tensor]] = [[], [], [], []]
    sequences = [LONG, SHORT, REUSED, BEAM]

    def run(*rows: tuple[int, int]) -> None:
        """Run the next tokens of (sequence, count) rows."""
        given = []
        for slot, count in rows:
            first = driver._lengths[slot]
            given.append((slot, sequences[slot][first : first + count]))
        pieces = driver.forward(given).split([len(own) for _, own in given])
        for (slot, _), piece in zip(rows, pieces, strict=True):
            found[slot].append(piece)

    def begin(slot: int, length: int) -> None:
        """Begin with the first tokens of sequence 0; a state of theirs is computed again."""
        if state_shapes(model.spec):
            run((slot, length))
            return
        driver.share(0, slot, length)
        found[slot].append(torch.cat(found[0])[:length])

    run((0, 20), (1, 5))
    run((0, 9), (1, 1))
    driver.drop(1)  # paused: computed again from its beginning, with what it had generated
    found[1].clear()
    begin(2, 16)
    run((1, 11), (2, 4), (0, 1))
    run((0, 7), (1, 1), (2, 1))
    begin(3, 37)  # a beam that parts within a block
    for _ in range(2):
        run((0, 1), (1, 1), (2, 1), (3, 1))
    run((1, 5), (3, 4), (0, 1))
    for _ in range(3):
        run((0, 1), (3, 1))
    run((0, 3))
    lengths = [sum(map(len, own)) for own in found]
    return [
        (own[:length], torch.cat(pieces))
        for own, length, pieces in zip(sequences, lengths, found, strict=True)
    ]


def expected(name: str, sequence: Sequence[int]) -> Tensor:
    """transformers' logits in float64."""
    return exact_logits(exact_model(name), sequence)


def divergence(exact: Tensor, logits: Tensor) -> float:
    """Return the mean KL divergence of a model's distributions from the exact ones."""
    p, q = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()
