"""pi and mini-swe-agent as harnesses of runs: started by the runner in its sandbox, scored, and recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.runner import run_attempt
from services.rollout.tasks import load_task
from services.rollout.types import RunResult, RunSpec
from services.trajectory.outcome import Outcome
from services.trajectory.types import CallRole
from tests.e2e.harnesses.clients import executable, harness_dir
from tests.e2e.harnesses.model import TASK, Script
from tests.e2e.harnesses.world import RUN, World, harness_world

SCORE = """\
cd /app || exit 1
[ "$(cat tide.txt)" = "$(printf 'one\\ntwo')" ] && [ "$(cat sub.txt)" = sub ] && echo 1 > /logs/verifier/reward.txt
"""
PI = """\
mkdir -p ~/.pi/agent && cat > ~/.pi/agent/models.json <<END
{"providers": {"tidegate": {"baseUrl": "$BASE_URL/v1", "api": "openai-completions", "apiKey": "$API_KEY",
  "models": [{"id": "$MODEL", "reasoning": true, "contextWindow": 128000, "maxTokens": 8192}]}}}
END
exec "$PI" -p --provider tidegate --model "$MODEL" "$TASK"
"""


async def test_pi_is_the_harness_of_a_run(tmp_path: Path) -> None:
    """Its installation is read-only, its home in memory; what it needs to know comes by environment."""
    env = {
        "PI": executable("pi"),
        "PI_OFFLINE": "1",
        "BASE_URL": "{base_url}",
        "API_KEY": "{api_key}",
        "MODEL": "{model}",
        "TASK": "{instruction}",
    }
    installed = tuple(str(harness_dir() / name) for name in ("pi", "node"))
    harness = HarnessConfig(command=("sh", "-c", PI), env=env, readonly_paths=installed)
    async with harness_world(tmp_path, Script()) as world:
        result = await attempt(world, harness)
        assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), logs(world, result)
        recorded = world.check(num_conversations=1)
    assert recorded.roles == {CallRole.MAIN: len(Script().main_steps)}


async def test_mini_is_the_harness_of_a_run(tmp_path: Path) -> None:
    """With tools, over the installation that jobs use by default."""
    script = Script(finish_command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    env = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_BASE": "{base_url}/v1",
        "OPENAI_API_KEY": "{api_key}",
    }
    start = (executable("mini"), "-m", "minisweagent.run.mini", "--exit-immediately", "-y")
    command = (*start, "-m", "openai/{model}", "-t", "{instruction}", "-o", "{logs_dir}/trajectory.json")
    harness = HarnessConfig(command=command, env=env, readonly_paths=environment_of_mini())
    async with harness_world(tmp_path, script) as world:
        result = await attempt(world, harness)
        assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), logs(world, result)
        recorded = world.check(num_conversations=1)
    assert recorded.roles == {CallRole.MAIN: len(script.main_steps)}


def environment_of_mini() -> tuple[str, ...]:
    """Its installation and, outside the system's folders, the Python under it."""
    python = Path(executable("mini")).resolve().parents[1]
    return (str(harness_dir() / "mini"), *([] if python.is_relative_to("/usr") else [str(python)]))


async def attempt(world: World, harness: HarnessConfig) -> RunResult:
    """One attempt of the run, with its task and its verifier."""
    task = world.folder / "task"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text(TASK)
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 30\n")
    (task / "tests" / "test.sh").write_text(SCORE)
    url, run_dir = f"{world.url}/run/{world.key}", str(world.folder / "run")
    spec = RunSpec(RUN, 0, load_task(task), url, world.key, "policy", run_dir)
    return await asyncio.to_thread(run_attempt, spec, harness, SandboxConfig(), None, keep_workspace=False)


def logs(world: World, result: RunResult) -> str:
    """What an attempt left for people."""
    files = sorted((world.folder / "run").rglob("*std*"))
    return "\n".join([str(result), *(f"--- {file}\n{file.read_text()[-3000:]}" for file in files)])
