"""One step on a device."""
