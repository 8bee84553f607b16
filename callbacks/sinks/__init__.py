"""Where statistics go: log records, lines of JSON, Prometheus."""
