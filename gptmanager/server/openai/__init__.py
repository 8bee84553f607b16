"""The front for clients of OpenAI's API: completions and chats."""
