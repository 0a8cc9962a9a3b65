"""Real runs, with real harness and verifier processes in real sandboxes. How they can end: see test_outcomes."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.rollout.actor import Runner
from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.harness import harness_dir
from services.rollout.processes import pids_with_mark
from services.rollout.runner import run_attempt
from services.rollout.scoring.base import ScoredRunView
from services.rollout.scoring.evaluate import BY_TASKS, evaluate
from services.rollout.tasks import load_task, load_task_set
from services.rollout.types import RunResult, RunSpec, Task
from services.rollout.workspaces import remove_tree
from services.trajectory.outcome import Outcome
from tests.waiting import until, wait_until

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT_HARNESS = HarnessConfig(
    command=("python3", "/config/agent.py", "{instruction_file}"),
    config_dir=str(PROJECT / "examples" / "harness" / "script"),
    env={"BASE_URL": "{base_url}", "API_KEY": "{api_key}", "MODEL": "{model}", "MAX_TOKENS": "8"},
    timeout_s=30,
)
SANDBOX = SandboxConfig(memory_bytes=256 << 20, max_processes=32, workspace_bytes=8 << 20)
SCORE_HELLO = 'if [ "$(cat answer.txt)" = hello ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt\n'


@dataclass
class Proxy:
    """A server that speaks chat completions, and what it was asked."""

    url: str
    answer: str = "hello"
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, self.headers["Authorization"], body))
            message = {"role": "assistant", "content": state.answer}
            reply = {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    state = Proxy(f"http://127.0.0.1:{server.server_address[1]}/job/run/g000001-r0.key")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "environment" / "files").mkdir(parents=True)
    (folder / "environment" / "files" / "seed.txt").write_text("seed")
    (folder / "instruction.md").write_text("Say hello.")
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 20\n[verifier]\ntimeout_sec = 5\n")
    (folder / "tests" / "test.sh").write_text(SCORE_HELLO)
    return load_task(folder)


@pytest.fixture
def attempt(tmp_path: Path, task: Task, proxy: Proxy) -> Callable[..., RunResult]:
    """Runs a bash command (or a harness) on the task; ``test`` replaces the verifier's script."""

    def run(
        command: str | HarnessConfig,
        *,
        test: str | None = None,
        sandbox: SandboxConfig = SANDBOX,
        task: Task = task,
        cancel: threading.Event | None = None,
        keep_workspace: bool = True,
        **harness: Any,
    ) -> RunResult:
        if isinstance(command, str):
            command = HarnessConfig(command=("bash", "-c", command), env={"RUN": str(tmp_path)}, **harness)
        if test is not None:
            Path(task.path, "tests", "test.sh").write_text(test)
        spec = RunSpec("g000001-r0", 0, task, proxy.url, "g000001-r0.key", "policy", str(tmp_path / "run"))
        return run_attempt(spec, command, sandbox, cancel, keep_workspace=keep_workspace)

    return run


Attempt = Callable[..., RunResult]


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_the_script_harness_finishes_and_is_scored(attempt: Attempt, proxy: Proxy, tmp_path: Path, kind: str) -> None:
    sandbox = SANDBOX.model_copy(update={"kind": kind})
    harness = SCRIPT_HARNESS.model_copy(update={"command": ("python3", "{config_dir}/agent.py", "{instruction_file}")})
    result = attempt(harness, sandbox=sandbox, test=SCORE_HELLO.replace("/logs/verifier", "$LOGS_DIR"))
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.FINISHED, 1.0, 0), result.detail
    assert Path(result.workspace, "answer.txt").read_text() == "hello"
    assert Path(result.workspace, "seed.txt").read_text() == "seed"
    [(path, authorization, body)] = proxy.requests
    assert (path, authorization) == ("/job/run/g000001-r0.key/v1/chat/completions", "Bearer g000001-r0.key")
    assert body["messages"] == [{"role": "user", "content": "Say hello."}]
    assert body["max_tokens"] == 8
    assert result.wall_s >= result.harness_s > 0
    assert result.verifier_s > 0
    record = json.loads((tmp_path / "run" / "harness.json").read_text())
    assert (record["outcome"], record["exit_code"]) == ("finished", 0)


