"""Adapters that PEFT saved."""
