"""`GrammarStart`: where in an output the text of a grammar begins, if the model thinks first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class GrammarStart(NamedTuple):
    """How to find the end of a model's thought. The grammar restricts only the text after it.

    `closes` are the consecutive tokens that close the thought. The grammar's text begins right
    after them or, if `then` is not None, after the next token with the id `then`. `opens` is the
    token that opens a thought; an output that begins with another token has no thought. `opens` is
    None if the prompt has already opened the thought. With `may_end`, the output may end in the
    thought.
    """

    closes: tuple[int, ...]
    then: int | None = None
    opens: int | None = None
    may_end: bool = False

    def num_before(self, generated: npt.NDArray[np.int32]) -> int | None:
        """Return the number of tokens before the grammar's text, or None if it has not begun."""
        if self.opens is not None and (not len(generated) or generated[0] != self.opens):
            return 0
        count = len(self.closes)
        for at in np.flatnonzero(generated == self.closes[0]).tolist():
            if tuple(generated[at : at + count].tolist()) != self.closes:
                continue
            if self.then is None:
                return int(at + count)
            after = np.flatnonzero(generated[at + count :] == self.then)
            return int(at + count + after[0] + 1) if len(after) else None
        return None
