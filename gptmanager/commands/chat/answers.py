"""`Answers`: the answers to one message while they are generated, in thoughts and content."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gptmanager.callbacks import Generation, GenerationResult
from gptmanager.callbacks.answers.parsing.answer_parts import (
    AnswerParser,
    Content,
    Found,
    Thought,
)
from gptmanager.callbacks.queue.generation import ReadPosition
from gptmanager.commands.chat.conversation import Answer

_INTERVAL_S = 0.02


class Answers:
    """The answers to one message. `so_far` has each answer up to the text that has arrived.

    `parsers` has the parser of each answer, or None if all of its text is content.
    """

    def __init__(
        self, generations: Sequence[Generation], parsers: Sequence[AnswerParser | None]
    ) -> None:
        self.so_far = [Answer("")] * len(generations)
        self._generations = generations
        self._parsers = parsers
        self._positions = [ReadPosition() for _ in generations]

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[list[list[Found]]]:
        """Yield the new parts of each answer, at short intervals, until all of them have ended.

        Raises the error of the first answer that fails.
        """
        while not all(position.is_at_end for position in self._positions):
            time.sleep(_INTERVAL_S)
            yield [self._next(index) for index in range(len(self))]

    def stop(self) -> None:
        """End the answers early. A signal handler may call this."""
        for generation in self._generations:
            generation.cancel()

    def results(self) -> list[GenerationResult]:
        """Wait for the results of the answers."""
        return [generation.result() for generation in self._generations]

    def _next(self, index: int) -> list[Found]:
        position, parser = self._positions[index], self._parsers[index]
        part = None if position.is_at_end else self._generations[index].next_part(position)
        if part is None:
            return []
        if parser is None:
            found: list[Found] = [Content(part.text)] if part.text else []
        else:
            found = parser.push(part.text) + (parser.flush() if position.is_at_end else [])
        before = self.so_far[index]
        self.so_far[index] = Answer(
            before.content + "".join(one.text for one in found if isinstance(one, Content)),
            before.thoughts + "".join(one.text for one in found if isinstance(one, Thought)),
        )
        return found
