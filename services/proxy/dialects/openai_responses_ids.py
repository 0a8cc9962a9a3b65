"""Ids and sealed texts that OpenAI Responses' clients keep for us, and give back with the next request."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

from services.proxy.dialects.fields import clean

_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc|ctj|cmp)_([0-9a-f]{24})_[0-9]+")
_RESPONSE_ID = re.compile(r"resp_([A-Za-z0-9][A-Za-z0-9._-]*)")
_REASONING = "tidegate-reasoning-1."
_SUMMARY = "tidegate-summary-1."


def item_id(prefix: str, call_id: str, index: int) -> str:
    """The id of an answer's item. Clients take letters, digits, ``_`` and ``-``, at most 64 of them."""
    return f"{prefix}_{hashlib.sha256(call_id.encode()).hexdigest()[:24]}_{index}"


def turn_of(given: object) -> str:
    """Which answer of ours an item id comes from; empty for any other id."""
    found = _ITEM_ID.fullmatch(given) if isinstance(given, str) else None
    return found.group(1) if found else ""


def response_id(call_id: str) -> str:
    return f"resp_{call_id}"


def call_of(given: str) -> str:
    """The call that a response id names; empty if it is none of ours."""
    found = _RESPONSE_ID.fullmatch(given)
    return found.group(1) if found else ""


def seal_reasoning(text: str) -> str:
    """Reasoning as ``encrypted_content``: opaque to a client, lossless for us."""
    return _seal(_REASONING, text)


def open_reasoning(sealed: object) -> str | None:
    """None: not sealed by us."""
    return _open(_REASONING, sealed)


def seal_summary(text: str) -> str:
    """The summary of a compaction as ``encrypted_content``."""
    return _seal(_SUMMARY, text)


def open_summary(sealed: object) -> str | None:
    """None: not sealed by us."""
    return _open(_SUMMARY, sealed)


def _seal(tag: str, text: str) -> str:
    return tag + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _open(tag: str, sealed: object) -> str | None:
    if not isinstance(sealed, str) or not sealed.startswith(tag):
        return None
    try:
        return clean(base64.b64decode(sealed[len(tag) :].encode(), validate=True).decode("utf-8", "surrogatepass"))
    except (binascii.Error, UnicodeError):
        return None
