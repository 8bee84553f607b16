"""One process per rank: which part of the model each one has, and the messages between them."""
