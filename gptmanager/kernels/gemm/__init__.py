"""The matmul of tokens with a packed matrix, in float and quantized dtypes."""
