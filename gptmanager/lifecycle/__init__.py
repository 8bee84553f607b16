"""The state of a manager, and what must work even when it fails: clock, log, latch, watchdog."""
