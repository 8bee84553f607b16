"""A manager's state, and what must work to its last breath: clock, log, latch, watchdog."""
