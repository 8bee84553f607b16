"""The endpoints of OpenAI's API: completions, chats, responses, models, tokens."""
