"""LoRA adapters for a step's tokens."""
