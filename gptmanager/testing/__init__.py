"""Tools for tests of hosts and schedulers: models without weights, and checks of contracts."""

from gptmanager.testing.conformance import (
    ConformanceReport,
    Violation,
    assert_conforms,
    check_scheduler,
)
from gptmanager.testing.contract import ContractChecker, ContractViolation
from gptmanager.testing.hosts import RecordingCallbacks, Response, ScriptedModel, ScriptedSpec
from gptmanager.testing.rules import RULES
from gptmanager.testing.scenarios import PlannedRequest, Scenario, random_scenario
from gptmanager.testing.scripted_executor import NextToken, ScriptedExecutor

__all__ = [
    "ConformanceReport",
    "ContractChecker",
    "ContractViolation",
    "NextToken",
    "PlannedRequest",
    "RULES",
    "RecordingCallbacks",
    "Response",
    "Scenario",
    "ScriptedExecutor",
    "ScriptedModel",
    "ScriptedSpec",
    "Violation",
    "assert_conforms",
    "check_scheduler",
    "random_scenario",
]
