"""`DeviceSampler`: the `Sampler` with a second way for rows that a device can choose alone.

Decides which rows those are, and keeps their parameters on the device. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.launch import Launcher
from gptmanager.cuda.sampling import PARAMS, pack, sample
from gptmanager.decoding.sampling import Ints, Sampler
from gptmanager.request import NO_EXTRAS, SamplingParams, Wanted

Upload = Callable[[Mapping[str, np.ndarray]], Mapping[str, Tensor]]


class DeviceSampler(Sampler):
    """`enqueue` chooses on the device what `sample` would choose on the host."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        histories: npt.NDArray[np.int32],
        launcher: Launcher,
        device: torch.device,
    ) -> None:
        super().__init__(num_slots, vocab_size, histories)
        self._launcher = launcher
        self._records = np.zeros(num_slots, dtype=PARAMS)
        self._on_device = torch.zeros(
            (num_slots, PARAMS.itemsize), dtype=torch.uint8, device=device
        )
        self._changed: set[int] = set()

    def load(
        self, slot: int, params: SamplingParams, orig_prompt_len: int, wanted: Wanted = NO_EXTRAS
    ) -> None:
        super().load(slot, params, orig_prompt_len, wanted)
        self._records[slot] = pack(params, orig_prompt_len, self.vocab_size)
        self._changed.add(slot)

    def is_plain(self, slots: Ints) -> bool:
        """None of these slots asks for more than its token, chosen of the logits as they are."""
        params = self._params[slots]
        return not (params["adjusts"] | params["log_probs"]).any()

    def enqueue(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor, upload: Upload
    ) -> None:
        """Write the next tokens of S plain rows to `tokens` int32 `[S]`.

        `logits` float32 `[S, vocab_size]`, `slots` int32 and `positions` int64 `[S]`, all on the
        device. Changed parameters travel by `upload`.
        """
        if self._changed:
            slots_changed = np.fromiter(self._changed, dtype=np.int64)
            words = self._records[slots_changed].view(np.int64).reshape(len(slots_changed), -1)
            sent = upload({"slots": slots_changed, "words": words})
            self._on_device.view(torch.int64).index_copy_(0, sent["slots"], sent["words"])
            self._changed.clear()
        sample(self._launcher, tokens, logits, self._on_device, slots, positions)
