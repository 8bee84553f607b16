"""From the tokens of a model to text, and back."""
