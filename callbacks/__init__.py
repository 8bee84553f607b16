"""Ready-made callbacks: any host could have written them on the public contract.

`generate` is the three-line start. `RequestQueue` turns the callbacks into futures and token
streams. `load_peft_adapter` reads an adapter. The sinks keep or show the statistics. The rest are
logits post-processors.
"""

from gptmanager.callbacks.async_request_queue import AsyncRequestQueue
from gptmanager.callbacks.banned_texts import BannedTexts
from gptmanager.callbacks.broadcast import broadcast
from gptmanager.callbacks.checkpoint import TokenDefaults, load_tokenizer
from gptmanager.callbacks.forced_prefix import ForcedPrefix
from gptmanager.callbacks.generation import Generation, GenerationPart
from gptmanager.callbacks.guided_decoding import load_guided_decoding
from gptmanager.callbacks.json_lines_sink import JsonLinesSink
from gptmanager.callbacks.live_page import LivePage
from gptmanager.callbacks.logging_sink import LoggingSink
from gptmanager.callbacks.observers import fan_out
from gptmanager.callbacks.peft_adapter import load_peft_adapter
from gptmanager.callbacks.prometheus_sink import PrometheusSink
from gptmanager.callbacks.request_queue import RequestQueue
from gptmanager.callbacks.result import GenerationResult
from gptmanager.callbacks.start import generate
from gptmanager.callbacks.temperature_schedule import TemperatureSchedule
from gptmanager.callbacks.text_stream import TextStream
from gptmanager.callbacks.token_rules import AllowedTokens, BannedTokens, TokenBias
from gptmanager.callbacks.watermark import Watermark

__all__ = [
    "AllowedTokens",
    "BannedTexts",
    "AsyncRequestQueue",
    "BannedTokens",
    "ForcedPrefix",
    "Generation",
    "GenerationPart",
    "GenerationResult",
    "JsonLinesSink",
    "LivePage",
    "LoggingSink",
    "PrometheusSink",
    "RequestQueue",
    "TemperatureSchedule",
    "TextStream",
    "TokenBias",
    "TokenDefaults",
    "Watermark",
    "broadcast",
    "fan_out",
    "generate",
    "load_guided_decoding",
    "load_peft_adapter",
    "load_tokenizer",
]
