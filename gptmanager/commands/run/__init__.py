"""`gptmanager run`: runs a file of requests, and shows them live."""
