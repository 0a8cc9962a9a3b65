"""``tidegate status``, ``cells`` and ``policy`` against a real scheduler over real gRPC, as a user types them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import click.testing
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services import cli, cli_status
from services.common.errors import AccessError, ConfigError, NotFoundError, RefusedError, TidegateError
from services.common.types import CellKind
from services.job.access import find_access
from services.scheduler.actor import JobScheduler
from services.scheduler.events import CellJoined
from tests.unit.scheduler.long_runs import LongRuns
from tests.unit.scheduler.world import options
from tests.waiting import until

TOKEN = "token-of-this-test"


class RunningJob:
    """A job with a folder, whose 12 runs fill the 8 slots of its two cells until they are told to end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.performer = LongRuns()
        self.scheduler = JobScheduler(options(steps=40, carry_over_steps=2.0), self.performer, grpc_token=TOKEN)

    async def start(self) -> None:
        self.address = await self.scheduler.start()
        self.folder.mkdir(parents=True)
        (self.folder.parent / "latest").symlink_to(self.folder.name)
        (self.folder / "job.json").write_text('{"job_id": "job"}')
        (self.folder / "grpc-address").write_text(self.address + "\n")
        (self.folder / "grpc-token").write_text(TOKEN + "\n")
        await self.scheduler.post(CellJoined("cell-0", 4, CellKind.CORE))
        await self.scheduler.post(CellJoined("cell-1", 4))
        await until(lambda: len(self.performer.running) == 8)

    async def ends_runs_until_version(self, version: int) -> None:
        await until(lambda: self.performer.end_runs() or self.scheduler.snapshot()["version"] >= version)


@pytest.fixture
async def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningJob]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_TOKEN", raising=False)
    made = RunningJob(Path("runs/job-1"))
    await made.start()
    yield made
    await made.scheduler.close()


async def tidegate(*arguments: str, **env: str) -> click.testing.Result:
    """What a command does; it runs beside the server, in a thread of its own."""
    return await asyncio.to_thread(CliRunner().invoke, cli.app, list(arguments), env=env)


async def refused(*arguments: str, **env: str) -> TidegateError:
    """The error that ends a command (``cli.main`` prints it and leaves with its exit code)."""
    result = await tidegate(*arguments, **env)
    assert isinstance(result.exception, TidegateError), result.output
    assert TOKEN not in str(result.exception)
    return result.exception


# -- status -----------------------------------------------------------------------------------------------------------


async def test_status_shows_job_policy_cells_and_decisions(job) -> None:
    result = await tidegate("status")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "job job" in lines
    assert "status running" in lines
    assert "step 0 of 40, version 0 is published" in lines
    assert "policy elastic (whole steps, rule paper), phi 2, mu 1" in lines
    assert "runs water level 12 = 12 dispatched - 0 ended; 4 queued, 8 running" in lines
    assert "groups 0 ready, 6 outstanding, 0 lost" in lines
    assert "cell-0 core rollout serving 0 4/4" in lines
    assert "cell-1 satellite rollout serving 0 4/4" in lines
    assert any("PublishWeights version 0 to 2 cells version 0 is due" in line for line in lines)
    assert any("OpenGroup g000005 (+5)" in line and "Q = (phi + mu) * B" in line for line in lines)


async def test_status_as_json_is_one_object(job) -> None:
    result = await tidegate("status", str(job.folder), "--json", "--decisions", "3")
    state = json.loads(result.output)
    assert (state["job_id"], state["status"], state["water_level"], state["queued_runs"]) == ("job", "running", 12, 4)
    assert [(cell["cell_id"], cell["kind"], cell["num_runs"]) for cell in state["cells"]] == [
        ("cell-0", "core", 4),
        ("cell-1", "satellite", 4),
    ]
    assert (state["policy"]["carry_over_steps"], state["policy"]["pending"]) == (2.0, {})
    assert [decision["action"] for decision in state["decisions"]] == ["StartRun"] * 3
    assert json.loads((await tidegate("status", "--json", "--decisions", "0")).output)["decisions"] == []


def follow(job: RunningJob, screen: Console) -> asyncio.Task[None]:
    """``status --watch`` with a screen that can be read meanwhile."""
    watch = asyncio.to_thread(cli_status.follow, lambda: find_access(job.folder), screen, 10)
    return asyncio.create_task(watch)


