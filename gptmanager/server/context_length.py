"""`ContextLength`: whether prompt and output fit into the model's context.

Decides the words of a refusal: clients look for them when they shorten a chat by themselves.
"""

from __future__ import annotations

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError


class ContextLength:
    """The most tokens that prompt and output may have together."""

    def __init__(self, most: int) -> None:
        self._most = most

    def check(
        self, length: int, max_new_tokens: int, *, prompt: str = "prompt", most: str = "max_tokens"
    ) -> None:
        """Check that prompt and output fit; the manager would cut the output silently.

        ApiError 400 names the fields `prompt` and `most`.
        """
        if not length:
            raise ApiError(400, "the prompt is empty, at least 1 token is needed", param=prompt)
        if max_new_tokens < 1:
            raise ApiError(400, f"{most} = {max_new_tokens} must be at least 1", param=most)
        if length >= self._most:
            raise self.exceeded(prompt, f"However, your {prompt} has {length} tokens.")
        if length + max_new_tokens > self._most:
            raise self.exceeded(
                most,
                f"However, you requested {quoted(length + max_new_tokens)} tokens ({length} in the "
                f"{prompt}, {quoted(max_new_tokens)} in the completion). Shorten the {prompt}, or "
                f"lower {most} to at most {self._most - length}.",
            )

    def check_scored(self, length: int) -> None:
        """Check that a prompt of which nothing else is wanted can be scored. ApiError 400."""
        most = self._most - 1
        if length > most:
            raise self.exceeded(
                "prompt", f"However, your prompt has {length} tokens; {most} can be scored at most."
            )

    def exceeded(self, param: str, details: str) -> ApiError:
        """Return the refusal for the field `param`."""
        start = f"This model's maximum context length is {self._most} tokens."
        return ApiError(400, f"{start} {details}", param=param, code="context_length_exceeded")
