"""`OutputOptions`: how a request wants its output, and `OutputConfig`: what besides tokens."""

from __future__ import annotations

from typing import NamedTuple


class OutputConfig(NamedTuple):
    """What a request is told besides its tokens. `normalized`: log probabilities, not logits."""

    log_probs: bool = False
    normalized: bool = True
    generation_logits: bool = False
    context_logits: bool = False

    @property
    def asks(self) -> bool:
        """Anything at all."""
        return self.log_probs or self.generation_logits or self.context_logits


NO_EXTRAS = OutputConfig()


class OutputOptions(NamedTuple):
    """`pad_id` fills `output_ids` behind the output. `config`: what is wanted besides tokens."""

    is_streaming: bool = False
    pad_id: int = 0
    exclude_input: bool = False
    config: OutputConfig = NO_EXTRAS
