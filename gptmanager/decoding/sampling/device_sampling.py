"""`DeviceSampler`: the `Sampler` with a second way, on a device, that nothing waits for.

Keeps there what rows are adjusted and chosen by. Knows nothing of steps.
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
_ADJUSTED_AT_ONCE = 128  # rows: they fill a device, and marks take 4 bytes a token of a vocabulary


class Choice(NamedTuple):
    """The tokens chosen for S rows, on the device.

    `tokens` int32 `[S]`. `log_probs` float32 `[S]`, meaningful for lines that asked for them; None
    if no line did; `[S, 1 + n]` if the log probabilities of the n best tokens follow.
    `best_tokens` int32 and `best_log_probs` float32 `[S, most]`: the best continuations of beams.
    """

    tokens: Tensor
    log_probs: Tensor | None
    best_tokens: Tensor | None
    best_log_probs: Tensor | None


class DeviceSampler(Sampler):
    """`enqueue` chooses on the device what `sample` would choose on the CPU.

    The records of the CPU lie on the device, too; the lists of all lines (biases, bad words) lie
    one behind the other, and travel anew when one of them changes.
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
        """`dtype`: of the logits, as a rule."""
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
        # marks of tokens that a row has seen, all zero between steps
        shape = min(num_lines, _ADJUSTED_AT_ONCE), vocab_size
        self._marks = torch.zeros(shape, dtype=torch.int32, device=device)
        # compiled now, and not while requests wait
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
        """Whether `sample` is all that these lines need: it changes no logits, and nobody wants log
        probabilities.
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
        """The next tokens of S rows, in one launch that may be recorded: it reads what `flush` has
        brought, and may find other lines when it runs again. Arguments as of `sampling.sample`.
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
        """The next tokens of S rows, and the best continuations of some, at most `most` of each.

        `logits` `[S, vocab_size]`, float32, bfloat16 or float16, may be changed;
        `lines` int32, `positions` int64, `cells` int64 and, with `most`, `counts` int32 `[S]`
        (how many continuations each row wants) are on the device; `log_probs` are those of the
        first `most_scored` continuations, too. On the device are also `histories`
        int32 `[num_lines, length]`, and `inputs` int32, of which a row's cell gets its token, 0
        where there is none. `cpu_lines`: the lines on the CPU. What changed since the last
        call travels by `upload`.
        """
        self.flush(upload)
        if self.adjusts(cpu_lines):
            logits = logits.float()  # adjusted with the roundings of the CPU
            self._adjust(logits, histories, lines, positions)
        tokens = torch.empty(len(cpu_lines), dtype=torch.int32, device=logits.device)
        choice = self._choice_table
        self.sample_there(tokens, inputs, logits, lines, positions, cells)
        values = best_tokens = best_log_probs = None
        if counts is not None and most:
            shape = len(cpu_lines), most
            new = torch.zeros if most_scored else torch.empty  # read in rows that want none, too
            best_tokens = new(shape, dtype=torch.int32, device=logits.device)
            best_log_probs = torch.empty(shape, device=logits.device)
            beam_step.best_of_rows(
                self._launcher, best_tokens, best_log_probs, logits, choice, lines, counts
            )
        if self._wanted[cpu_lines].any():
            scored = tokens
            if best_tokens is not None and most_scored:
                scored = torch.cat((tokens[:, None], best_tokens[:, :most_scored]), dim=1)
            scored = scored.clamp(min=0)  # less where there is no token, or are fewer
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
        """Bring what changed since the last call."""
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
        """All lists anew, and where those of each line begin."""
        sizes = [len(own) for own in self._lists]
        self._list_starts = np.cumsum([0, *sizes[:-1]])
        self._changed.update(line for line, size in enumerate(sizes) if size)
        if any(sizes):
            (self._list_table,) = upload((np.concatenate(self._lists),))
        self._lists_changed = False


def _table(records: npt.NDArray[np.void], device: torch.device) -> Tensor:
    """Room for them as bytes, `[lines, itemsize]`."""
    return torch.zeros((len(records), records.itemsize), dtype=torch.uint8, device=device)


def _words(records: npt.NDArray[np.void]) -> Ints:
    """They as int64 `[lines, words]`."""
    return records.view(np.int64).reshape(len(records), -1)
