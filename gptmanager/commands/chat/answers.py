"""`Answers`: reads the texts of several answers to one message while they are generated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gptmanager.callbacks import Generation
from gptmanager.callbacks.queue.generation import ReadPosition

_INTERVAL_S = 0.02


class Answers:
    """The answers to one message. `texts`: the text of each answer so far."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.texts = [""] * len(generations)
        self._generations = generations
        self._positions = [ReadPosition() for _ in generations]

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the new text of each answer, at short intervals, until all of them have ended.

        Raises the error of the first answer that fails.
        """
        while not all(position.is_at_end for position in self._positions):
            time.sleep(_INTERVAL_S)
            new = [self._next(index) for index in range(len(self.texts))]
            self.texts = [text + more for text, more in zip(self.texts, new, strict=True)]
            yield new

    def stop(self) -> None:
        """End the answers early. A signal handler may call this."""
        for generation in self._generations:
            generation.cancel()

    def _next(self, index: int) -> str:
        position = self._positions[index]
        part = None if position.is_at_end else self._generations[index].next_part(position)
        return "" if part is None else part.text
