"""Bodies, keys, responses and connections of HTTP."""
