"""`gptmanager serve`: a manager behind HTTP and gRPC, for clients that exist already.

Importing it needs no extra; `add_command` loads what does when a server is started.
"""

from gptmanager.server.command import add_command

__all__ = ["add_command"]