@pytest.mark.skipif(not (harness_dir() / "bin" / "mini").exists(), reason="needs `make harness`")
def test_mini_swe_agent_makes_one_call_and_finishes(attempt: Attempt, proxy: Proxy, tmp_path: Path) -> None:
    proxy.answer = "Sure:\n```bash\necho hello > answer.txt; env > env.txt\n```\nThis writes the file."
    result = attempt(HarnessConfig(timeout_s=60), sandbox=SandboxConfig())
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.detail
    [(path, authorization, body)] = proxy.requests
    assert path == "/job/run/g000001-r0.key/v1/chat/completions"
    assert authorization == "Bearer g000001-r0.key"
    assert body["messages"][-1]["content"].endswith("Say hello.")
    trajectory = json.loads((tmp_path / "run" / "logs" / "agent" / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "LimitsExceeded"
    assert "g000001-r0.key" not in Path(result.workspace, "env.txt").read_text()


@pytest.mark.skipif(not (harness_dir() / "bin" / "mini").exists(), reason="needs `make harness`")
def test_mini_swe_agent_finishes_after_an_answer_without_a_command(attempt: Attempt, proxy: Proxy) -> None:
    proxy.answer = "I cannot do that."
    result = attempt(HarnessConfig(timeout_s=60), sandbox=SandboxConfig())
    assert (result.outcome, result.reward, len(proxy.requests)) == (Outcome.FINISHED, 0.25, 1), result.detail


def test_logs_that_cannot_be_reached_are_the_harnesss_doing_and_no_setup_failure(attempt: Attempt) -> None:
    deep = "cd /logs/agent; d=$(printf 'd%.0s' $(seq 200))/; d=$d$d$d$d$d$d$d$d$d$d; mkdir -p $d; cd $d; mkdir -p $d$d"
    result = attempt(f"echo hello > answer.txt; touch /logs/agent/closed; chmod 0 /logs/agent/closed; {deep}")
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0)
    remove_tree(Path(result.workspace).parent / "logs")  # pytest could not


def test_the_tasks_own_limit_wins_when_it_is_smaller(attempt: Attempt, task: Task) -> None:
    result = attempt("sleep 600", task=replace(task, agent_timeout_s=0.5), timeout_s=60)
    assert result.outcome is Outcome.HARNESS_TIMEOUT
    assert result.harness_s < 3


def test_a_killed_harness_is_a_crash_and_scored(attempt: Attempt, tmp_path: Path) -> None:
    """kill -9 from outside, as an operator or the kernel would."""
    killer = threading.Thread(
        target=kill_when, args=(lambda: (tmp_path / "run/workspace/answer.txt").exists(), tmp_path)
    )
    killer.start()
    result = attempt("echo hello > answer.txt; exec sleep 600")
    killer.join()
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.HARNESS_CRASH, 1.0, 137), result.detail


def kill_when(condition: Callable[[], bool], run: Path) -> None:
    give_up_s = time.monotonic() + 10
    while time.monotonic() < give_up_s:
        for pid in pids_with_mark("RUN", str(run)) if condition() else []:
            try:
                is_harness = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
            except OSError:
                continue
            if is_harness:
                os.kill(pid, 9)
                return
        time.sleep(0.01)


def test_a_missing_config_folder_or_a_wrong_url_is_a_setup_failure(
    attempt: Attempt, proxy: Proxy, tmp_path: Path
) -> None:
    result = attempt(HarnessConfig(command=("true",), config_dir=str(tmp_path / "nowhere")))
    assert result.outcome is Outcome.SETUP_FAILURE
    proxy.url = "ftp://host/job"
    result = attempt(HarnessConfig(command=("true",)))
    assert result.outcome is Outcome.SETUP_FAILURE
    assert "http and https only" in result.detail


def cancelled_when(condition: Callable[[], bool]) -> threading.Event:
    """An event that is set as soon as a condition holds."""
    cancel = threading.Event()

    def watch() -> None:
        wait_until(condition, 20)
        cancel.set()

    threading.Thread(target=watch, daemon=True).start()
    return cancel


def test_cancelling_ends_a_verifier_too(attempt: Attempt, tmp_path: Path) -> None:
    cancel = cancelled_when((tmp_path / "run/verifier-1/logs/begun").exists)
    result = attempt("true", test="touch /logs/verifier/begun; sleep 600", cancel=cancel)
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.CANCELLED, None, 0)
    assert result.wall_s < 3


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 0", "left no reward"),
        ("exit 9", "exit code 9"),
        ("echo nan > /logs/verifier/reward.txt", "nan"),
        ("echo excellent > /logs/verifier/reward.txt", "no number"),
        ("ln -s /tests/test.sh /logs/verifier/reward.txt", "cannot be read"),
        ("echo 0 > /logs/verifier/reward.txt; kill -9 $$", "exit code 137"),
    ],
)
def test_a_verifier_without_a_valid_reward_is_a_failure_never_a_zero(
    attempt: Attempt, tmp_path: Path, test: str, reason: str
) -> None:
    result = attempt("true", test=test)
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None)
    assert reason in result.detail
    assert result.exit_code == 0
    assert (tmp_path / "run" / "verifier-2").is_dir()
    assert not (tmp_path / "run" / "verifier-3").exists()


def test_a_killed_verifier_is_evaluated_once_more_on_the_kept_workspace(attempt: Attempt, tmp_path: Path) -> None:
    """What the first evaluation did to the workspace is not there in the second."""
    test = "rm answer.txt; touch spoiled; echo begun > /logs/verifier/begun; sleep 600"
    second = "[ -f answer.txt ] && [ ! -f spoiled ] && echo 0.5 > /logs/verifier/reward.txt"

    def replace_and_kill() -> None:
        wait_until((tmp_path / "run/verifier-1/logs/begun").exists)
        (tmp_path / "task/tests/test.sh").write_text(second)
        workspace = str(tmp_path / "run/verifier-1/app")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"bwrap") and workspace.encode() in words:
                os.kill(int(process.name), 9)
                return

    killer = threading.Thread(target=replace_and_kill)
    killer.start()
    result = attempt("echo hello > answer.txt", test=test)
    killer.join()
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.5), result.detail
    assert Path(result.workspace, "answer.txt").read_text() == "hello\n"


