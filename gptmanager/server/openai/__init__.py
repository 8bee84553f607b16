"""What clients of OpenAI's API know: completions and chats."""
