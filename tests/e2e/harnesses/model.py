"""A model that follows a script: it reads its prompt's tokens, sees how far the task is, and says what comes next.

It knows nothing but the prompt: which conversation this is, how many of its turns are done and how the harness's tools
are called all stands there. So a call that is made again gets the same answer, and an agent that lost its history
would start anew.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from services.proxy.renderer import HfRenderer
from tests.unit.proxy.templates import TOOLS_AND_REASONING

MAIN, SUB = "TIDE-MAIN", "TIDE-SUB"
"""Stand in the prompts of the main task and of the delegated one."""
TASK = f"{MAIN}: write the numbers one and two to tide.txt, one a line, then the word sub to sub.txt and say so."
DELEGATED = f"{SUB}: create the file {{0}}.txt with the word {{0}} in it and report when the file is there."
HELPERS = ("sub", "also")
"""What the agents are asked to write, one each."""
FINAL = "All is done: the tide has turned."
SUB_FINAL = "The file is there with its word in it."
TITLE = "Turning tide"
STATE = "TIDE-STATE"
"""Stands in summaries, with the number of turns that are done."""
ACKNOWLEDGED = "Got it. Thanks for the additional context!"
RESUME = "The connection dropped mid-response"
"""Qwen Code's words when it wants the rest of an answer that was cut behind some text."""
END_OF_TURN = "<|im_end|>"

_SHELLS = ("Bash", "bash", "exec_command", "shell", "run_shell_command")
_AGENTS = ("Agent", "agent", "task", "multi_agent_v1.spawn_agent", "multi_agent_v1__spawn_agent", "spawn_agent")
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WAITS = ("multi_agent_v1.wait_agent", "multi_agent_v1__wait_agent", "wait_agent")


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that is trained on the spot, with a chat template that has tools and reasoning."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TASK, DELEGATED, FINAL, SUB_FINAL, TOOLS_AND_REASONING, __doc__ or ""] * 3, trainer)
    # as Qwen3 has them: tokens of their own, but no special ones
    words = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_TURN, pad_token="<|endoftext|>")
    wrapped.chat_template = TOOLS_AND_REASONING
    return wrapped


def write_model(folder: Path) -> None:
    """What the proxy and the shard read of a model: its tokenizer, its chat template, its configuration."""
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))


@functools.cache
def renderer() -> HfRenderer:
    return HfRenderer(tokenizer())


def say(ids: Sequence[int]) -> str:
    """The text of tokens as an engine gives it: without special ones."""
    text: str = tokenizer().decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def answer_ids(text: str) -> list[int]:
    """Tokens of an answer, with the end of its turn. Cut where no tokenizer would: only stored ids can be right."""
    pieces = re.split(r"(<[/\w|]+>)", text)
    parts = [
        part for piece in pieces for part in ([piece] if piece.startswith("<") else re.findall(r"(?s).{1,7}", piece))
    ]
    return [one for part in [*parts, END_OF_TURN] for one in renderer().encode(part)]


@dataclass(frozen=True)
class Turn:
    """One message in a prompt."""

    role: str
    """'tool' for the result of a call."""
    text: str


@dataclass(frozen=True)
class Seen:
    """What a prompt says."""

    tools: Mapping[str, Mapping[str, Any]]
    """Name -> JSON schema of the parameters."""
    turns: tuple[Turn, ...]

    @property
    def place(self) -> tuple[str, int]:
        """Which conversation this is, and how many of its turns are done. ``("", 0)``: none of the task's."""
        for at in range(len(self.turns) - 1, -1, -1):
            turn = self.turns[at]
            later = self.turns[at + 1 :]
            num_done = sum(
                # opencode keeps what was cut in front of it; Qwen Code answers for the model behind a compaction
                one.role == "assistant" and before.role != "assistant" and one.text.strip() != ACKNOWLEDGED
                for before, one in zip((turn, *later), later, strict=False)
            )
            state = re.findall(rf"{STATE} (\w[\w-]*) (\d+)", turn.text)
            if state and turn.role != "tool":
                return state[-1][0], int(state[-1][1]) + num_done
            if turn.role == "user":
                found = [mark for mark in (SUB, MAIN) if f"{mark}:" in turn.text]
                if found:
                    return found[0], num_done
        return "", 0

    @property
    def asked(self) -> str:
        """What was said last by neither the model nor a tool."""
        return next((turn.text for turn in reversed(self.turns) if turn.role in ("user", "system")), "")

    @property
    def results(self) -> list[str]:
        return [turn.text for turn in self.turns if turn.role == "tool"]


