"""Names that arguments of benchmarks may have."""

SHAPE_NAMES = ("small", "qwen2-0.5b")
PARTS = ("check", "steps", "load", "transformers", "saturated", "pressure")
