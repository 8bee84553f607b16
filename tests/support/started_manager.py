"""A manager over a scripted model, and the host that answers it."""

from __future__ import annotations

from loop_driver import next_token
from shorthand import params

from gptmanager import (
    GptManager,
    ModelType,
)
from gptmanager.testing import ScriptedModel

FUSED = ModelType.INFLIGHT_FUSED_BATCHING


def model(script=next_token, **options):
    return ScriptedModel(script, vocab_size=100, max_position_embeddings=128, **options)


def start(host, script=next_token, options=None, **callbacks):
    keywords = {**host.keywords(), **callbacks}
    manager = GptManager(model(script), FUSED, optional_params=options or params(), **keywords)
    host.manager = manager
    return manager