def read_prompt(text: str) -> Seen:
    """Take a rendered prompt apart."""
    tools: dict[str, Mapping[str, Any]] = {}
    turns: list[Turn] = []
    for role, body in re.findall(r"(?s)<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", text):
        if role == "system" and not turns and not tools and body.startswith('{"'):
            for line in body.strip().splitlines():
                function = json.loads(line)["function"]
                tools[function["name"]] = function.get("parameters") or {}
            continue
        is_result = role == "user" and body.startswith("<tool_response>")
        turns.append(Turn("tool" if is_result else role, body))
    if turns and turns[-1].role == "assistant":
        turns.pop()  # the answer that is to be made
    return Seen(tools, tuple(turns))


@dataclass(frozen=True)
class Script:
    """How a harness wants to be driven."""

    finish_command: str = ""
    """A shell command that ends the work; empty: an answer without calls does."""
    num_helpers: int = 0
    """So many other agents do a part of the work, side by side; 0: the harness has no such tool."""
    waits: bool = False
    """Delegating only starts the other agent; its answer must be waited for."""
    reasons: bool = True
    """The model thinks before it answers."""

    def next_answer(self, prompt: str) -> str:
        """What the model says behind a prompt."""
        seen = read_prompt(prompt)
        mark, num_done = seen.place
        if is_title(seen):
            return TITLE
        if is_summary(seen):
            return _summary(seen.asked, mark, num_done)
        if RESUME in seen.asked:
            said = next(turn.text for turn in reversed(seen.turns) if turn.role == "assistant")
            return self._main(seen, num_done - 1).partition(said.strip())[2].lstrip()
        if mark == MAIN and seen.tools:
            return self._main(seen, num_done)
        if mark == SUB and seen.tools:
            return self._sub(seen, num_done)
        return "There is nothing to be done here."

    @property
    def main_steps(self) -> tuple[str, ...]:
        """The turns of the main conversation."""
        delegated = ("delegate", *(("wait",) if self.waits else ())) if self.num_helpers else ()
        return ("one", "two", *delegated, "several", "look", "end")

    def _main(self, seen: Seen, num_done: int) -> str:
        step = self.main_steps[min(num_done, len(self.main_steps) - 1)]
        shell = functools.partial(call_shell, seen.tools)
        if step == "one":
            return self._think("First comes one.") + "I begin with one.\n" + shell("echo one > tide.txt")
        if step == "two":
            return self._think('Then "two" — with quotes & ünïcode.') + shell('printf "%s\\n" "two" >> tide.txt')
        if step == "delegate":
            prompts = map(DELEGATED.format, HELPERS[: self.num_helpers])
            return "Others shall do this.\n" + "\n".join(call_agent(seen.tools, prompt) for prompt in prompts)
        if step == "wait":
            agents = [re.findall(_UUID, result)[0] for result in seen.results[-self.num_helpers :]]
            return "\n".join(call_wait(seen.tools, agent) for agent in agents)
        if step == "several":
            commands = ["cat tide.txt | wc -l > count.txt", "echo 'a <b> & \"c\"' > odd.txt"]
            commands += [] if self.num_helpers else ["echo sub > sub.txt"]
            return "Now several things.\n" + "\n".join(map(shell, commands))
        if step == "look":
            return self._think("Is it all there?") + "I look at it.\n" + shell("cat tide.txt")
        return f"{FINAL}\n" + shell(self.finish_command) if self.finish_command else self._think("It is.") + FINAL

    def _sub(self, seen: Seen, num_done: int) -> str:
        asked = next(turn.text for turn in reversed(seen.turns) if turn.role == "user" and f"{SUB}:" in turn.text)
        word = re.findall(r"create the file (\w+)\.txt", asked)[-1]
        if num_done == 0:
            return self._think(f"I was asked for {word}.") + call_shell(seen.tools, f"echo {word} > {word}.txt")
        if num_done == 1:
            return "I check it.\n" + call_shell(seen.tools, f"cat {word}.txt")
        return SUB_FINAL

    def _think(self, thought: str) -> str:
        return f"<think>\n{thought}\n</think>\n" if self.reasons else ""


