"""Ready-made callbacks and helpers for hosts.

`generate` completes prompts in three lines. `RequestQueue` (or `AsyncRequestQueue` in asyncio)
provides futures and token streams instead of callbacks. `load_peft_adapter` reads a LoRA adapter,
`ChatTemplate` renders chats, and `TextStream` decodes tokens. The sinks store or export what a
manager does, and `LivePage` displays it. The classes with a method `bind` create logits
post-processors for requests.
"""

from typing import TYPE_CHECKING

from gptmanager.environment.lazy_names import lazy_names

if TYPE_CHECKING:
    from gptmanager.callbacks.adapters.peft_adapter import load_peft_adapter
    from gptmanager.callbacks.live_page.page_server import LivePage
    from gptmanager.callbacks.processors.banned_texts import BannedTexts
    from gptmanager.callbacks.processors.forced_prefix import ForcedPrefix
    from gptmanager.callbacks.processors.guided_decoding import load_guided_decoding
    from gptmanager.callbacks.processors.temperature_schedule import TemperatureSchedule
    from gptmanager.callbacks.processors.token_rules import AllowedTokens, BannedTokens, TokenBias
    from gptmanager.callbacks.processors.watermark import Watermark
    from gptmanager.callbacks.queue.async_request_queue import AsyncRequestQueue
    from gptmanager.callbacks.queue.generation import Generation, GenerationPart
    from gptmanager.callbacks.queue.request_queue import RequestQueue
    from gptmanager.callbacks.queue.result import GenerationResult
    from gptmanager.callbacks.ranks.broadcast import broadcast
    from gptmanager.callbacks.sinks.json_lines import JsonLinesSink
    from gptmanager.callbacks.sinks.logging import LoggingSink
    from gptmanager.callbacks.sinks.observers import fan_out
    from gptmanager.callbacks.sinks.prometheus import PrometheusSink
    from gptmanager.callbacks.start import generate
    from gptmanager.callbacks.text.chat_template import ChatTemplate
    from gptmanager.callbacks.text.checkpoint import TokenDefaults, load_tokenizer
    from gptmanager.callbacks.text.text_stream import TextStream

__all__ = [
    "AllowedTokens",
    "BannedTexts",
    "AsyncRequestQueue",
    "BannedTokens",
    "ChatTemplate",
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gptmanager.callbacks.adapters.peft_adapter": ("load_peft_adapter",),
        "gptmanager.callbacks.live_page.page_server": ("LivePage",),
        "gptmanager.callbacks.processors.banned_texts": ("BannedTexts",),
        "gptmanager.callbacks.processors.forced_prefix": ("ForcedPrefix",),
        "gptmanager.callbacks.processors.guided_decoding": ("load_guided_decoding",),
        "gptmanager.callbacks.processors.temperature_schedule": ("TemperatureSchedule",),
        "gptmanager.callbacks.processors.token_rules": (
            "AllowedTokens",
            "BannedTokens",
            "TokenBias",
        ),
        "gptmanager.callbacks.processors.watermark": ("Watermark",),
        "gptmanager.callbacks.queue.async_request_queue": ("AsyncRequestQueue",),
        "gptmanager.callbacks.queue.generation": (
            "Generation",
            "GenerationPart",
        ),
        "gptmanager.callbacks.queue.request_queue": ("RequestQueue",),
        "gptmanager.callbacks.queue.result": ("GenerationResult",),
        "gptmanager.callbacks.ranks.broadcast": ("broadcast",),
        "gptmanager.callbacks.sinks.json_lines": ("JsonLinesSink",),
        "gptmanager.callbacks.sinks.logging": ("LoggingSink",),
        "gptmanager.callbacks.sinks.observers": ("fan_out",),
        "gptmanager.callbacks.sinks.prometheus": ("PrometheusSink",),
        "gptmanager.callbacks.start": ("generate",),
        "gptmanager.callbacks.text.chat_template": ("ChatTemplate",),
        "gptmanager.callbacks.text.checkpoint": (
            "TokenDefaults",
            "load_tokenizer",
        ),
        "gptmanager.callbacks.text.text_stream": ("TextStream",),
    },
)
