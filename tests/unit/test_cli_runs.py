"""``tidegate runs`` as a user types it: on a job's folder, and on a running job over real gRPC."""

from __future__ import annotations

import asyncio
import filecmp
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import click.testing
import pytest
from typer.testing import CliRunner

from services import cli, cli_runs
from services.common.errors import AccessError, ConfigError, NotFoundError, TidegateError
from services.scheduler.actor import JobScheduler
from tests.unit.scheduler.long_runs import LongRuns
from tests.unit.scheduler.world import options
from tests.unit.trajectory.stored_job import RICH, make_job
from tests.unit.trajectory.told_job import LOOKED, LOOKED_RAW, RUN, make_told_job

TOKEN = "token-of-this-test"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "job"
    asyncio.run(make_job(folder))
    return folder


@pytest.fixture
def job(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's folder, which ``runs/latest`` links to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_TOKEN", raising=False)
    folder = Path("runs/job-1")
    shutil.copytree(stored, folder)
    (folder.parent / "latest").symlink_to(folder.name)
    return folder


@pytest.fixture
async def live(job: Path) -> AsyncIterator[str]:
    """The address of the job's scheduler."""
    scheduler = JobScheduler(options(), LongRuns(), job_dir=str(job), grpc_token=TOKEN)
    address = await scheduler.start()
    (job / "job.json").write_text('{"job_id": "job"}')
    (job / "grpc-address").write_text(address + "\n")
    (job / "grpc-token").write_text(TOKEN + "\n")
    yield address
    await scheduler.close()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a job whose answers were told apart."""
    folder = tmp_path_factory.mktemp("told") / "job"
    asyncio.run(make_told_job(folder))
    return str(folder)


def tidegate(*arguments: str, **env: str) -> click.testing.Result:
    return CliRunner().invoke(cli.app, ["runs", *arguments], env=env)


def done(*arguments: str, **env: str) -> str:
    """The output of a command that succeeds."""
    result = tidegate(*arguments, **env)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refused(*arguments: str, **env: str) -> TidegateError:
    """The error that ends a command (``cli.main`` prints it and leaves with its exit code)."""
    result = tidegate(*arguments, **env)
    assert isinstance(result.exception, TidegateError), (result.output, result.exception)
    assert result.exception.exit_code != 0
    return result.exception


def squeezed(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


# -- list and show ----------------------------------------------------------------------------------------------------


def test_runs_are_listed_in_order_of_dispatch(job: Path) -> None:
    lines = squeezed(done("list"))
    assert lines[0] == "run task outcome reward advantage calls tokens in out targets versions s"
    assert [line.split()[0] for line in lines[1:]] == [
        *("g000000-r0", "g000000-r1", "g000001-r0", "g000001-r1"),
        *("e000002-r0", "e000002-r1", "g000003-r0", "g000003-r1"),
    ]
    assert lines[6].startswith("e000002-r1 task verifier_failure - - 2 ")
    assert "5 older runs not shown" in done("list", "--limit", "3", "--job", str(job))
    assert [line.split()[0] for line in squeezed(done("list", "--outcome", "unfinished"))[1:]] == [
        "g000003-r0",
        "g000003-r1",
    ]
    assert len(squeezed(done("list", "--group", "g000001"))) == 3
    assert len(squeezed(done("list", "--task", "no-such"))) == 1


def test_lists_are_json_for_scripts(job: Path) -> None:
    answer = json.loads(done("list", "--json", "--group", "g000000"))
    assert (answer["job_id"], answer["num_runs"]) == ("job-of-this-test", 2)
    run = answer["runs"][0]
    assert (run["run_id"], run["outcome"], run["reward"]) == (RICH, "finished", 1.0)
    assert run["selection"]["num_targets"] > 0
    assert json.loads(done("list", "--json", "--limit", "1"))["num_runs"] == 8


def test_a_run_is_shown_with_every_call(job: Path) -> None:
    output = done("show", RICH)
    assert output.startswith(f"{RICH} task: finished, reward 1.000, advantage 0.707 (as it went)")
    assert "group g000000 is ready, trained by step 7" in output
    assert 'scored commit 3f2a: {"tests": {"passed": 3}}' in output
    assert "main, superseded: 39 prompt tokens (39 new), 17 sampled (17 at version 3), stop, on cell-1" in output
    assert "abandoned answer" in output


def test_a_shown_run_is_json_for_scripts(job: Path) -> None:
    shown = json.loads(done("show", RICH, "--json"))
    assert shown["group"]["state"] == "ready"
    assert shown["score"] == {"evaluated_ref": "commit 3f2a", "details": {"tests": {"passed": 3}}}
    assert len(shown["calls"]) == 8
    assert shown["calls"][0]["fate"] == "superseded"
    assert shown["calls"][0]["output_text"] == "abandoned answer"
    assert "output_ids" not in shown["calls"][0]
    call = json.loads(done("show", RICH, "--json", "--tokens"))["calls"][0]
    assert len(call["output_ids"]) == len(call["logprobs"]) == call["num_sampled_tokens"] == 17
    assert tidegate("show", RICH, "--tokens").exit_code == 2


def test_reasoning_text_and_tool_calls_are_shown_apart(told: str) -> None:
    output = squeezed(done("show", RUN, "--job", told))
    at = output.index("user: count the files")
    assert output[at - 1 : at + 5] == [
        "agent root, 1 malformed tool calls in the text",
        "user: count the files",
        "reasoning: what is there?",
        "assistant: I look.",
        'calls bash: {"command": "ls"} (call_1)',
        r'calls bash: {"command": "wc", "text": "\udcff"} (call_2)',
    ]
    assert "made for: side, agent root" in output
    assert "agent root, ended by the stop string '</answer>'" in output
    assert not any("<think>" in line for line in output)


def test_scripts_get_the_raw_text_and_the_answer(told: str) -> None:
    first, title, helper, last = json.loads(done("show", RUN, "--job", told, "--json"))["calls"]
    assert first["output_text"] == LOOKED_RAW
    assert (first["answer"]["text"], first["answer"]["reasoning"]) == (LOOKED.text, LOOKED.reasoning)
    assert [call["name"] for call in first["answer"]["tool_calls"]] == ["bash", "bash"]
    assert (title["purpose"], title["role"], title["answer"]) == ("side", "side", None)
    assert (helper["agent_id"], helper["parent_agent_id"]) == ("helper", "root")
    assert (last["stop_string"], last["sampling"]["max_tokens"]) == ("</answer>", 32)
    assert first["request"]["tool_choice"] == {"mode": "auto", "name": "", "is_parallel": False}
    assert "messages" not in first["request"]


# -- tree -------------------------------------------------------------------------------------------------------------


def test_a_tree_shows_branches_roles_and_what_was_selected(job: Path) -> None:
    output = done("tree", RICH)
    for line in (
        "retry: asked again later",
        "a0-c0 main +39 prompt, 17 sampled v3 stop superseded",
        "subagent",
        "compaction: the main conversation begins anew",
        "a0-c6 main_summary",
        "branch",
        "selected #1",
    ):
        assert any(line in one for one in squeezed(output)), f"{line!r} is not in\n{output}"
    assert "trajectories 5, 3 selected (at most 3)" in squeezed(output)
    assert any(
        line.startswith("tokens 575 unique; 819 in all trajectories flattened, 1.42 times") for line in squeezed(output)
    )


def test_side_calls_are_drawn_as_such(told: str) -> None:
    output = squeezed(done("tree", RUN, "--job", told))
    at = output.index("├── side call")
    assert output[at + 1] == "│ └── a0-c1 side +18 prompt, 9 sampled v3 stop not trainable"


def test_long_conversations_are_folded_unless_all_is_asked_for(job: Path) -> None:
    folded = done("tree", "g000000-r1")
    assert "... 10 calls from a0-c1 ..." in folded
    assert "a0-c5" not in folded
    assert "a0-c5" in done("tree", "g000000-r1", "--all")


def test_a_run_without_calls_is_drawn_too(job: Path) -> None:
    assert "trajectories 0, 0 selected" in squeezed(done("tree", "g000003-r1"))


# -- export and import ------------------------------------------------------------------------------------------------


def test_an_export_is_imported_into_another_folder(job: Path) -> None:
    output = done("export", "--out", "all.parquet")
    assert output.startswith("wrote 11 trajectories of 8 runs to all.parquet: ")
    assert "imported 8 runs of 4 groups with 29 calls" in done("import", "all.parquet", "--into", "again")
    for command in (("list",), ("show", RICH), ("tree", RICH)):
        assert done(*command, "--job", "again") == done(*command)
    done("export", "--out", "one.jsonl")
    done("export", "--out", "two.jsonl", "--job", "again")
    assert Path("one.jsonl").read_bytes() == Path("two.jsonl").read_bytes()


def test_control_characters_that_a_model_wrote_do_not_reach_the_terminal(job: Path, tmp_path: Path) -> None:
    done("export", "--out", str(tmp_path / "out.jsonl"))
    text = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    (tmp_path / "out.jsonl").write_text(text.replace("all is done", r"all is \u001b[2J \u009b \ud800 done"))
    done("import", str(tmp_path / "out.jsonl"), "--into", str(tmp_path / "other"))
    shown = done("show", RICH, "--job", str(tmp_path / "other"))
    assert r"all is \x1b[2J \x9b \ud800 done" in shown


def test_filters_and_formats_are_taken(job: Path) -> None:
    done("export", "--out", "some.jsonl", "--run", RICH, "--run", "g000000-r1", "--selected-only", "--no-eval")
    rows = [json.loads(line) for line in Path("some.jsonl").read_text().splitlines()]
    assert {row["run_id"] for row in rows} == {RICH, "g000000-r1"}
    assert all(row["is_selected"] for row in rows)
    done("export", "--format", "atif", "--out", "docs", "--group", "g000000", "--min-reward", "0.5")
    documents = {path.name: json.loads(path.read_text()) for path in Path("docs").iterdir()}
    assert documents[f"{RICH}.json"]["agent"] == {
        "name": "mini-swe-agent",
        "version": "unknown",
        "model_name": "policy",
        "tool_definitions": documents[f"{RICH}.json"]["agent"]["tool_definitions"],
    }


@pytest.mark.parametrize(("num_runs", "said"), [(1, "r0"), (10, "r0, r1"), (12, "r9 and 2 more")])
def test_of_many_runs_that_were_left_out_the_first_are_named(num_runs: int, said: str) -> None:
    line = cli_runs._named([f"r{index}" for index in range(num_runs)])
    assert said in line
    assert ("more" in line) == (num_runs > 10)
    assert "r10" not in line


def test_what_cannot_be_done_is_refused_and_nothing_is_written(job: Path) -> None:
    before = sorted(path.name for path in Path().iterdir())
    assert "no outcome 'crash'" in str(refused("list", "--outcome", "crash"))
    for error, kind, says in (
        (refused("show", "g000077-r0"), NotFoundError, "no run g000077-r0"),
        (refused("tree", "g000077-r0"), NotFoundError, "no run g000077-r0"),
        (refused("list", "--job", "nowhere"), NotFoundError, "there is no folder nowhere"),
        (refused("list", "--job", "."), NotFoundError, "no runs are stored"),
        (refused("export", "--out", "out.xlsx"), ConfigError, "tells no format"),
        (refused("export", "--out", "missing/out.jsonl"), ConfigError, "there is no folder"),
        (refused("export", "--out", "out.jsonl", "--outcome", "won"), ConfigError, "no outcome 'won'"),
        (refused("export", "--out", "out.jsonl", "--run", "g000077-r0"), ConfigError, "no run g000077-r0"),
        (refused("export", "--out", "out.jsonl", "--min-reward", "nan"), ConfigError, "nan"),
        (refused("export", "--out", "out.jsonl", "--min-reward", "9"), NotFoundError, "as the filters want"),
        (refused("import", "missing.jsonl", "--into", "new"), ConfigError, "cannot read missing.jsonl"),
    ):
        assert isinstance(error, kind), error
        assert says in str(error)
    assert tidegate("export", "--out", "out", "--format", "csv").exit_code == 2
    assert tidegate("export").exit_code == 2
    assert tidegate("list", "--limit", "-1").exit_code == 2
    assert sorted(path.name for path in Path().iterdir()) == before


def test_an_output_that_exists_needs_force(job: Path) -> None:
    Path("out.jsonl").write_text("precious")
    assert "out.jsonl exists" in str(refused("export", "--out", "out.jsonl"))
    assert Path("out.jsonl").read_text() == "precious"
    done("export", "--out", "out.jsonl", "--force")
    assert Path("out.jsonl").read_text() != "precious"


def test_a_broken_import_names_its_line(job: Path) -> None:
    done("export", "--out", "out.jsonl")
    lines = Path("out.jsonl").read_text().splitlines()
    row = json.loads(lines[4])
    row["logprobs"].pop()
    lines[4] = json.dumps(row)
    Path("out.jsonl").write_text("\n".join(lines))
    error = refused("import", "out.jsonl", "--into", "new")
    assert error.message.startswith("out.jsonl, line 5: its arrays have different lengths")
    assert error.exit_code == 2
    assert not Path("new").exists()


# -- a running job ----------------------------------------------------------------------------------------------------


async def over_grpc(address: str, *arguments: str, token: str = TOKEN) -> str:
    """The output of a command that asks the job's server; it runs beside it, in a thread of its own."""
    return await asyncio.to_thread(done, *arguments, "--address", address, TIDEGATE_TOKEN=token)


async def test_a_running_job_is_asked_over_grpc(live: str, job: Path) -> None:
    for command in (("list",), ("list", "--outcome", "unfinished"), ("show", RICH), ("tree", RICH)):
        assert await over_grpc(live, *command) == await asyncio.to_thread(done, *command)
    await over_grpc(live, "export", "--out", "remote.jsonl")
    await asyncio.to_thread(done, "export", "--out", "local.jsonl")
    assert filecmp.cmp("remote.jsonl", "local.jsonl", shallow=False)


async def test_the_token_rules_are_those_of_other_commands(live: str, job: Path) -> None:
    error = await asyncio.to_thread(refused, "list", "--address", live)
    assert isinstance(error, ConfigError)
    assert "TIDEGATE_TOKEN" in str(error)
    error = await asyncio.to_thread(refused, "list", "--address", live, TIDEGATE_TOKEN="a-wrong-one")
    assert isinstance(error, AccessError)
    assert "a-wrong-one" not in str(error)
    assert "g000000-r0" in await asyncio.to_thread(done, "list", "--address", live, "--job", str(job))
    error = await asyncio.to_thread(refused, "show", "g000077-r0", "--address", live, TIDEGATE_TOKEN=TOKEN)
    assert isinstance(error, NotFoundError)


async def test_a_job_that_does_not_answer_is_said_so(job: Path) -> None:
    error = await asyncio.to_thread(refused, "list", "--address", "127.0.0.1:1", TIDEGATE_TOKEN=TOKEN)
    assert isinstance(error, NotFoundError)
    assert "not reachable at 127.0.0.1:1" in str(error)
