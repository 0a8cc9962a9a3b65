"""A real shard behind the real proxy, and attempts of a run in real sandboxes: how each ending is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import uvicorn

from services.common.errors import EngineError
from services.common.ids import JobId
from services.proxy.app import create_app
from services.proxy.backends import Shard
from services.proxy.config import ProxyConfig
from services.proxy.parsing import PlainParser
from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.runner import run_attempt
from services.rollout.tasks import load_task
from services.rollout.types import GenerateChunk, GenerateRequest, RunResult, RunSpec
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from services.trajectory.types import GroupResult
from tests.unit.proxy.fakes import FakeBackends, FakeCell, FakeShard
from tests.unit.trajectory.world import END, make_spec, open_shard, run_to_end
from tests.waiting import until

JOB = JobId("job-1")
GROUP = make_spec(num_runs=3)
RUN, *PEERS = GROUP.run_ids
SAID = "hello"
TARGETS_OF_A_CALL = len(SAID) + 1
SANDBOX = SandboxConfig(memory_bytes=256 << 20, max_processes=32, workspace_bytes=8 << 20)
SCORE_HELLO = 'if [ "$(cat answer.txt)" = hello ]; then echo 0.5; else echo 0.25; fi > /logs/verifier/reward.txt\n'

ASK = '''\
"""usage: ask.py TEXT [stream]: one call; prints the answer. Exit code 22 if it was refused, 18 if it was cut."""
import http.client, json, os, sys, urllib.error, urllib.request

stream = len(sys.argv) > 2
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}], "stream": stream}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(os.environ["BASE_URL"] + "/v1/chat/completions", json.dumps(body).encode(), headers)
try:
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = response.read().decode()
except urllib.error.HTTPError as error:
    print("refused:", error.code, error.read().decode(), file=sys.stderr)
    sys.exit(22)
except http.client.HTTPException as error:
    print("cut:", type(error).__name__, getattr(error, "partial", b""), file=sys.stderr)
    sys.exit(18)
print(answer if stream else json.loads(answer)["choices"][0]["message"]["content"])
'''
ASKS = f"python3 /config/ask.py 'say {SAID}' > answer.txt; "
"""Shell: makes one call, whose answer becomes the work."""


class Model(FakeCell):
    """A cell whose model always says the same, token by token, and ends its turn."""

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        for made, character in enumerate(SAID):
            if made == self.dies_after:
                raise EngineError("the engine is gone.")
            yield GenerateChunk((ord(character),), (-0.1,), character, self.version)
        yield GenerateChunk((END,), (-0.1,), "", self.version, "stop")


@dataclass
class World:
    """One group of three runs on a shard. The first is executed, the other two have rewards 0 and 1."""

    shard: TrajectoryShard
    cell: Model
    url: str
    folder: Path
    harness: HarnessConfig = field(default_factory=HarnessConfig)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def workspace(self) -> Path:
        return self.run_dir / "workspace"

    async def spec(self, attempt: int = 0, *, test: str = SCORE_HELLO, verifier_timeout_s: float = 20) -> RunSpec:
        """Opens an attempt; ``test`` is the task's verifier."""
        task = self.folder / "task"
        (task / "tests").mkdir(parents=True, exist_ok=True)
        (task / "instruction.md").write_text("Say hello.")
        (task / "task.toml").write_text(f"[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = {verifier_timeout_s}\n")
        (task / "tests" / "test.sh").write_text(test)
        key = await self.shard.open_attempt(RUN, attempt)
        return RunSpec(RUN, attempt, load_task(task), f"{self.url}/run/{key}", key, "policy", str(self.run_dir))

    def harness_of(self, command: str | tuple[str, ...], **harness: Any) -> HarnessConfig:
        """A harness that runs a shell command, beside ``ask.py``."""
        config = self.folder / "config"
        config.mkdir(exist_ok=True)
        (config / "ask.py").write_text(ASK)
        words = ("bash", "-c", command) if isinstance(command, str) else command
        env = {"BASE_URL": "{base_url}", "RUN": str(self.folder)}
        return HarnessConfig(command=words, config_dir=str(config), env=env, **{"timeout_s": 60, **harness})

    async def attempt(
        self,
        command: str | tuple[str, ...],
        *,
        attempt: int = 0,
        cancel: threading.Event | None = None,
        run_timeout_s: float | None = None,
        test: str = SCORE_HELLO,
        verifier_timeout_s: float = 20,
        **harness: Any,
    ) -> RunResult:
        """One attempt from its key to what the shard records of it."""
        spec = await self.spec(attempt, test=test, verifier_timeout_s=verifier_timeout_s)
        config = self.harness_of(command, **harness)
        options: dict[str, Any] = {"keep_workspace": False, "run_timeout_s": run_timeout_s}
        return await self.recorded(await asyncio.to_thread(run_attempt, spec, config, SANDBOX, cancel, **options))

    async def recorded(self, result: RunResult) -> RunResult:
        """The result with the outcome that the shard gives it."""
        await self.shard.close_attempt(result.run_id, result.attempt)
        return replace(result, outcome=await self.shard.finish_run(result))

    async def settled(self) -> GroupResult:
        """The group, once the two other runs have ended too."""
        for peer, reward in zip(PEERS, (0.0, 1.0), strict=True):
            await run_to_end(self.shard, peer, reward)
        return await self.shard.finish_group(GROUP.group_id)

    async def hold_to_the_table(self, result: RunResult, *, num_calls: int = 1, counts: bool | None = None) -> None:
        """What the outcome's row says is what happened. ``counts`` where the job's configuration decides."""
        rule = OUTCOME_TABLE[result.outcome]
        self._check_what_is_kept(result)
        is_failed = result.outcome in (Outcome.VERIFIER_FAILURE, Outcome.VERIFIER_TIMEOUT)
        if result.outcome is not Outcome.ENGINE_LOSS:  # the runner cannot know that: it scores
            assert (self.run_dir / "verifier-1").exists() == rule.scored
            assert (result.reward is not None) == (rule.scored and not is_failed), result.detail
            assert bool(result.evaluated_ref) == rule.scored
        group = await self.settled()
        targets_of_peers = sum(len(f"first of {peer}") + len("done") + 2 for peer in PEERS)
        assert group.num_counted == len(PEERS) + (rule.counted if counts is None else counts), group.reason
        assert group.num_targets == targets_of_peers + rule.trained * num_calls * TARGETS_OF_A_CALL

    def _check_what_is_kept(self, result: RunResult) -> None:
        if not OUTCOME_TABLE[result.outcome].salvaged:
            return
        record = json.loads((self.run_dir / "harness.json").read_text())
        assert record["reason"], record
        assert (self.run_dir / "logs" / "harness.stdout").exists()
        assert (self.run_dir / "logs" / "harness.stderr").exists()
        if result.reward is None and result.outcome is not Outcome.CANCELLED:
            assert Path(result.workspace, "answer.txt").exists(), "work without a score is never removed"
        else:
            assert result.workspace == "", "scored, and the job keeps no workspaces"


@contextlib.asynccontextmanager
async def outcome_world(
    folder: Path, *, call_timeout_s: float = 60, cell: Model | None = None, **options: Any
) -> AsyncIterator[World]:
    """``options`` of the shard; a proxy on a free loopback port serves it."""
    cell = cell or Model()
    backends = FakeBackends(FakeShard(), cell=cell)
    options = {"config": TrajectoryConfig(max_calls=2), "drop_equal_rewards": False, **options}
    shard = open_shard(folder / "store", **options)
    backends.shard_for = lambda run_id: cast(Shard, shard)  # type: ignore[method-assign]
    await shard.open_group(GROUP)
    app = create_app(JOB, ProxyConfig(call_timeout_s=call_timeout_s), "policy", backends, PlainParser())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", access_log=False, log_config=None))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield World(shard, cell, f"http://127.0.0.1:{port}", folder)
    finally:
        server.should_exit = True
        await serving
        await shard.close()