def test_the_verifier_sees_tests_and_work_and_no_network(attempt: Attempt, proxy: Proxy) -> None:
    test = (
        "touch /tests/x 2>/dev/null && exit 1\n[ -f /app/answer.txt ] || exit 2\n"
        '[ -n "$OPENAI_API_KEY$RUN" ] && exit 3\n'
        f"python3 -c 'import urllib.request as u; u.urlopen(\"{proxy.url}\")' 2>/dev/null && exit 4\n"
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 7070))' 2>/dev/null && exit 5\n"
        "echo 1 > /logs/verifier/reward.txt\n"
    )
    result = attempt("echo hello > answer.txt", test=test)
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.detail


def test_a_harness_cannot_touch_the_tests_or_the_reward(attempt: Attempt) -> None:
    result = attempt("ls /tests /logs/verifier; mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt")
    assert result.outcome is Outcome.HARNESS_CRASH
    assert result.reward == 0.25


@pytest.mark.parametrize(("command", "reward"), [("echo hello > answer.txt", 1.0), ("sleep 600", 0.25)])
def test_a_scored_workspace_is_removed_where_the_job_does_not_keep_it(
    attempt: Attempt, tmp_path: Path, command: str, reward: float
) -> None:
    result = attempt(command, keep_workspace=False, timeout_s=0.7)
    assert (result.reward, result.workspace) == (reward, "")
    assert not (tmp_path / "run" / "workspace").exists()
    assert (tmp_path / "run" / "harness.json").exists()
    assert (tmp_path / "run" / "logs" / "harness.stdout").exists()


def test_a_workspace_without_a_score_is_kept(attempt: Attempt) -> None:
    result = attempt("echo hello > answer.txt", test="exit 0", keep_workspace=False)
    assert result.outcome is Outcome.VERIFIER_FAILURE
    assert Path(result.workspace, "answer.txt").read_text() == "hello\n"


async def test_an_attempt_goes_on_when_its_caller_went_away_until_it_is_cancelled(
    task: Task, proxy: Proxy, tmp_path: Path
) -> None:
    begun = tmp_path / "run" / "workspace" / "begun"
    harness = HarnessConfig(command=("bash", "-c", "touch begun; exec sleep 600"), env={"RUN": str(tmp_path)})
    runner = Runner(harness, SANDBOX, keep_workspaces=True)
    spec = RunSpec("g000001-r0", 0, task, proxy.url, "key", "policy", str(tmp_path / "run"))
    running = asyncio.create_task(runner.run(spec))
    await until(begun.exists)
    running.cancel()
    await asyncio.wait([running])
    again = asyncio.create_task(runner.run(spec))
    assert pids_with_mark("RUN", str(tmp_path))
    await runner.cancel([("g000001-r0", 0)])
    assert (await again).outcome is Outcome.CANCELLED
    assert not pids_with_mark("RUN", str(tmp_path))


def test_a_second_attempt_starts_from_a_clean_workspace(attempt: Attempt) -> None:
    attempt("touch left-over; echo changed > seed.txt")
    result = attempt('[ ! -e left-over ] && [ "$(cat seed.txt)" = seed ]')
    assert result.outcome is Outcome.FINISHED


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_the_tiny_tasks_score_the_share_of_vowels(proxy: Proxy, tmp_path: Path, kind: str) -> None:
    harness = HarnessConfig(command=("bash", "-c", "printf aebc > answer.txt"))
    for task in load_task_set(PROJECT / "examples" / "tiny" / "tasks"):
        spec = RunSpec("g000001-r0", 0, task, proxy.url, "key", "policy", str(tmp_path / task.name))
        result = run_attempt(spec, harness, SANDBOX.model_copy(update={"kind": kind}))
        assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.5), result.detail


TASKS = [task for name in ("train", "heldout") for task in load_task_set(PROJECT / "examples" / "tasks" / name)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_example_task_rewards_its_solution_and_not_an_untouched_workspace(
    task: Task, proxy: Proxy, tmp_path: Path
) -> None:
    solution = Path(task.path, "solution", "solve.sh").read_text()
    spec = RunSpec("g000001-r0", 0, task, proxy.url, "key", "policy", str(tmp_path / "run"))
    solved = run_attempt(spec, HarnessConfig(command=("bash", "-c", solution)), SANDBOX)
    assert (solved.outcome, solved.reward) == (Outcome.FINISHED, 1.0), solved.detail
    untouched = run_attempt(spec, HarnessConfig(command=("true",)), SANDBOX)
    assert (untouched.outcome, untouched.reward) == (Outcome.FINISHED, 0.0), untouched.detail
    (tmp_path / "empty").mkdir()
    run = ScoredRunView(task, "g000001-r0", 0, Outcome.FINISHED, "", "", "", "")
    empty = evaluate(run, tmp_path / "empty", tmp_path / "run-empty", SANDBOX, BY_TASKS).score
    assert empty.value is not None, empty.reason
    assert empty.value < 1
