"""Fields of a request and its answer as text, shared by all protocols."""
