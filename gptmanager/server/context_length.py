"""`ContextLength`: checks that prompt and output fit into the model's context.

The wording of its errors is fixed: clients match it to shorten a chat automatically.
"""

from __future__ import annotations

from gptmanager.errors import quoted
from gptmanager.server.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from gptmanager.server.http.warning_header import Warnings


class ContextLength:
    """Checks requests against `most`, the maximum number of tokens in prompt and output together.

    `clamps`: if more new tokens are requested than fit, their number is lowered.
    """

    def __init__(self, most: int, *, clamps: bool = False) -> None:
        self._most = most
        self._clamps = clamps

    def clamped(
        self,
        length: int,
        max_new_tokens: int,
        name: str,
        warnings: Warnings,
        *,
        is_forced: bool = False,
    ) -> int:
        """Return the maximum number of new tokens: `max_new_tokens`, or less if it does not fit.

        The number is lowered only with `clamps` or if `is_forced`, and with a warning about the
        field `name`.
        """
        left = max(1, self._most - length)
        if not (self._clamps or is_forced) or max_new_tokens <= left:
            return max_new_tokens
        warnings.add(f"{name} = {quoted(max_new_tokens)} does not fit and is lowered to {left}")
        return left

    def check(
        self, length: int, max_new_tokens: int, *, prompt: str = "prompt", most: str = "max_tokens"
    ) -> None:
        """Raise ApiError (400) if the prompt is empty, or if prompt and output do not fit.

        Without this check the manager would silently shorten the output. `prompt` and `most` are
        the names of the two fields in the error.
        """
        if not length:
            raise ApiError(400, "the prompt is empty: at least 1 token is needed", param=prompt)
        if max_new_tokens < 1:
            raise ApiError(400, f"{most} = {max_new_tokens} must be at least 1", param=most)
        if length >= self._most:
            raise self.exceeded(prompt, f"However, your {prompt} resulted in {length} tokens.")
        if length + max_new_tokens > self._most:
            raise self.exceeded(
                most,
                f"However, you requested {quoted(length + max_new_tokens)} tokens ({length} in the "
                f"{prompt}, {quoted(max_new_tokens)} in the completion). Shorten the {prompt}, or "
                f"lower {most} to at most {self._most - length}.",
            )

    def check_scored(self, length: int) -> None:
        """Check the length of a prompt that is only scored. Raises ApiError (400)."""
        most = self._most - 1
        if length > most:
            raise self.exceeded(
                "prompt",
                f"However, your prompt resulted in {length} tokens; at most {most} can be scored.",
            )

    def check_parts(self, param: str, num_parts: int) -> None:
        """Raise ApiError (400) if messages have more parts than the context has tokens."""
        if num_parts > self._most:
            details = f"However, there are {num_parts} messages, parts or calls in your {param}."
            raise self.exceeded(param, details)

    def exceeded(self, param: str, details: str) -> ApiError:
        """Return the error (400) for the field `param`. Its message is the limit and `details`."""
        start = f"This model's maximum context length is {self._most} tokens."
        return ApiError(400, f"{start} {details}", param=param, code=CONTEXT_LENGTH_EXCEEDED)
