"""`JournalSeam`: the functions of a journal that a host calls. `NoJournal` does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class JournalSeam(Protocol):
    """A journal between a loop and its host, which holds responses back until they are written."""

    def flush(self) -> None:
        """Write the responses that are held back, and then send them."""

    def note_ends(self, request_ids: Sequence[int], error: str) -> None:
        """Write that requests end with the text `error`, in responses that the loop does not send.

        Any thread may call this, before it sends these responses.
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
