"""`JournalSeam`: what a journal does with the responses of a host; `NoJournal` does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class JournalSeam(Protocol):
    """A journal between a loop and its host, which holds responses back until they are written."""

    def flush(self) -> None:
        """Write what is held back, then send it."""

    def note_ends(self, request_ids: Sequence[int]) -> None:
        """Write that requests end with responses which do not come from the loop. Any thread."""

    def close(self) -> None:
        """Close the journal: no response follows."""


class NoJournal:
    """Holds no response back."""

    def flush(self) -> None:
        pass

    def note_ends(self, request_ids: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass
