"""`HostTimers`: how long each call into code of the host takes."""

from __future__ import annotations

from gptmanager.lifecycle.watchdog import CallbackTimer


class HostTimers:
    """The timers of all calls into a host's code.

    `all`: in the order of the statistics; the loop's scheduler is last.
    """

    def __init__(self) -> None:
        self.get = CallbackTimer("GetInferenceRequests")
        self.send = CallbackTimer("SendResponse")
        self.poll = CallbackTimer("PollStopSignal")
        self.stats = CallbackTimer("ReturnBatchManagerStats")
        self.processor = CallbackTimer("LogitsPostProcessor")
        self.prepare = CallbackTimer("LogitsPostProcessor.prepare")
        self.all = [self.get, self.send, self.poll, self.stats, self.processor, self.prepare]
