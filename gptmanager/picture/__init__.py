"""Pictures of schedules: traces drawn as SVG, as a zoomable HTML page, or exported to Perfetto."""

from typing import TYPE_CHECKING

from gptmanager.environment.lazy_names import lazy_names

if TYPE_CHECKING:
    from gptmanager.picture.drawing import draw
    from gptmanager.picture.observer import observe
    from gptmanager.picture.perfetto import chrome_trace
    from gptmanager.picture.recorded import trace_of
    from gptmanager.picture.trace import Trace
    from gptmanager.picture.zoom_page import page

__all__ = ["Trace", "chrome_trace", "draw", "observe", "page", "trace_of"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gptmanager.picture.perfetto": ("chrome_trace",),
        "gptmanager.picture.drawing": ("draw",),
        "gptmanager.picture.observer": ("observe",),
        "gptmanager.picture.zoom_page": ("page",),
        "gptmanager.picture.recorded": ("trace_of",),
        "gptmanager.picture.trace": ("Trace",),
    },
)
