"""The environment of the library: its distribution, late imports, limits of the machine."""
