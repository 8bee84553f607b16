"""Every error the library raises or sends, in one tree.

The class tells who is to blame: the configuration, one request, a scheduler, a callback, or a
manager that is no longer there. An error response begins with the class's name, so that a host
can tell them apart without parsing the text.
"""

from __future__ import annotations


class GptManagerError(Exception):
    """The root of the tree."""


class ConfigError(GptManagerError, ValueError):
    """A checkpoint or an option that cannot work: raised where the manager is constructed."""


class RequestError(GptManagerError):
    """Something is wrong with one request; every other request goes on."""


class InvalidRequestError(RequestError):
    """A tensor of the request is unknown, missing, misshapen, or out of its range."""


class DuplicateRequestIdError(RequestError):
    """The id belongs to a request that has not had its final response yet."""


class CapacityError(RequestError):
    """The request needs more than the KV cache holds, or `max_waiting_requests` wait already."""


class AdapterError(RequestError):
    """A LoRA adapter is not cached, does not fit, or does not match the model."""


class LogitsError(RequestError):
    """No token can be chosen: the logits of a row hold NaN or +inf, or everything is banned."""


class SchedulerError(GptManagerError):
    """A scheduler raised, or returned requests that it must not return."""


class CallbackError(GptManagerError):
    """A callback of the host raised, or returned what its contract does not allow."""


class StepError(GptManagerError):
    """An iteration of the loop failed and ended the requests that ran in it; the others go on."""


class ManagerDeadError(GptManagerError):
    """The manager's loop has ended; `__cause__` holds what ended it."""


class RankError(GptManagerError):
    """A rank has died, hangs, differs from the others, or went another way than they."""


class RecordingError(GptManagerError, ValueError):
    """A recording cannot be written, read, or understood, or contradicts itself."""


def response_text(error: BaseException) -> str:
    """The text of an error response: the class's name, then what is wrong."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:  # noqa: B036 - an error whose own text fails must still be told
        return f"{name}: (its text cannot be read)"
