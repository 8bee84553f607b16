"""LoRA adapters on a step's tokens."""
