"""Chats in any protocol: messages become a prompt, and an answer becomes a message."""
