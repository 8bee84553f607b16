"""`gptmanager serve`: serves a manager over the APIs of OpenAI, Anthropic and Triton.

This package can be imported without its extras; `server.main` loads them when a server starts.
"""
