"""`StoppedText`: the text of one output, up to its first stop string.

It decides which tokens belong to the output, and which text can be released. A stop string may
begin and end within tokens. Only a suffix that may begin a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from gptmanager.callbacks.text.stop_strings import StopStrings
from gptmanager.callbacks.text.text_stream import TextStream


class StoppedText:
    """Decodes the tokens of one output until a stop string is complete.

    Stop strings are searched for in the output only, not in the prompt. The stop string that is
    complete first ends the output. If several are complete at the same character, the longest one
    ends the output. The result does not depend on how the text is split into tokens and pieces.
    `special_texts` are those of `TextStream`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        self.is_stopped = False
        self.pieces: list[str] = []  # the released text
        self._stream = TextStream(tokenizer, prompt_ids, special_texts=special_texts)
        self._stops = StopStrings(stops)
        self._held = ""  # text that may begin a stop string
        self._num_released = 0  # characters

    @property
    def text(self) -> str:
        """The released text; the whole text after `finish`."""
        return "".join(self.pieces)

    def push(self, tokens: Sequence[int]) -> int:
        """Add tokens; return how many of them belong to the output.

        These are all tokens up to and including the token that completes a stop string.
        """
        for index, token in enumerate(tokens):
            if self.is_stopped:
                return index
            self._read(self._stream.push(token))
        return len(tokens)

    def finish(self) -> None:
        """Release the text that is held back, unless a stop string has ended the output."""
        if not self.is_stopped:
            self._read(self._stream.flush())
        if not self.is_stopped:
            self._release(len(self._held))

    def _read(self, text: str) -> None:
        self._held += text
        found = self._stops.push(text)
        if found is None:
            self._release(len(self._held) - self._stops.num_held)
        else:
            self.is_stopped = True
            self._release(found.begin - self._num_released)

    def _release(self, count: int) -> None:
        if count:
            self.pieces.append(self._held[:count])
            self._held = self._held[count:]
            self._num_released += count
