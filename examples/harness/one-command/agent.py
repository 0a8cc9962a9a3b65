#!/usr/bin/env python3
"""A harness of one's own: one question, one bash command, done.

usage: agent.py INSTRUCTION_FILE
It asks the model for a command, with three examples as turns of the conversation before it, and runs the first bash
block of the answer in the workspace. Environment: BASE_URL (without /v1), API_KEY, MODEL. Only the standard library.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SYSTEM = "You are a bash terminal. Write only bash code blocks."
EXAMPLES = (
    ("Create a file named fruit.txt that contains the word apple.", "echo apple > fruit.txt"),
    ("Add the line sun to the end of the file sky.txt.", "echo sun >> sky.txt"),
    ("Rename the file lion.txt to bear.txt.", "mv lion.txt bear.txt"),
)
COMMAND = re.compile(r"```(?:bash|sh)?[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
COMMAND_TIMEOUT_S = 20
PAUSES_S = (1, 2, 4, 8, 16)
"""Before a request is made again. Half a minute in all: a proxy whose only replica died is back by then."""


def conversation(instruction: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    for question, command in EXAMPLES:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"```bash\n{command}\n```"})
    return [*messages, {"role": "user", "content": instruction}]


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        f"{os.environ['BASE_URL']}/v1/chat/completions",
        data=json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['API_KEY']}", "Content-Type": "application/json"},
    )
    return fetch(request)["choices"][0]["message"]["content"] or ""


def fetch(request: urllib.request.Request) -> dict:
    """The answer to a request. One that is lost or refused for now is made again, unchanged: it is the same call."""

    def once() -> dict:
        with urllib.request.urlopen(request, timeout=300) as response:
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
    answer = ask(conversation(Path(sys.argv[1]).read_text(encoding="utf-8").strip()))
    if block := COMMAND.search(answer):
        # a command that fails is the model's mistake, not the harness's: the verifier looks at what it left
        environment = {name: value for name, value in os.environ.items() if name not in ("API_KEY", "BASE_URL")}
        subprocess.run(["bash", "-c", block[1]], timeout=COMMAND_TIMEOUT_S, env=environment, check=False)


if __name__ == "__main__":
    main()
