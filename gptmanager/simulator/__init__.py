"""A schedule without a model: the real loop under a virtual clock and a model of step costs."""

from gptmanager.simulator.command import add_command
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
    "add_command",
    "fit",
    "hypothetical",
    "simulate",
    "variant",
]
