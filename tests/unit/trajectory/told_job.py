"""A job's folder with one run whose answers were told apart: reasoning, tool calls, a side call, a named subagent."""

from __future__ import annotations

from pathlib import Path

from services.proxy.types import CallPurpose, CanonicalRequest, Lineage, Message, ParsedAnswer, ToolCall, ToolChoice
from services.rollout.types import Sampling
from tests.unit.trajectory.world import call, make_result, make_spec, open_shard

RUN = "g000000-r0"
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
SYSTEM = Message("system", "you work with tools")
TASK = Message("user", "count the files")
LOOKED = ParsedAnswer(
    "I look.",
    "what is there?",
    (ToolCall("call_1", "bash", {"command": "ls"}), ToolCall("call_2", "bash", {"command": "wc", "text": "\udcff"})),
    num_malformed_calls=1,
)
LOOKED_RAW = '<think>what is there?</think>I look.<tool_call>{"name": "bash", ...}</tool_call>'
SENT_BACK = Message(  # without the reasoning, and with ids of the harness's own
    "assistant",
    "I look.",
    tool_calls=(ToolCall("toolu_1", "bash", {"command": "ls"}), LOOKED.tool_calls[1]),
)
RESULTS = (
    Message("tool", "a b", tool_call_id="toolu_1"),
    Message("tool", "2", tool_call_id="call_2"),
)
DONE = ParsedAnswer("Two files.", "a and b: two")
DONE_RAW = "<think>a and b: two</think>Two files.</answer>"
HELD = Sampling(temperature=0.7, max_tokens=32, stop=("</answer>",), seed=5, json_schema='{"type": "object"}')


def _request(*messages: Message, lineage: Lineage, choice: int = 0) -> CanonicalRequest:
    return CanonicalRequest(
        "openai_chat",
        "policy",
        messages,
        tools=(TOOL,) if lineage.purpose is CallPurpose.TURN else (),
        requested_sampling={"temperature": 0.1, "stop": ["</answer>"]},
        tool_choice=ToolChoice(is_parallel=False),
        response_schema={"type": "object", "properties": {}},
        num_choices=2,
        choice=choice,
        num_instructions=1,
        lineage=lineage,
        is_retry=True,
        answer_form={"store": False},
    )


async def make_told_job(folder: Path) -> None:
    """One ready run: a turn with two tool calls, a title on the side, a subagent, and the last turn."""
    main, title = Lineage("s", "root"), Lineage("s", "root", purpose=CallPurpose.SIDE)
    subagent = Lineage("s", "helper", "root")
    shard = open_shard(folder / "trajectory")
    await shard.open_group(make_spec())
    key = await shard.open_attempt(RUN, 0)
    opening = (SYSTEM, TASK)
    at_work = {"answer": LOOKED, "sampling": HELD}
    await call(shard, RUN, key, _request(*opening, lineage=main, choice=1), LOOKED_RAW, **at_work)
    await call(shard, RUN, key, _request(Message("user", "a title, please"), lineage=title), "Counting")
    helping = (Message("system", "you help"), Message("user", "list the folder"))
    helped = ParsedAnswer("", "", (ToolCall("call_3", "bash", {}),))
    await call(shard, RUN, key, _request(*helping, lineage=subagent), "<tool_call>...", answer=helped)
    last = _request(*opening, SENT_BACK, *RESULTS, lineage=main)
    ended = {"answer": DONE, "sampling": HELD, "stop_string": "</answer>"}
    await call(shard, RUN, key, last, DONE_RAW, **ended)
    await shard.close_attempt(RUN, 0)
    await shard.finish_run(make_result(RUN, 1.0))
    await shard.open_attempt("g000000-r1", 0)
    await shard.close_attempt("g000000-r1", 0)
    await shard.finish_run(make_result("g000000-r1", 0.0))
    await shard.finish_group("g000000")
    await shard.close()
