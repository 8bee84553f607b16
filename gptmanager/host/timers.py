"""`HostTimers`: measures how long calls of the host's code take."""

from __future__ import annotations

from gptmanager.lifecycle.watchdog import CallbackTimer


class HostTimers:
    """The timers of all calls into the host's code.

    `all` has the timers in the order of the statistics. A loop appends its scheduler's timer.
    """

    def __init__(self) -> None:
        self.get = CallbackTimer("GetInferenceRequests")
        self.send = CallbackTimer("SendResponse")
        self.poll = CallbackTimer("PollStopSignal")
        self.stats = CallbackTimer("ReturnBatchManagerStats")
        self.processor = CallbackTimer("LogitsPostProcessor")
        self.prepare = CallbackTimer("LogitsPostProcessor.prepare")
        self.all = [self.get, self.send, self.poll, self.stats, self.processor, self.prepare]
