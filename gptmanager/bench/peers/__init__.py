"""Other libraries on the same load."""
