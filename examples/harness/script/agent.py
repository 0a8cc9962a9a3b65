#!/usr/bin/env python3
"""The smallest harness: one chat completion for the task's instruction; the answer goes to answer.txt.

usage: agent.py INSTRUCTION_FILE
Environment: BASE_URL (without /v1), API_KEY, MODEL, and optionally MAX_TOKENS and TIMEOUT_S. Only the standard library.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path


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
    with urllib.request.urlopen(request, timeout=float(os.environ.get("TIMEOUT_S", "300"))) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def main() -> None:
    instruction = Path(sys.argv[1]).read_text(encoding="utf-8").strip()
    Path("answer.txt").write_text(ask(instruction), encoding="utf-8")


if __name__ == "__main__":
    main()
