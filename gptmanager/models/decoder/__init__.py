"""The forward pass of the decoder that a `ModelSpec` describes."""
