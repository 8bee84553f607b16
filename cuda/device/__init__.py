"""Devices, compilers, streams and graphs: what every launch needs."""
