"""HTTP of the server: connections, keys, request bodies and responses."""
