"""The end-to-end benchmark on a device, part by part."""
