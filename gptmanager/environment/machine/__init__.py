"""The machine: its cores, memory, processor, addresses and models."""
