"""A loop whose world tells a recorder everything."""

from __future__ import annotations

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.assembly.loop_builder import build_loop
from gptmanager.loop.responses import MakeFinal, final_tensors
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.recorder.recorder import Recorder, RecordingExecutor, RecordingHost
from gptmanager.statistics import PhaseTimes
from gptmanager.step import Executor, Host


def build_recorded_loop(
    blueprint: Blueprint,
    host: Host,
    executor: Executor,
    recorder: Recorder,
    *,
    phase_times: PhaseTimes,
    final: MakeFinal = final_tensors,
) -> TokenLoop:
    """As `build_loop`, with `recorder` between the loop and its world, if it is on."""
    if not recorder.is_on:
        return build_loop(blueprint, host, executor, phase_times=phase_times, final=final)
    loop = build_loop(
        blueprint,
        RecordingHost(host, recorder),
        RecordingExecutor(executor, recorder),
        phase_times=phase_times,
        final=final,
    )
    recorder.start(loop, blueprint)
    return loop
