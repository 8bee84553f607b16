"""From the messages of a chat to a prompt, and from an answer to a message."""