def is_title(seen: Seen) -> bool:
    """Whether the conversation is to be given a name."""
    texts = [turn.text.lower() for turn in seen.turns if turn.role != "tool"]
    return not seen.tools and any("title generator" in text or "generate a title" in text for text in texts)


def is_summary(seen: Seen) -> bool:
    """Whether a summary is asked for, to go on from: in a last message of its own, or without tools."""
    asked = seen.asked.lower()
    wants = "summar" in asked or "state_snapshot" in asked or "compaction" in asked
    if not seen.tools:
        return wants or any("summariz" in turn.text.lower() for turn in seen.turns if turn.role == "system")
    return wants and not any(f"{mark}" in seen.asked for mark in (MAIN, SUB, STATE))


def _summary(asked: str, mark: str, num_done: int) -> str:
    tag = "state_snapshot" if "state_snapshot" in asked else "summary"
    return (
        "<analysis>\nThe turns are counted.\n</analysis>\n"
        f"<{tag}>\n{STATE} {mark} {num_done}: the file tide.txt was begun and its lines stand as they were asked for.\n"
        f"What is still to be done follows from the number of turns named above; nothing failed so far.\n</{tag}>"
    )


def call_shell(tools: Mapping[str, Mapping[str, Any]], command: str) -> str:
    """A call of the harness's shell."""
    name = _first(tools, _SHELLS)
    properties = tools[name].get("properties", {})
    parameter = "cmd" if "cmd" in properties else "command"
    is_list = properties.get(parameter, {}).get("type") == "array"
    return tool_call(name, fill(tools[name], {parameter: ["bash", "-lc", command] if is_list else command}))


def call_agent(tools: Mapping[str, Mapping[str, Any]], prompt: str) -> str:
    """A call that delegates."""
    name = _first(tools, _AGENTS)
    properties = tools[name].get("properties", {})
    wanted = {
        "prompt": prompt,
        "message": prompt,
        "description": "make sub.txt",
        "task_name": "make_sub",
        "subagent_type": "general" if name == "task" else "general-purpose",
        "run_in_background": False,
        "fork_turns": "none" if name.endswith("spawn_agent") else None,
    }
    given = {key: value for key, value in wanted.items() if key in properties and value is not None}
    return tool_call(name, fill(tools[name], given))


def call_wait(tools: Mapping[str, Mapping[str, Any]], agent_id: str) -> str:
    """A call that waits for an agent."""
    name = _first(tools, _WAITS)
    return tool_call(name, fill(tools[name], {"targets": [agent_id], "timeout_ms": 60_000}))


def fill(schema: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with something for each parameter that must be given."""
    blanks = {"boolean": False, "integer": 1000, "number": 1000, "array": [], "object": {}}
    for name in schema.get("required", []):
        parameter = schema.get("properties", {}).get(name, {})
        blank = parameter["enum"][0] if "enum" in parameter else blanks.get(parameter.get("type"), "x")
        given.setdefault(name, blank)
    return given


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in the form that Hermes and Qwen models write, with other spacing than any serialiser's."""
    spaced = json.dumps(arguments, ensure_ascii=False, separators=(" ,", ":  "))
    return f'<tool_call>\n{{"name":"{name}",  "arguments": {spaced}}}\n</tool_call>'


def _first(tools: Mapping[str, Any], names: Sequence[str]) -> str:
    found = [name for name in names if name in tools]
    assert found, f"none of {names} among the tools {sorted(tools)}"
    return found[0]
