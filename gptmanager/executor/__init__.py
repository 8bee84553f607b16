"""Runs one step: writes its inputs to tables, computes the logits, and chooses the tokens."""
