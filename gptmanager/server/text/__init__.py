"""From the fields of a request to its answer as text; shared by all protocols."""
