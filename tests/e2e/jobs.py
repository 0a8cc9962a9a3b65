"""Running jobs as a user does: the command in a process of its own, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "configs" / "tiny.yaml"


@dataclass
class Job:
    """A `tidegate train` process and what it leaves."""

    process: subprocess.Popen[str]
    output: Path
    mark: str

    @property
    def folder(self) -> Path:
        return self.output / "latest"

    def wait(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and everything printed."""
        text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text

    def descendants(self) -> list[psutil.Process]:
        """All processes of this job, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TIDEGATE_TEST_MARK") == self.mark:
                    found.append(process)
        return found

    def find(self, program: str, argument: str) -> psutil.Process | None:
        """A living process below the driver whose program's name and arguments hold these texts."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    name, *arguments = process.cmdline() or [""]
                    if program in name and any(argument in text for text in (name, *arguments)):
                        return process
        return None

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["kind"] == kind]

    def runs(self) -> str:
        """What `tidegate runs list` prints for the job."""
        command = [sys.executable, "-m", "services.cli", "runs", "list", "--job", str(self.folder), "--limit", "0"]
        environment = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def start(tmp_path: Path, *arguments: str, config: Path = TINY) -> Job:
    """Start a job whose results, Ray session and processes are its own."""
    output = tmp_path / "runs"
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "services.cli", "train", str(config), f"output.dir={output}", *arguments]
    command = ["env", "--default-signal=INT", *command]  # whoever started the tests in the background ignores it
    environment = {**os.environ, "TIDEGATE_TEST_MARK": mark, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return Job(process, output, mark)


def interrupt(job: Job) -> None:
    """What a terminal does on Ctrl-C: SIGINT to the foreground process group."""
    os.killpg(job.process.pid, signal.SIGINT)
