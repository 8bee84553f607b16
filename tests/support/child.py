"""`Child`: a process that ends with its `with` block, whatever happens in this block."""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import AnyStr


class Child(subprocess.Popen[AnyStr]):
    """A `subprocess.Popen` that an exception of the block kills.

    A plain one waits for its process in any case: a test that fails in the block would wait for a
    server that nobody ends.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.kill()
        try:
            super().__exit__(kind, value, traceback)
        except BaseException:  # such as the limit of the test
            self.kill()
            raise
