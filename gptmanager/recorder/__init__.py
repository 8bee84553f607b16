"""Recordings of everything that passes between a loop, its host and its executor."""

from gptmanager.recorder.recorder import (
    Recorder,
    RecordingExecutor,
    RecordingHost,
    build_recorded_loop,
)
from gptmanager.recorder.recording_file import Recording, read_recording

__all__ = [
    "Recorder",
    "Recording",
    "RecordingExecutor",
    "RecordingHost",
    "build_recorded_loop",
    "read_recording",
]