def screen_of(**kind: bool) -> Console:
    return Console(width=160, height=50, file=io.StringIO(), record=True, **kind)


async def test_a_watched_job_is_followed_to_its_end(job) -> None:
    watch = asyncio.create_task(tidegate("status", "--watch"))
    await job.ends_runs_until_version(1)
    await job.scheduler.cancel("seen enough")
    result = await watch
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].split() == ["job", "job"]
    assert result.output.splitlines()[-1] == "the job is over: cancelled: seen enough"


async def test_a_watch_without_a_terminal_prints_one_line_a_decision(job) -> None:
    screen = screen_of()
    watch = follow(job, screen)
    await until(lambda: "water level 12" in screen.export_text(clear=False))
    await job.ends_runs_until_version(1)
    await job.scheduler.cancel("seen enough")
    await watch
    printed = screen.export_text()
    assert "SwitchCell cell-0 -> train: core leaves rollout: w=" in printed
    assert "TrainStep step 1 (2 groups): core is in training" in printed
    assert "status  cancelled: seen enough" in printed


async def test_a_watch_on_a_terminal_redraws_one_picture(job) -> None:
    screen = screen_of(force_terminal=True)
    watch = follow(job, screen)
    await until(lambda: "version 0 is published" in screen.export_text(clear=False))
    await job.ends_runs_until_version(1)
    await until(lambda: "version 0 is published" not in screen.export_text(clear=False).rsplit("status", 1)[-1])
    await job.scheduler.cancel("seen enough")
    await watch
    picture = screen.export_text().rsplit("status", 1)[-1]
    assert "cancelled: seen enough" in picture
    assert picture.splitlines()[-1] == "the job is over: cancelled: seen enough"


async def test_a_watch_gives_up_when_the_scheduler_stays_away(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_status, "_LOST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(cli_status, "_RETRY_S", 0.05)
    screen = screen_of()
    watch = follow(job, screen)
    await until(lambda: "version 0 is published" in screen.export_text(clear=False))
    assert job.scheduler._server is not None
    await job.scheduler._server.stop(grace=None)  # no word of the job's end, as of a machine that is gone
    with pytest.raises(NotFoundError, match="over or not reachable"):
        await watch
    assert "trying again" in screen.export_text()


# -- cells ------------------------------------------------------------------------------------------------------------


async def test_cells_are_listed(job) -> None:
    result = await tidegate("cells", "list")
    rows = [line.split() for line in result.output.splitlines()]
    assert rows == [
        ["cell", "kind", "role", "state", "version", "runs/slots", "reason"],
        ["cell-0", "core", "rollout", "serving", "0", "4/4"],
        ["cell-1", "satellite", "rollout", "serving", "0", "4/4"],
    ]
    answer = json.loads((await tidegate("cells", "list", "--json")).output)
    assert answer["job_id"] == "job"
    assert [cell["cell_id"] for cell in answer["cells"]] == ["cell-0", "cell-1"]


async def test_a_cell_is_drained_and_given_back(job) -> None:
    drained = await tidegate("cells", "drain", "cell-1")
    assert drained.exit_code == 0, drained.output
    row = " ".join(drained.output.splitlines()[1].split())
    assert row == "cell-1 satellite rollout serving 0 0/4 drained by a user"
    assert job.scheduler.snapshot()["cells"][1]["is_draining"]
    job.performer.hold.set()
    given_back = await tidegate("cells", "undrain", "cell-1", str(job.folder))
    assert given_back.exit_code == 0, given_back.output
    assert "drained" not in given_back.output
    assert not job.scheduler.snapshot()["cells"][1]["is_draining"]


async def test_a_switch_that_breaks_a_rule_is_refused_with_the_numbers(job) -> None:
    error = await refused("cells", "switch", "cell-0", "--to", "train")
    assert isinstance(error, RefusedError)
    assert error.exit_code == 1
    assert "w=12 > C_R - C_core = 4" in str(error)


async def test_a_refusal_goes_to_stderr_with_exit_code_1(
    job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tidegate", "cells", "drain", "cell-0"])
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.main)
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: cell-0 is the core")


async def test_an_unknown_cell_is_named_with_the_known_ones(job) -> None:
    for arguments in (("drain", "cell-7"), ("undrain", "cell-7"), ("switch", "cell-7", "--to", "rollout")):
        error = await refused("cells", *arguments)
        assert isinstance(error, NotFoundError)
        assert "cell-7" in str(error)
        assert "cell-0, cell-1" in str(error)


# -- policy -----------------------------------------------------------------------------------------------------------


async def test_a_policy_is_set_for_the_next_boundary(job) -> None:
    result = await tidegate("policy", "set", "--phi", "0.5", "--mu", "2", "--mode", "colocate")
    assert result.exit_code == 0, result.output
    first, second = result.output.splitlines()
    assert first == "it holds from step 1 on (now at step 0)"
    assert second == ("elastic (whole steps, rule paper), phi 2, mu 1; from step 1 on: mode colocate, phi 0.5, mu 2")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--phi", "-1", "0 or more"),
        ("--phi", "nan", "0 or more"),
        ("--phi", "inf", "0 or more"),
        ("--mu", "0", "1 or more"),
        ("--mu", str(2**40), "32 bits"),
        ("--mode", "elastik", "async, colocate, elastic"),
    ],
)
async def test_bad_numbers_end_with_exit_code_2_and_what_would_be_right(
    job, option: str, value: str, says: str
) -> None:
    error = await refused("policy", "set", option, value)
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert says in str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "set"),
        ("policy", "set", "--mu", "1.5"),
        ("policy", "set", "--phi", "much"),
        ("cells", "drain"),
        ("cells", "switch", "cell-1"),
        ("cells", "switch", "cell-1", "--to", "to_train"),
        ("status", "--watch", "--json"),
        ("status", "--decisions", "-1"),
        ("cells", "move", "cell-1"),
    ],
)
async def test_a_command_that_is_typed_wrong_ends_with_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = await tidegate(*arguments)
    assert result.exit_code == 2
    assert result.output


