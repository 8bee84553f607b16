"""The environment of the library: its distribution, lazy imports, and limits of the machine."""
