#!/usr/bin/env python3
"""The smallest harness: one chat completion for the task's instruction; the answer goes to answer.txt.

usage: agent.py INSTRUCTION_FILE
Environment: BASE_URL (without /v1), API_KEY, MODEL, and optionally MAX_TOKENS and TIMEOUT_S. Only the standard library.
"""

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PAUSES_S = (1, 2, 4, 8, 16)
"""Before a request is made again. Half a minute in all: a proxy whose only replica died is back by then."""


def ask(instruction: str) -> str:
    """The model's answer to one user message."""
    body = {
        "model": os.environ["MODEL"],
        "messages": [{"role": "user", "content": instruction}],
        "max_tokens": int(os.environ.get("MAX_TOKENS", "64")),
    }
    request = urllib.request.Request(
        f"{os.environ['BASE_URL']}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {os.environ['API_KEY']}", "Content-Type": "application/json"},
    )
    answer = fetch(request, float(os.environ.get("TIMEOUT_S", "300")))
    return answer["choices"][0]["message"]["content"] or ""


def fetch(request: urllib.request.Request, timeout_s: float) -> dict:
    """The answer to a request. One that is lost or refused for now is made again, unchanged: it is the same call."""

    def once() -> dict:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)

    for pause_s in PAUSES_S:
        try:
            return once()
        except urllib.error.HTTPError as error:
            if error.code != 429 and error.code < 500:
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(pause_s)
    return once()


def main() -> None:
    instruction = Path(sys.argv[1]).read_text(encoding="utf-8").strip()
    Path("answer.txt").write_text(ask(instruction), encoding="utf-8")


if __name__ == "__main__":
    main()
