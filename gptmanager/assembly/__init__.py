"""From what a host says to what a running loop stands on."""
