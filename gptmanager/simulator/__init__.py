"""Simulated runs of the real loop: a virtual clock, and estimated step costs for an LLM."""

from typing import TYPE_CHECKING

from gptmanager.environment.lazy_names import lazy_names

if TYPE_CHECKING:
    from gptmanager.simulator.comparison import Machine, hypothetical, variant
    from gptmanager.simulator.cost_model import CostModel, fit
    from gptmanager.simulator.figures import Figures
    from gptmanager.simulator.load import Load, RecordedLoad, SyntheticLoad
    from gptmanager.simulator.simulation import World, simulate

__all__ = [
    "CostModel",
    "Figures",
    "Load",
    "Machine",
    "RecordedLoad",
    "SyntheticLoad",
    "World",
    "fit",
    "hypothetical",
    "simulate",
    "variant",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gptmanager.simulator.comparison": ("Machine", "hypothetical", "variant"),
        "gptmanager.simulator.cost_model": ("CostModel", "fit"),
        "gptmanager.simulator.figures": ("Figures",),
        "gptmanager.simulator.load": ("Load", "RecordedLoad", "SyntheticLoad"),
        "gptmanager.simulator.simulation": ("World", "simulate"),
    },
)
