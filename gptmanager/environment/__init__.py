"""What the library runs in: its distribution, modules that load late, limits of the machine."""
