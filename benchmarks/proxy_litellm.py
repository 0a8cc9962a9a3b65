"""LiteLLM's proxy for the proxy benchmark, in an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.proxy_load import free_port

REQUIREMENT = "litellm[proxy]==1.108.7"
"""The newest release all parts of which can be had from PyPI."""
KEY = "sk-" + secrets.token_hex(32)
"""LiteLLM does not start without a master key."""
_START_TIMEOUT_S = 180.0
_SETTINGS = {
    "LITELLM_MASTER_KEY": KEY,
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # its prices, which it would ask GitHub for
}


def environment(cache_dir: Path) -> Path:
    """The folder of LiteLLM's environment, made if it is not there (750 MB, a minute or two)."""
    folder = cache_dir / REQUIREMENT.replace("[", "-").replace("]", "").replace("==", "-")
    installed = folder / ".installed"
    if not installed.is_file():
        print(f"installing {REQUIREMENT} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", REQUIREMENT]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"LiteLLM cannot be installed: {done.stderr[-2000:]}")
        installed.touch()
    return folder


@contextlib.contextmanager
def serving(folder: Path, model_name: str, upstream_port: int, scratch: Path) -> Iterator[int]:
    """LiteLLM's proxy with one worker in front of the upstream, without database, logging or limits; its port."""
    config = scratch / "litellm.yaml"
    model = {"model": f"openai/{model_name}", "api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": model_name, "litellm_params": model}]}))
    port = free_port()
    command = [str(folder / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    log_file = scratch / "litellm.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, env={**kept, **_SETTINGS}, stdout=log, stderr=log)
    try:
        _await_answer(f"http://127.0.0.1:{port}/health/liveliness", process, log_file)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _await_answer(url: str, process: subprocess.Popen[Any], log_file: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"LiteLLM did not start:\n{log_file.read_text()[-2000:]}")
