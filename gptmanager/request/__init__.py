"""What is known of a request before it runs."""
