"""Wire formats. Each module is the single place where one protocol lives: requests in, answers and errors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from services.common.errors import RequestError
from services.proxy.types import CanonicalRequest, Choice, Delta, Usage


class RefusalKind(StrEnum):
    """Why a request gets an error instead of an answer. Each dialect has its own words and status for each."""

    INVALID_REQUEST = "invalid_request"
    INVALID_KEY = "invalid_key"
    CONTEXT_LENGTH = "context_length"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TIMEOUT = "body_timeout"
    """The body did not arrive in time: clients try again by themselves."""
    TURN_LIMIT = "turn_limit"
    """The run has made all its calls: final, so nothing that a client tries again."""
    RATE_LIMITED = "rate_limited"
    """Too much at once: to be tried again later."""
    OVERLOADED = "overloaded"
    """Lost on our side: the same request may work in a moment."""
    SERVER_ERROR = "server_error"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"


RETRIED = frozenset({RefusalKind.RATE_LIMITED, RefusalKind.OVERLOADED})
"""Refusals that carry ``retry-after``."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What befell a request, in no dialect's words."""

    kind: RefusalKind
    message: str = ""
    """Of INVALID_REQUEST: what is wrong with it. Else empty, or a detail for people."""
    param: str = ""
    """Of INVALID_REQUEST: the field."""
    code: str = ""
    """Of INVALID_REQUEST: OpenAI's code for it."""
    num_prompt_tokens: int = 0
    max_model_len: int = 0
    max_body_bytes: int = 0


class InvalidRequestError(RequestError):
    """A body that its dialect does not take."""

    def __init__(self, message: str, *, param: str = "", code: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status

    def __reduce__(self) -> tuple[Callable[..., InvalidRequestError], tuple[str, str, str, int]]:
        return _invalid_request, (self.message, self.param, self.code, self.status)

    @property
    def refusal(self) -> Refusal:
        """It in no dialect's words."""
        kind = RefusalKind.NOT_FOUND if self.status == 404 else RefusalKind.INVALID_REQUEST
        return Refusal(kind, self.message, self.param, self.code)


def _invalid_request(message: str, param: str, code: str, status: int) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code, status=status)


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    call_id: str
    created_s: int
    """Unix time, seconds."""
    request: CanonicalRequest


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error in a dialect's own form."""

    status: int
    """HTTP."""
    body: dict[str, Any]
    """JSON-ready."""


class AnswerStream(Protocol):
    """The events of one streamed answer, as text of server-sent events. Has state: which block is open."""

    def begin(self, usage: Usage) -> str:
        """The first events. ``usage``: the prompt's tokens; no output yet."""
        ...

    def delta(self, choice: int, delta: Delta) -> str:
        """The events of a piece of the answer ``choice``."""
        ...

    def end(self, choices: Sequence[Choice], usage: Usage) -> str:
        """The last events. The choices are whole: what was sent as deltas is their beginning and their end."""
        ...


class Dialect(Protocol):
    """One wire format. Modules of this package have an instance each; no instance has state."""

    @property
    def name(self) -> str:
        """Recorded with each call: openai_chat, openai_responses, anthropic."""
        ...

    @property
    def keep_alive(self) -> str:
        """What a silent stream carries: clients skip it."""
        ...

    def parse(self, body: Any, headers: Mapping[str, str]) -> CanonicalRequest:
        """A JSON body in canonical form; header names are in lower case. Raises ``InvalidRequestError``."""
        ...

    def body(self, head: Head, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The JSON body of an answer that is not streamed."""
        ...

    def stream(self, head: Head) -> AnswerStream:
        """The events of an answer that is."""
        ...

    def error(self, refusal: Refusal) -> ErrorAnswer:
        """An error, in the words that make this dialect's clients do the right thing."""
        ...


def sse(data: str, event: str = "") -> str:
    """One server-sent event."""
    return f"event: {event}\ndata: {data}\n\n" if event else f"data: {data}\n\n"
