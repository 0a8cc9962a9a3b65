"""The keys of attempts: what a harness must show to make calls of its run."""

from __future__ import annotations

import hashlib
import hmac


def key_of(secret: bytes, run_id: str, attempt: int) -> str:
    """The key of an attempt: 128 bits that only who has the job's secret can make, and makes again."""
    code = hmac.new(secret, f"{run_id}/{attempt}".encode(), hashlib.sha256).hexdigest()
    return f"{run_id}.{code[:32]}"


def hash_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def is_hash_of(kept: bytes, key: str) -> bool:
    """Whether a key is the one of which a hash is kept; takes the same time for any other."""
    return hmac.compare_digest(kept, hash_of(key))
