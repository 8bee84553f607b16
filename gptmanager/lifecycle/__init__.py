"""A manager's state, and parts that work even if the manager fails: clock, log, latch, watchdog."""
