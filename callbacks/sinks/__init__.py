"""Sinks for statistics: log records, lines of JSON, and Prometheus."""
