"""`DeviceSampler`: the `Sampler` with a second way, on a device, that nothing waits for.

Keeps there what rows are adjusted and chosen by. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda import adjustments, beam_step, log_probs, sampling
from gptmanager.cuda.launch import Launcher
from gptmanager.cuda.uploads import Upload
from gptmanager.decoding.sampling import Ints, Sampler
from gptmanager.request.llm_request import NO_EXTRAS, OutputConfig, SamplingParams

MAX_CONTINUATIONS = beam_step.MAX_COUNT
_ADJUSTED_AT_ONCE = 128  # rows: they fill a device, and marks take 4 bytes a token of a vocabulary


class Choice(NamedTuple):
    """What is chosen for S rows, on the device.

    `tokens` int32 `[S]`; `inputs` int32 `[S]`: the same as inputs of the next step, 0 where there
    is none. `log_probs` float32 `[S]`, of meaning where a slot wants them; None: nowhere.
    `best_tokens` int32 and `best_log_probs` float32 `[S, most]`: the best continuations of beams.
    """

    inputs: Tensor
    tokens: Tensor
    log_probs: Tensor | None
    best_tokens: Tensor | None
    best_log_probs: Tensor | None


class DeviceSampler(Sampler):
    """`enqueue` chooses on the device what `sample` would choose on the host.

    A record a slot on the device, as on the host; the lists of all slots (biases, bad words) lie
    one behind the other, and travel anew when one of them changes.
    """

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
        dtypes = {"choice": sampling.PARAMS, "adjustment": adjustments.PARAMS}
        self._records = {name: np.zeros(num_slots, dtype) for name, dtype in dtypes.items()}
        self._tables = {
            name: torch.zeros((num_slots, dtype.itemsize), dtype=torch.uint8, device=device)
            for name, dtype in dtypes.items()
        }
        self._wanted = np.zeros(num_slots, dtype=np.uint8)
        self._wanted_table = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self._device_lists: dict[int, npt.NDArray[np.int32]] = {}  # by slot, where there are any
        self._list_table = torch.zeros(1, dtype=torch.int32, device=device)
        self._lists_changed = False
        self._changed: set[int] = set()
        # marks of tokens that a row has seen, all zero between steps
        shape = min(num_slots, _ADJUSTED_AT_ONCE), vocab_size
        self._marks = torch.zeros(shape, dtype=torch.int32, device=device)
        for part in (adjustments, sampling, log_probs, beam_step):
            for name in part.PROGRAM.kernels:  # compiled now, and not while requests wait
                launcher.kernel(part.PROGRAM, name)

    def load(
        self,
        slot: int,
        params: SamplingParams,
        orig_prompt_len: int,
        output_config: OutputConfig = NO_EXTRAS,
    ) -> None:
        super().load(slot, params, orig_prompt_len, output_config)
        lists = adjustments.pack_lists(params)
        if lists.size or slot in self._device_lists:
            self._lists_changed = True
            self._device_lists.pop(slot, None)
        if lists.size:
            self._device_lists[slot] = lists
        records = self._records
        records["choice"][slot] = sampling.pack(params, orig_prompt_len, self.vocab_size)
        records["adjustment"][slot] = adjustments.pack(params, orig_prompt_len, self.vocab_size, 0)
        self._wanted[slot] = log_probs.NOTHING
        if output_config.log_probs:
            self._wanted[slot] = log_probs.LOG_PROB if output_config.normalized else log_probs.LOGIT
        self._changed.add(slot)

    def enqueue(
        self,
        logits: Tensor,
        places: Mapping[str, Tensor],
        slots: Ints,
        histories: Tensor,
        upload: Upload,
        most: int = 0,
    ) -> Choice:
        """The next tokens of S rows, and the best continuations of beams, at most `most` of each.

        `logits` float32 `[S, vocab_size]` may be changed; `places`: "lines" int32, "positions"
        int64 and, with `most`, "counts" int32 `[S]`: how many continuations each row wants; all on
        the device, as `histories` int32 `[num_slots, length]`. `slots`: the lines as the host
        knows them. What changed since the last call travels by `upload`.
        """
        self._flush(upload)
        lines, positions = places["lines"], places["positions"]
        if self.adjusts(slots):
            self._adjust(logits, histories, lines, positions)
        inputs, tokens = torch.empty((2, len(slots)), dtype=torch.int32, device=logits.device)
        choice = self._tables["choice"]
        sampling.sample(self._launcher, tokens, inputs, logits, choice, lines, positions)
        values = best_tokens = best_log_probs = None
        if self._wanted[slots].any():
            values = torch.zeros(len(slots), device=logits.device)
            log_probs.log_probs(
                self._launcher, values, logits, inputs, choice, self._wanted_table, lines
            )
        if most:
            shape = len(slots), most
            best_tokens = torch.empty(shape, dtype=torch.int32, device=logits.device)
            best_log_probs = torch.empty(shape, device=logits.device)
            beam_step.best_of_rows(
                self._launcher,
                *(best_tokens, best_log_probs, logits, choice, lines, places["counts"]),
            )
        return Choice(inputs, tokens, values, best_tokens, best_log_probs)

    def _adjust(self, logits: Tensor, histories: Tensor, lines: Tensor, positions: Tensor) -> None:
        params = self._tables["adjustment"]
        for first in range(0, len(logits), len(self._marks)):
            own = slice(first, first + len(self._marks))
            adjustments.adjust(
                self._launcher,
                *(logits[own], params, self._list_table, histories, self._marks),
                *(lines[own], positions[own]),
            )

    def _flush(self, upload: Upload) -> None:
        if not self._changed:
            return
        if self._lists_changed:
            self._place_lists(upload)
        changed = np.fromiter(self._changed, dtype=np.int64)
        self._changed.clear()
        words = {
            name: records[changed].view(np.int64).reshape(len(changed), -1)
            for name, records in self._records.items()
        }
        sent = upload({"slots": changed, "wanted": self._wanted[changed], **words})
        for name, table in self._tables.items():
            table.view(torch.int64).index_copy_(0, sent["slots"], sent[name])
        self._wanted_table.index_copy_(0, sent["slots"], sent["wanted"])

    def _place_lists(self, upload: Upload) -> None:
        """All lists anew, and where those of each slot begin."""
        start = 0
        for slot, own in self._device_lists.items():
            self._records["adjustment"]["lists"][slot] = start
            self._changed.add(slot)
            start += len(own)
        if start:
            self._list_table = upload({"lists": np.concatenate([*self._device_lists.values()])})[
                "lists"
            ]
        self._lists_changed = False
