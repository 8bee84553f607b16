"""LoRA adapters in the format of PEFT."""
