"""One process per rank: the part of the model in each process, and messages between processes."""
