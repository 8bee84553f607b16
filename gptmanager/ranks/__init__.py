"""One process a rank: which part of the model each has, and what they tell each other."""
