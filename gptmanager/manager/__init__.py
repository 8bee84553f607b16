"""`GptManager`: its life cycle, the thread of its token loop, and questions about the loop."""
