"""`GrammarStart`: where in an output the text of a grammar begins, if the model thinks first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class GrammarStart(NamedTuple):
    """The text of a grammar begins after a thought; the tokens of the thought are free.

    `closes`: consecutive tokens that close the thought. `then`: the text begins after the next such
    token; None: at once. `opens`: a token that may open a thought as the first one of the output,
    which otherwise begins with the grammar's text; None: the thought is open already.
    """

    closes: tuple[int, ...]
    then: int | None = None
    opens: int | None = None

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
