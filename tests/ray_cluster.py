"""Ray clusters of a test's own."""

from __future__ import annotations

from typing import Any

import ray


def start_ray(**options: Any) -> Any:
    """``ray.init``, tried once more if the node was not up in time.

    Ray gives a node 30 s, which a machine that runs other tests can miss once.
    """
    try:
        return ray.init(**options)
    except Exception as error:  # Ray has no narrower one for a node that was late
        ray.shutdown()
        if "timed out during startup" not in str(error).lower():
            raise
    return ray.init(**options)
