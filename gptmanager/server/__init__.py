"""`gptmanager serve`: a manager behind HTTP and gRPC, for clients that exist already.

Importing it needs no extra; `server.main` loads what does when a server is started.
"""
