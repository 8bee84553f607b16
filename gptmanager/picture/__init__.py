"""A schedule, seen: traces of what ran when, drawn as SVG, a page to zoom into, or for Perfetto."""

from gptmanager.picture.chrome_trace import chrome_trace
from gptmanager.picture.command import add_command
from gptmanager.picture.drawing import draw
from gptmanager.picture.observer import observe
from gptmanager.picture.page import page
from gptmanager.picture.recorded import trace_of
from gptmanager.picture.trace import Trace

__all__ = ["Trace", "add_command", "chrome_trace", "draw", "observe", "page", "trace_of"]
