"""For hosts' and researchers' own tests: what stands in for a model, and what checks contracts."""

from gptmanager.scripted import NextToken, ScriptedExecutor
from gptmanager.testing.hosts import (
    ContractChecker,
    ContractViolation,
    RecordingCallbacks,
    Response,
    ScriptedModel,
    ScriptedSpec,
)

__all__ = [
    "ContractChecker",
    "ContractViolation",
    "NextToken",
    "RecordingCallbacks",
    "Response",
    "ScriptedExecutor",
    "ScriptedModel",
    "ScriptedSpec",
]
