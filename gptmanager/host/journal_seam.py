"""`JournalSeam`: the functions of a journal that a host calls. `NoJournal` does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class JournalSeam(Protocol):
    """A journal between a loop and its host. It holds responses back until they are recorded."""

    def flush(self) -> None:
        """Write the responses that are held back, and then send them."""

    def note_ends(self, request_ids: Sequence[int], error: str) -> None:
        """Record in the journal that these requests end with `error`.

        This is for final responses that the loop does not send. The thread that sends them calls
        this method first.
        """

    def close(self) -> None:
        """Close the journal: no response follows."""


class NoJournal:
    """Holds no response back."""

    def flush(self) -> None:
        pass

    def note_ends(self, request_ids: Sequence[int], error: str) -> None:
        pass

    def close(self) -> None:
        pass
