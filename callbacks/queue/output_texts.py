"""`OutputTexts`: decodes the outputs of requests that are submitted with `stop`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from tokenizers import Tokenizer

from gptmanager import InferenceRequest
from gptmanager.arguments import able
from gptmanager.callbacks.queue.result import prompt_of
from gptmanager.callbacks.text.checkpoint import load_tokenizer
from gptmanager.callbacks.text.stop_strings import checked_stops
from gptmanager.callbacks.text.stopped_text import StoppedText
from gptmanager.errors import ConfigError


class OutputTexts:
    """Creates a `StoppedText` for each output of requests that are submitted with `stop`.

    `tokenizer` is a tokenizer, or a checkpoint folder that has a tokenizer. If it is None,
    `stop` is refused. `special_texts` are those of `TextStream`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | str | os.PathLike[str] | None,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        if tokenizer is not None and not isinstance(tokenizer, (str, os.PathLike)):
            able("tokenizer", tokenizer, "decode", "tokenizer or a folder")
        self._tokenizer = tokenizer
        self._special_texts = special_texts

    def load(self) -> Tokenizer:
        """Return the tokenizer, which is read at the first call.

        Raise ConfigError if the tokenizer is None, or cannot be read.
        """
        if self._tokenizer is None:
            raise ConfigError("`stop` needs a tokenizer: create the queue with `tokenizer`")
        if not isinstance(self._tokenizer, Tokenizer):
            self._tokenizer = load_tokenizer(self._tokenizer)
        return self._tokenizer

    def of_request(
        self, request: InferenceRequest, stop: Sequence[str] | None
    ) -> Callable[[], StoppedText] | None:
        """Return a function that creates the `StoppedText` of an output; None without `stop`.

        Raise InvalidRequestError for an invalid `stop`, and ConfigError without a tokenizer.
        """
        if stop is None:
            return None
        stops, tokenizer, special = checked_stops(stop), self.load(), self._special_texts
        return lambda: StoppedText(tokenizer, prompt_of(request).tolist(), stops, special)
