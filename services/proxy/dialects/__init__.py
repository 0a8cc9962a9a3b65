"""Wire formats. Each module is the single place where one protocol lives: requests in, answers and errors out."""

from __future__ import annotations

from typing import Any

from services.common.errors import RequestError


class DialectError(RequestError):
    """A request that gets an error answer in its dialect's own form."""

    def __init__(self, status: int, body: dict[str, Any], message: str) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status code."""
        self.body = body
        """JSON-ready body, worded as the dialect's vendor words it."""

    def __reduce__(self) -> tuple[type[DialectError], tuple[int, dict[str, Any], str]]:
        return type(self), (self.status, self.body, self.message)
