"""Shared by the commands: arguments, tables, progress bars, and text that is safe to show."""
