"""`OutputOptions`: how a request wants its output."""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.request.llm_request import NO_EXTRAS, OutputConfig


class OutputOptions(NamedTuple):
    """`pad_id` fills `output_ids` behind the output. `config`: what is wanted besides tokens."""

    is_streaming: bool = False
    pad_id: int = 0
    exclude_input: bool = False
    config: OutputConfig = NO_EXTRAS
