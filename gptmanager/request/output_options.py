"""`OutputOptions`: how a request's output is sent. `OutputConfig`: which outputs it has."""

from __future__ import annotations

from typing import NamedTuple


class OutputConfig(NamedTuple):
    """The outputs of a request besides its tokens.

    If `normalized` is False, logits are returned in place of log probabilities.
    `num_top_log_probs` is the number of most probable tokens that are returned at each output
    position. `num_prompt_log_probs` is the number of most probable tokens that are returned at
    each prompt position, besides the prompt token itself; -1: no log probabilities of the prompt.
    """

    log_probs: bool = False
    normalized: bool = True
    generation_logits: bool = False
    context_logits: bool = False
    num_top_log_probs: int = 0
    num_prompt_log_probs: int = -1

    @property
    def asks_of_prompt(self) -> bool:
        """Whether outputs of the prompt are requested. The whole prompt must then be computed."""
        return self.context_logits or self.num_prompt_log_probs >= 0

    @property
    def asks(self) -> bool:
        """Whether any output besides tokens is requested."""
        of_output = self.log_probs or self.generation_logits or self.num_top_log_probs > 0
        return of_output or self.asks_of_prompt

    @property
    def without_prompt(self) -> OutputConfig:
        """Return this config without the outputs of the prompt."""
        return self._replace(context_logits=False, num_prompt_log_probs=-1)


NO_EXTRAS = OutputConfig()


class OutputOptions(NamedTuple):
    """How a request's output is sent.

    `pad_id` fills `output_ids` after the end of the output. With `exclude_input`, `output_ids`
    begin after the prompt. `config` has the outputs besides tokens.
    """

    is_streaming: bool = False
    pad_id: int = 0
    exclude_input: bool = False
    config: OutputConfig = NO_EXTRAS
