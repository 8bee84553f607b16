"""`DeviceSampler`: a `Sampler` that can also choose on a device, without waiting for the result.

A `DeviceSampler` keeps a copy of the parameters of sampling and adjustments on the device. This
module knows nothing of steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher
from gptmanager.cuda.device.uploads import Upload
from gptmanager.cuda.sampling import adjustments, beam_step, log_probs, sampling
from gptmanager.decoding.sampling.sampling import Ints, Sampler
from gptmanager.request.output_options import NO_EXTRAS, OutputConfig
from gptmanager.request.sampling_params import SamplingParams

MAX_CONTINUATIONS = beam_step.MAX_COUNT
_READERS = {"sample": sampling, "log_probs": log_probs, "best_of_rows": beam_step}
# The most rows that one launch adjusts. This number of rows is enough to occupy a device. More rows
# would only enlarge `_marks`, which takes 4 bytes for each row and token id.
_ADJUSTED_AT_ONCE = 128


class Choice(NamedTuple):
    """The tokens chosen for S rows, on the device.

    `tokens` are int32 `[S]`. `log_probs` are float32 `[S, 1 + n]`: of `tokens`, then of the first n
    `best_tokens`. Rows of lines that do not ask for log probabilities have zeros; if no line asks,
    `log_probs` is None. `best_tokens` (int32) and `best_log_probs` (float32) are the best
    continuations of beams, and of rows that ask for the top tokens. Both are `[S, most]`, for the
    argument `most` of `enqueue`, or None if no row needs continuations.
    """

    tokens: Tensor
    log_probs: Tensor | None
    best_tokens: Tensor | None
    best_log_probs: Tensor | None


class DeviceSampler(Sampler):
    """`enqueue` chooses on the device the tokens that `sample` would choose on the CPU.

    The sampling parameters of each line are copied from the CPU's sampler to the device. The lists
    of all lines (biases, bad words, end ids) are concatenated to one tensor, which is uploaded
    again when a list changes.
    """

    def __init__(
        self,
        num_lines: int,
        vocab_size: int,
        histories: npt.NDArray[np.int32],
        launcher: Launcher,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is the usual dtype of the logits, for which the kernels are compiled."""
        super().__init__(num_lines, vocab_size, histories)
        self._launcher = launcher
        self._choice_table = _table(self._choices, device)
        self._adjustment_table = _table(self._adjustments, device)
        self._workspace = sampling.Workspace.of(launcher, device)
        self._wanted_table = torch.from_numpy(self._wanted).to(device, copy=True)
        self._list_table = torch.zeros(1, dtype=torch.int32, device=device)
        self._list_starts = np.zeros(num_lines, dtype=np.int64)
        self._lists_changed = False
        self._changed: set[int] = set()
        # marks of the tokens in each row's history, all zero between launches
        shape = min(num_lines, _ADJUSTED_AT_ONCE), vocab_size
        self._marks = torch.zeros(shape, dtype=torch.int32, device=device)
        # compile the kernels now, so that no request waits for the compiler
        launcher.kernel(adjustments.PROGRAM, "adjust")
        for name, part in _READERS.items():
            for own in {dtype, torch.float32} & NAMES.keys():
                launcher.kernel(part.PROGRAM, sampling.instantiation(name, own, vocab_size))

    def load(
        self,
        line: int,
        params: SamplingParams,
        orig_prompt_len: int,
        output_config: OutputConfig = NO_EXTRAS,
    ) -> None:
        had_lists = self._lists[line].size > 0
        super().load(line, params, orig_prompt_len, output_config)
        if had_lists or self._lists[line].size:
            self._lists_changed = True
        self._changed.add(line)

    def is_plain(self, cpu_lines: Ints) -> bool:
        """Return whether none of these lines changes its logits or asks for log probabilities.

        If so, `sample_there` alone can choose their tokens.
        """
        return not (self.adjusts(cpu_lines) or self._wanted[cpu_lines].any())

    def sample_there(
        self,
        tokens: Tensor,
        inputs: Tensor,
        logits: Tensor,
        lines: Tensor,
        positions: Tensor,
        cells: Tensor,
    ) -> None:
        """Choose the next tokens of S rows in one launch, which may be captured in a CUDA graph.

        The kernel reads the parameters that `flush` has uploaded. It reads `lines` on the device,
        so each replay can serve other lines. `cuda.sampling.sampling.sample` describes the
        arguments.
        """
        table, workspace = self._choice_table, self._workspace
        sampling.sample(
            *(self._launcher, tokens, inputs, logits, table, lines, positions, workspace),
            cells=cells,
        )

    def enqueue(
        self,
        logits: Tensor,
        cpu_lines: Ints,
        lines: Tensor,
        positions: Tensor,
        cells: Tensor,
        counts: Tensor | None,
        most: int,
        most_scored: int,
        histories: Tensor,
        inputs: Tensor,
        upload: Upload,
    ) -> Choice:
        """Choose the next tokens of S rows, and find up to `most` best continuations of some rows.

        `logits` `[S, vocab_size]`, float32, bfloat16 or float16, may be changed. `cpu_lines` are
        the lines as an array on the CPU. All tensors are on the device: `lines` int32, `positions`
        int64 and `cells` int64, each `[S]`, `histories` int32 `[num_lines, length]`, and `inputs`
        int32. `counts` int32 `[S]` has the number of continuations to find for each row, and is
        only used if `most` > 0. `Choice.log_probs` also covers the first `most_scored`
        continuations. The token of row i is also written to `inputs[cells[i]]`, unless the cell is
        -1; 0 is written if no token could be chosen. `upload` copies the parameters that have
        changed since the last call.
        """
        self.flush(upload)
        if self.adjusts(cpu_lines):
            logits = logits.float()  # adjusted with the same rounding as on the CPU
            self._adjust(logits, histories, lines, positions)
        tokens = torch.empty(len(cpu_lines), dtype=torch.int32, device=logits.device)
        choice = self._choice_table
        self.sample_there(tokens, inputs, logits, lines, positions, cells)
        values = best_tokens = best_log_probs = None
        if counts is not None and most:
            shape = len(cpu_lines), most
            # rows with a count of 0 are not written below, but may be read for log probabilities
            new = torch.zeros if most_scored else torch.empty
            best_tokens = new(shape, dtype=torch.int32, device=logits.device)
            best_log_probs = torch.empty(shape, device=logits.device)
            beam_step.best_of_rows(
                self._launcher, best_tokens, best_log_probs, logits, choice, lines, counts
            )
        if self._wanted[cpu_lines].any():
            scored = tokens[:, None]
            if best_tokens is not None:
                scored = torch.cat((scored, best_tokens[:, :most_scored]), dim=1)
            scored = scored.clamp(min=0)  # ids are negative where a token is missing
            values = torch.zeros(scored.shape, device=logits.device)
            log_probs.log_probs(
                self._launcher, values, logits, scored, choice, self._wanted_table, lines
            )
        return Choice(tokens, values, best_tokens, best_log_probs)

    def _adjust(self, logits: Tensor, histories: Tensor, lines: Tensor, positions: Tensor) -> None:
        for first in range(0, len(logits), len(self._marks)):
            own = slice(first, first + len(self._marks))
            adjustments.adjust(
                self._launcher,
                *(logits[own], self._adjustment_table, self._list_table, histories, self._marks),
                *(lines[own], positions[own]),
            )

    def flush(self, upload: Upload) -> None:
        """Upload the parameters that have changed since the last call."""
        if not self._changed:
            return
        if self._lists_changed:
            self._place_lists(upload)
        changed = np.fromiter(self._changed, dtype=np.int64)
        self._changed.clear()
        choices, adjusted = self._choices[changed], self._adjustments[changed]
        adjusted["lists"] = self._list_starts[changed]
        lines, wanted, *records = upload(
            (changed, self._wanted[changed], _words(choices), _words(adjusted))
        )
        self._wanted_table.index_copy_(0, lines, wanted)
        self._choice_table.view(torch.int64).index_copy_(0, lines, records[0])
        self._adjustment_table.view(torch.int64).index_copy_(0, lines, records[1])

    def _place_lists(self, upload: Upload) -> None:
        """Upload the lists of all lines, and compute where each line's lists begin in the tensor.

        All lines with lists are marked as changed, because their lists may have moved.
        """
        sizes = [len(own) for own in self._lists]
        self._list_starts = np.cumsum([0, *sizes[:-1]])
        self._changed.update(line for line, size in enumerate(sizes) if size)
        if any(sizes):
            (self._list_table,) = upload((np.concatenate(self._lists),))
        self._lists_changed = False


def _table(records: npt.NDArray[np.void], device: torch.device) -> Tensor:
    """Return a zeroed table of the size of `records`: uint8 `[lines, itemsize]`."""
    return torch.zeros((len(records), records.itemsize), dtype=torch.uint8, device=device)


def _words(records: npt.NDArray[np.void]) -> Ints:
    """Return records as int64 `[lines, words]`."""
    return records.view(np.int64).reshape(len(records), -1)
