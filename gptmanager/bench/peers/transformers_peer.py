"""Runs a load through transformers' continuous batching, to compare a `GptManager` with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from gptmanager.bench.engine import WARM_UP, Figures
from gptmanager.bench.load import Request, Source
from gptmanager.config import OptionalParams
from gptmanager.errors import ConfigError, GptManagerError

_BLOCK = 256  # tokens per KV cache block: transformers' default
_BATCH_TOKENS = 512  # most tokens per iteration; the dense attention mask grows with them


class TooSlow(GptManagerError):
    """The peer exceeded its time limit."""


class TransformersPeer:
    """transformers' continuous batching (paged attention through SDPA) on the same weights."""

    def __init__(
        self, source: Source, params: OptionalParams, device: torch.device | str = "cpu"
    ) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError("--peer transformers needs `pip install transformers`") from error
        library: Any = transformers
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        auto = library.AutoModelForCausalLM
        if isinstance(source, tuple):
            config = library.AutoConfig.for_model(**source[0])
            dtype = getattr(torch, params.dtype or "float32")
            with torch.device(device):
                self._model = auto.from_config(config, dtype=dtype)
            is_tied = source[0]["tie_word_embeddings"]  # if so, the state dict has no output matrix
            self._model.load_state_dict(source[1], strict=not is_tied)
        else:
            try:
                self._model = auto.from_pretrained(
                    source, dtype=params.dtype or "auto", use_safetensors=True
                ).to(device)
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(f"--peer transformers cannot load {source}: {error}") from error
        self._model.eval().set_attn_implementation("paged|sdpa")
        self._configure = library.ContinuousBatchingConfig
        self._generation = library.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1 << 20
        )

    def run(self, requests: Sequence[Request], limit_s: float | None = None) -> Figures:
        """Submit all requests at once, and return their outputs and the time of the whole run.

        Raises TooSlow if the requests take longer than `limit_s`.
        """
        needed = sum(-(-(len(prompt) + new_tokens) // _BLOCK) for prompt, new_tokens in requests)
        batching = self._configure(
            block_size=_BLOCK, num_blocks=2 * needed + 2, max_batch_tokens=_BATCH_TOKENS
        )
        # Its context manager would pass an error on in a way that Python 3.12 deprecates.
        engine = self._model.init_continuous_batching(
            generation_config=self._generation, continuous_batching_config=batching
        )
        with torch.inference_mode():
            engine.start()
            try:
                _collect(engine, [(WARM_UP, 2)])
                started = time.monotonic()
                outputs = _collect(engine, requests, limit_s)
                seconds = time.monotonic() - started
            finally:
                engine.stop(timeout=10, hard_stop=True)  # else it waits for running requests
                engine.destroy()
        return Figures(seconds, outputs)


def _collect(
    engine: Any, requests: Sequence[Request], limit_s: float | None = None
) -> tuple[tuple[int, ...], ...]:
    """Submit `requests` to transformers' `engine`, and return their outputs in the same order.

    Raises TooSlow if the requests take longer than `limit_s`.
    """
    started = time.monotonic()
    for index, (prompt, new_tokens) in enumerate(requests):
        engine.add_request(prompt, request_id=str(index), max_new_tokens=new_tokens)
    outputs: dict[int, tuple[int, ...]] = {}
    while len(outputs) < len(requests):
        if limit_s is not None and time.monotonic() - started > limit_s:
            raise TooSlow(f"{len(outputs)} of {len(requests)} requests done after {limit_s:g} s")
        result = engine.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise GptManagerError(f"transformers failed: {result.error}")
        if result is not None and result.is_finished():
            outputs[int(result.request_id)] = tuple(result.generated_tokens)
        elif result is None and not engine.is_running():
            raise GptManagerError("transformers' generation loop ended too early")
    return tuple(outputs[index] for index in range(len(requests)))
