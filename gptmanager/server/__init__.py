"""`gptmanager serve`: serves a manager over HTTP and gRPC to clients of OpenAI's and Triton's APIs.

This package can be imported without its extras; `server.main` loads them when a server starts.
"""
