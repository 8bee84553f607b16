"""Ready-made callbacks: what any host could have written on the public contract, written once.

`generate` is the three-line start; `RequestQueue` turns the four callbacks into futures and token
streams; the sinks keep or show the statistics.
"""

from gptmanager.callbacks.checkpoint import TokenDefaults, load_tokenizer
from gptmanager.callbacks.generation import Generation
from gptmanager.callbacks.json_lines_sink import JsonLinesSink
from gptmanager.callbacks.logging_sink import LoggingSink
from gptmanager.callbacks.observers import fan_out
from gptmanager.callbacks.request_queue import RequestQueue
from gptmanager.callbacks.result import GenerationResult
from gptmanager.callbacks.start import generate
from gptmanager.callbacks.text_stream import TextStream

__all__ = [
    "Generation",
    "GenerationResult",
    "JsonLinesSink",
    "LoggingSink",
    "RequestQueue",
    "TextStream",
    "TokenDefaults",
    "fan_out",
    "generate",
    "load_tokenizer",
]
