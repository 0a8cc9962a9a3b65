"""Attempts of runs that are scored by something else than their task's verifier."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.runner import run_attempt
from services.rollout.scoring.config import ScoringConfig
from services.rollout.scoring.evaluate import ScoringSetup
from services.rollout.tasks import load_task
from services.rollout.types import RunResult, RunSpec

SANDBOX = SandboxConfig(memory_bytes=256 << 20, max_processes=32, workspace_bytes=8 << 20)
WORK = "cat seed.txt > answer.txt; echo more >> seed.txt; echo 'I did it.'"


@dataclass
class Job:
    """A job's folder with one task, and one harness that makes some work."""

    folder: Path
    command: str = WORK
    api_key: str = ""

    def spec(self, run_id: str = "g000000-r0") -> RunSpec:
        task = self.folder / "task"
        files = task / "environment" / "files"
        files.mkdir(parents=True, exist_ok=True)
        (files / "seed.txt").write_text("seed\n")
        (task / "instruction.md").write_text("Copy the seed.")
        (task / "task.toml").write_text("")
        loaded = load_task(task, needs_verifier=False)
        run_dir = self.folder / "attempts" / f"{run_id}-a0"
        return RunSpec(run_id, 0, loaded, "http://127.0.0.1:1/job/run/key", "key", "policy", str(run_dir))

    @property
    def run_dir(self) -> Path:
        return Path(self.spec().run_dir)

    def harness(self) -> HarnessConfig:
        return HarnessConfig(command=("bash", "-c", self.command), timeout_s=30)

    def setup(self, config: ScoringConfig) -> ScoringSetup:
        return ScoringSetup(config, str(self.folder), self.api_key)

    def score(
        self, config: ScoringConfig, run_id: str = "g000000-r0", cancel: threading.Event | None = None
    ) -> RunResult:
        """Execute and score one attempt. The job keeps its workspaces."""
        return run_attempt(self.spec(run_id), self.harness(), SANDBOX, cancel, scoring=self.setup(config))


@dataclass
class Judge:
    """A server that answers chat completions as it is told, one answer a request, the last one for ever."""

    url: str = ""
    answers: list[Any] = field(default_factory=list)
    """A text; a (status, headers) pair; or a function that gets the handler and answers by itself."""
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 1000, "completion_tokens": 100})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    asked_at_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, handler: BaseHTTPRequestHandler) -> Any:
        """Take a request in; the answer that is due."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.keys.append(handler.headers.get("Authorization", ""))
            self.asked_at_s.append(time.monotonic())
            return self.answers[min(len(self.bodies), len(self.answers)) - 1]


@contextmanager
def judge_server() -> Iterator[Judge]:
    judge = Judge()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = judge.note(self)
            if isinstance(answer, Callable):
                answer(self)
                return
            status, headers = answer if isinstance(answer, tuple) else (200, {})
            reply: dict[str, Any] = {"error": {"message": "not now"}}
            if status == 200:
                reply = {"choices": [{"message": {"content": answer}}], "usage": judge.usage}
            data = json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield judge
    server.shutdown()
    server.server_close()
    thread.join()
