"""From logits to tokens, and from tokens to the end of a request."""
