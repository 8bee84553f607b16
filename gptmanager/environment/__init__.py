"""The installed package: its version, how it is imported, and what it runs on."""
