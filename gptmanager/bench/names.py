"""Values that arguments of benchmarks may have: shapes of random models, parts of `bench e2e`."""

SHAPE_NAMES = ("small", "qwen2-0.5b")
PARTS = ("check", "steps", "load", "transformers", "saturated", "pressure")
