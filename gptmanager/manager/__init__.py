"""`GptManager`: the thread that runs a token loop, its life cycle, and questions about the loop."""
