"""`generate`: completes prompts with a single call, which starts and ends its own manager."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, Union, overload

import numpy as np
from tokenizers import Tokenizer

from gptmanager import GptManager, ModelType, OptionalParams, SchedulerConfig
from gptmanager.arguments import at_least
from gptmanager.callbacks.queue.generation import Generation
from gptmanager.callbacks.queue.request_queue import RequestQueue
from gptmanager.callbacks.queue.result import GenerationResult
from gptmanager.callbacks.text.checkpoint import TokenDefaults, load_tokenizer
from gptmanager.callbacks.text.stop_strings import checked_stops
from gptmanager.callbacks.text.text_stream import TextStream
from gptmanager.errors import ConfigError, GptManagerError, quoted
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.redrawn_lines import RedrawnLines

_PATIENCE_S = 1.0  # seconds before a progress bar appears
_REFRESH_S = 0.2  # seconds between updates of a progress bar

# completions have the type of their prompts
Prompts = TypeVar("Prompts", str, list[str], list[int], list[list[int]])
TokenizerSource = Union[Tokenizer, str, "os.PathLike[str]", None]


@overload
def generate(
    model: Any,
    prompts: Prompts,
    max_new_tokens: int = 64,
    *,
    stop: Sequence[str] | None = None,
    num_return_sequences: None = None,
    tokenizer: TokenizerSource = None,
    optional_params: OptionalParams | None = None,
    progress: bool | None = None,
    **sampling: Any,
) -> Prompts: ...


@overload
def generate(
    model: Any,
    prompts: Prompts,
    max_new_tokens: int = 64,
    *,
    stop: Sequence[str] | None = None,
    num_return_sequences: int,
    tokenizer: TokenizerSource = None,
    optional_params: OptionalParams | None = None,
    progress: bool | None = None,
    **sampling: Any,
) -> list[Prompts]: ...


def generate(
    model: Any,
    prompts: Any,
    max_new_tokens: int = 64,
    *,
    stop: Sequence[str] | None = None,
    num_return_sequences: int | None = None,
    tokenizer: TokenizerSource = None,
    optional_params: OptionalParams | None = None,
    progress: bool | None = None,
    **sampling: Any,
) -> Any:
    """Return the completions of `prompts`, in the same order: texts for texts, ids for token ids.

    `model` is a checkpoint folder, (config dict, state dict), or a `Model` object, as for
    `GptManager`. `prompts` are texts or lists of token ids. For a single prompt the completion
    itself is returned. Completions contain neither the prompt nor the `end_id` or stop word that
    ended them. Text prompts need a tokenizer: tokenizer.json in the checkpoint folder, or
    `tokenizer` (a `Tokenizer`, or a folder with a tokenizer.json).

    `sampling` has fields of `InferenceRequest`, with the same values for all prompts:
    `temperature`, `runtime_top_p`, `stop_words_list`, ... By default `end_id` and `pad_id` are from
    generation_config.json, or else config.json. Beam search returns the best beam.

    `stop` has strings that end a completion, as for `RequestQueue.submit`. They need a tokenizer. A
    text ends before the stop string; token ids include the token that completes the stop string.

    With `num_return_sequences`, the result has a list of this many completions for each prompt. The
    completions of a list are sampled independently, or are the best beams.

    With `progress` None, work that takes more than a second, such as loading, gets a progress bar
    if standard error is a terminal. With True, the same applies, but if standard error is not a
    terminal, the work gets a line when it ends. With False, nothing is shown.

    An interrupt (Ctrl-C) aborts the manager and leaves no thread. Raise ConfigError like the
    constructor of `GptManager`, or the error of the first failed request, with its prompt's index.

        from gptmanager.callbacks import generate
        print(generate("examples/tiny_llama", "Once upon a time", 40))
    """
    is_single = _is_single(prompts)
    batch: list[Any] = [prompts] if is_single else list(prompts)
    if not batch:
        return prompts
    if num_return_sequences is not None:
        at_least(1, "num_return_sequences", num_return_sequences)
        sampling["num_return_sequences"] = num_return_sequences
    decoder = None
    if stop is not None or any(isinstance(prompt, str) for prompt in batch):
        decoder = _tokenizer(tokenizer, model)
    if stop is not None:
        sampling["stop"] = checked_stops(stop)
    prompt_ids = [_ids(decoder, prompt) for prompt in batch]
    with closing(ProgressBars(RedrawnLines(sys.stderr), _PATIENCE_S, wanted=progress)) as bars:
        results = _run(model, prompt_ids, max_new_tokens, optional_params, bars, decoder, sampling)
    completions: list[Any] = []
    for prompt, result in zip(batch, results, strict=True):
        outputs = _outputs(decoder if isinstance(prompt, str) else None, result)
        completions.append(outputs[0] if num_return_sequences is None else outputs)
    return completions[0] if is_single else completions


def _run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    optional_params: OptionalParams | None,
    bars: ProgressBars,
    decoder: Tokenizer | None,
    sampling: Mapping[str, Any],
) -> list[GenerationResult]:
    """Generate for all prompts, and return their results."""
    params = OptionalParams() if optional_params is None else optional_params
    if not isinstance(params, OptionalParams):
        raise ConfigError(f"optional_params = {quoted(params)}, expected OptionalParams")
    if params.on_progress is None:
        params = replace(params, on_progress=bars.update)
    defaults = _token_defaults(model)
    # an exception in this block, such as an interrupt, aborts the manager
    with (
        RequestQueue(
            max_pending=None,
            default_end_id=defaults.end_ids,
            default_pad_id=defaults.pad_id,
            exclude_input_in_output=params.exclude_input_in_output,
            tokenizer=decoder,
        ) as queue,
        GptManager(
            model,
            ModelType.INFLIGHT_FUSED_BATCHING,
            _max_beam_width(sampling),
            SchedulerConfig(),
            queue.get_inference_requests,
            queue.send_response,
            queue.poll_stop_signal,
            None,
            params,
        ) as manager,
    ):
        queue.attach(manager)
        generations = [queue.submit(ids, max_new_tokens, **sampling) for ids in prompts]
        _wait_for_all(generations, bars)
    return [generation.result() for generation in generations]


def _max_beam_width(sampling: Mapping[str, Any]) -> Any:
    """Return the `max_beam_width` that the requests need. Each sampled completion needs a beam."""
    width, count = sampling.get("beam_width", 1), sampling.get("num_return_sequences", 1)
    return max(width, count) if isinstance(width, int) else width


def _wait_for_all(generations: Sequence[Generation], bars: ProgressBars) -> None:
    """Wait until all generations are done. Raise the first error, with the index of its prompt."""
    ended: SimpleQueue[int] = SimpleQueue()
    for index, generation in enumerate(generations):
        generation.add_done_callback(partial(_put, ended, index))
    num_done = num_tokens = 0
    start = time.monotonic()
    while True:
        rate = num_tokens / max(time.monotonic() - start, 1e-9)
        bars.update("prompts", num_done, len(generations), f"{rate:.0f} tokens/s")
        if num_done == len(generations):
            return
        try:
            index = ended.get(timeout=_REFRESH_S)
        except Empty:
            continue
        error = generations[index].exception()
        if error is not None:
            raise _naming_prompt(error, index) from error
        num_done += 1
        num_tokens += sum(map(len, generations[index].result().generated_ids))


def _put(ended: SimpleQueue[int], index: int, _: object) -> None:
    ended.put(index)


def _naming_prompt(error: BaseException, index: int) -> BaseException:
    cls = type(error) if isinstance(error, GptManagerError) else GptManagerError
    return cls(f"prompts[{index}]: {error}")


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__"):
        raise TypeError(f"prompts must be texts or lists of token ids, got {quoted(prompts)}")
    first = prompts[0] if len(prompts) else ()
    return not isinstance(first, str) and np.ndim(first) == 0


def _folder(model: Any) -> Path | None:
    return Path(model) if isinstance(model, (str, os.PathLike)) else None


def _token_defaults(model: Any) -> TokenDefaults:
    folder = _folder(model)
    if folder is not None:
        return TokenDefaults.of_folder(folder)
    if isinstance(model, tuple) and model and isinstance(model[0], Mapping):
        return TokenDefaults.of_config(model[0])
    return TokenDefaults()


def _tokenizer(tokenizer: TokenizerSource, model: Any) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    folder = _folder(model) if tokenizer is None else tokenizer
    if folder is None:
        raise ConfigError(
            "text prompts and `stop` need a tokenizer: pass `tokenizer`, or a model folder"
        )
    return load_tokenizer(folder)


def _ids(tokenizer: Tokenizer | None, prompt: Any) -> list[int]:
    if tokenizer is None or not isinstance(prompt, str):
        return list(prompt)
    ids: list[int] = tokenizer.encode(prompt).ids
    return ids


def _outputs(tokenizer: Tokenizer | None, result: GenerationResult) -> list[Any]:
    """Return the completions of a prompt: as texts, or as token ids if `tokenizer` is None."""
    if tokenizer is None:
        return [*map(list, result.generated_ids)]
    if result.texts:
        return [*result.texts]
    streams = [(TextStream(tokenizer, result.prompt_ids), ids) for ids in result.generated_ids]
    return [stream.push(tokens) + stream.flush() for stream, tokens in streams]
