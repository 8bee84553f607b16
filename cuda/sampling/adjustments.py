"""Apply bias, penalties and bans to rows of logits on a device.

The rules are in `gptmanager.decoding.sampling.adjustments`, which applies them on the CPU.
Penalties and bans of n-grams read the whole history of a row. For a row without adjustments only
its record of PARAMS is read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Launcher, Program, check_tensors, ints
from gptmanager.request.input_rows import split_bias
from gptmanager.request.sampling_params import SamplingParams

_THREADS = 256
PARAMS = np.dtype(  # `Adjustments` of adjustments.cu
    [
        ("prompt_len", np.int64),  # length of the prompt as submitted; later tokens were generated
        ("first_end", np.int64),  # the first position at which end ids are allowed
        ("lists", np.int64),  # where the lists of this request begin
        ("num_ends", np.int32),
        ("ngram_size", np.int32),  # 0: n-grams may repeat
        ("num_biases", np.int32),
        ("num_word_tokens", np.int32),
        ("num_words", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("adjusts", np.bool_),
        ("penalizes", np.bool_),
    ],
    align=True,
)
PROGRAM = Program("sampling/adjustments.cu", ("adjust",), dependent=True)


def pack_lists(params: SamplingParams) -> npt.NDArray[np.int32]:
    """Return the lists of a request, concatenated; often empty.

    The order is: the token ids of the bias; the values of the bias, as the bits of float32; the
    tokens of all bad words; for each bad word, the offset of its end among these tokens; and, if
    `min_length` > 0, the end ids of the request.
    """
    ids, values = split_bias(params.embedding_bias)
    words = [word for word in params.bad_words if word]
    parts = (
        ids,
        values.view(np.int32),
        np.array([token for word in words for token in word], dtype=np.int32),
        np.cumsum([len(word) for word in words], dtype=np.int32),
        np.array(params.end_ids if params.min_length > 0 else (), dtype=np.int32),
    )
    return np.concatenate(parts)


def pack(
    params: SamplingParams, orig_prompt_len: int, vocab_size: int, lists: int
) -> tuple[object, ...]:
    """Return a record of dtype PARAMS for a sequence with `orig_prompt_len` prompt tokens.

    `lists` is where the result of `pack_lists(params)` begins: an index in the device's tensor of
    all lists, or a memory address on the CPU.
    """
    words = [word for word in params.bad_words if word]
    num_biases = len(split_bias(params.embedding_bias)[0])
    has_end = params.min_length > 0 and any(0 <= token < vocab_size for token in params.end_ids)
    penalizes = (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
    has_lists = num_biases > 0 or len(words) > 0
    return (
        orig_prompt_len,
        orig_prompt_len + params.min_length if has_end else 0,
        lists,
        len(params.end_ids) if has_end else 0,
        params.no_repeat_ngram_size,
        num_biases,
        sum(map(len, words)),
        len(words),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        penalizes or has_lists or params.no_repeat_ngram_size > 0 or has_end,
        penalizes,
    )


def adjust(
    launcher: Launcher,
    logits: Tensor,
    params: Tensor,
    lists: Tensor,
    histories: Tensor,
    seen: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """Adjust `logits` `[S, V]` float32 in place; the result has the same bits as on the CPU.

    A slot is the index of one sequence in `params` and `histories`, so each beam of a request has
    its own slot. `slots` `[S]` int32 has the slot of each row. A row with slot -1 is not changed.
    Several rows have the same slot if they are draft positions of one sequence. `positions` `[S]`
    int64 has the positions of the tokens to be chosen.

    `params` `[slots, PARAMS.itemsize]` uint8 has one record of PARAMS for each slot, as bytes.
    `lists` int32 has the results of `pack_lists`; ids of a bias are distinct and in the vocabulary.
    `histories` `[slots, length]` int32 has the tokens of each sequence; a row reads the tokens
    before its position. `seen` `[S or more, V]` int32 is scratch memory; it must be zero before the
    call, and is zero after the call. Raises ValueError for tensors of other shapes or dtypes.
    """
    num_rows, vocab_size = logits.shape
    check_tensors(
        logits=(logits, (num_rows, vocab_size), torch.float32),
        params=(params, (None, PARAMS.itemsize), torch.uint8),
        lists=(lists, (None,), torch.int32),
        histories=(histories, (len(params), None), torch.int32),
        seen=(seen, (None, vocab_size), torch.int32),
        slots=(slots, (num_rows,), torch.int32),
        positions=(positions, (num_rows,), torch.int64),
    )
    if len(seen) < num_rows:
        raise ValueError(
            f"`seen` must have at least the {num_rows} rows of `logits`, got {len(seen)}"
        )
    if num_rows == 0:
        return
    sizes = ints(vocab_size, histories.shape[1])
    launcher.kernel(PROGRAM, "adjust")(
        (num_rows,), (_THREADS,), (logits, params, lists, histories, seen, slots, positions, *sizes)
    )