# -- finding the job --------------------------------------------------------------------------------------------------


async def test_a_job_is_found_by_address_and_token(job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for result in (
        await tidegate("cells", "list", "--address", job.address, "--token", TOKEN),
        await tidegate("cells", "list", "--address", job.address, TIDEGATE_TOKEN=TOKEN),
    ):
        assert result.exit_code == 0, result.output
        assert "cell-1" in result.output


async def test_an_address_alone_gets_no_token_of_another_job(job) -> None:
    error = await refused("status", "--address", job.address)
    assert isinstance(error, ConfigError)
    assert "TIDEGATE_TOKEN" in str(error)
    result = await tidegate("cells", "list", str(job.folder), "--address", job.address)
    assert result.exit_code == 0, "a folder that is named gives its own token"


async def test_a_wrong_token_is_refused_and_never_shown(job) -> None:
    error = await refused("status", TIDEGATE_TOKEN="a-wrong-one")
    assert isinstance(error, AccessError)
    assert "a-wrong-one" not in str(error)
    error = await refused("status", TIDEGATE_TOKEN="two\nlines")
    assert isinstance(error, ConfigError)
    assert "two" not in str(error)
    assert TOKEN not in (await tidegate("status", "--help", TIDEGATE_TOKEN=TOKEN)).output


async def test_a_folder_of_another_job_is_not_taken_for_this_one(job) -> None:
    (job.folder / "job.json").write_text('{"job_id": "an-older-job"}')
    error = await refused("status")
    assert isinstance(error, NotFoundError)
    assert "an-older-job" in str(error)


async def test_a_job_that_is_over_is_said_to_be_over(job) -> None:
    await job.scheduler.close()
    error = await refused("status")
    assert isinstance(error, NotFoundError)
    assert error.exit_code == 1
    assert "over or not reachable" in error.message
    assert "--resume" in error.hint
    (job.folder / "summary.json").write_text('{"status": "finished"}')
    error = await refused("cells", "drain", "cell-1")
    assert "is over (finished)" in error.message
    assert "tidegate runs list" in error.hint


async def test_a_folder_without_a_job_says_what_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no folder runs/latest" in str(await refused("status"))
    assert "it has no job.json" in str(await refused("status", str(tmp_path)))
    (tmp_path / "job.json").write_text('{"job_id": "job"}')
    error = await refused("cells", "list", str(tmp_path))
    assert "cannot be asked yet: it has no grpc-address" in str(error)
