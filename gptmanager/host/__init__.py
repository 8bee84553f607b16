"""The four callbacks of a host, called safely."""
