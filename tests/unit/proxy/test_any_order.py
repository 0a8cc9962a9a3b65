"""Calls of one run in any order: begun, continued, repeated, retried, cut, in three dialects, streamed or not."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule

from services.trajectory.types import CallRecord
from tests.unit.proxy.bodies import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES
from tests.unit.proxy.live_world import DEADLINE_S, LiveProxy
from tests.unit.proxy.wire import Wire, read_answer
from tests.waiting import wait_until

_BASH = {"name": "bash", "description": "Runs a command."}
_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": {**_BASH, "parameters": _PARAMETERS}}]},
    RESPONSES: {"tools": [{"type": "function", **_BASH, "parameters": _PARAMETERS}]},
    MESSAGES: {"tools": [{**_BASH, "input_schema": _PARAMETERS}], "max_tokens": 1000},
}


@dataclass
class Talk:
    """A conversation in one dialect, as its harness has it."""

    dialect: str
    body: dict[str, Any]
    call_id: str = ""
    """Of the newest answer."""
    given_back: list[dict[str, Any]] = field(default_factory=list)
    """That answer, as the next request carries it."""

    @property
    def name(self) -> str:
        return "input" if self.dialect == RESPONSES else "messages"

    def longer(self, *items: dict[str, Any], **more: Any) -> Talk:
        """It with the newest answer and something new behind."""
        history = [*self.body[self.name], *self.given_back, *items]
        return Talk(self.dialect, {**self.body, self.name: history, **more})


class AnyOrder(RuleBasedStateMachine):
    """What a client was given is stored; what continues an answer is built on it; a cut costs nothing twice."""

    talks: Bundle[Talk] = Bundle("talks")

    def __init__(self) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        folder = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-any-order-"))
        self.proxy = self._closing.enter_context(
            LiveProxy(Path(folder), max_tokens=1000, max_model_len=1 << 20, keep_alive_s=0.2)
        )
        self.num_said = 0
        self.delivered: set[str] = set()

    def teardown(self) -> None:
        with self._closing:
            stored = list(self.calls)
            assert set(stored) >= self.delivered
            self.proxy.restart_shard()
            self.begin(CHAT, False, False)
            assert list(self.calls)[:-1] == stored
            assert self.proxy.faults.told == [], self.proxy.faults.told[0]

    @property
    def calls(self) -> dict[str, CallRecord]:
        return {call.call_id: call for call in self.proxy.calls}

    @rule(target=talks, dialect=st.sampled_from(sorted(_BODIES)), stream=st.booleans(), has_tools=st.booleans())
    def begin(self, dialect: str, stream: bool, has_tools: bool) -> Talk:
        body = {name: value for name, value in _BODIES[dialect].items() if has_tools or name != "tools"}
        talk = Talk(dialect, {"model": "m", **body})
        talk.body |= {talk.name: [self.said()], "stream": stream}
        self.ask(talk)
        assert self.calls[talk.call_id].parent_call_id is None
        return talk

    @rule(target=talks, talk=talks, stream=st.booleans())
    def go_on(self, talk: Talk, stream: bool) -> Talk:
        longer = talk.longer(self.said(), stream=stream)
        self.ask(longer)
        self.check_built_on(longer, talk)
        return longer

    @rule(target=talks, talk=talks, stream=st.booleans())
    def go_on_behind_a_named_answer(self, talk: Talk, stream: bool) -> Talk:
        if talk.dialect != RESPONSES:
            return talk
        said = self.said()
        longer = talk.longer(said, stream=stream)
        named = {**longer.body, "input": [said], "previous_response_id": f"resp_{talk.call_id}"}
        asked = Talk(RESPONSES, named)
        self.ask(asked)
        self.check_built_on(asked, talk)
        longer.call_id, longer.given_back = asked.call_id, asked.given_back
        return longer

    @rule(talk=talks, stream=st.booleans())
    def ask_once_more(self, talk: Talk, stream: bool) -> None:
        """Whoever has an answer and asks again wants another one."""
        again = Talk(talk.dialect, {**talk.body, "stream": stream})
        self.ask(again)
        assert again.call_id != talk.call_id

    @rule(talk=talks, streams=st.tuples(st.booleans(), st.booleans()))
    def retry(self, talk: Talk, streams: tuple[bool, bool]) -> None:
        """Whoever says that it tries again gets what there is."""
        one, other = (Talk(talk.dialect, {**talk.body, "stream": stream}) for stream in streams)
        self.ask(one)
        self.ask(other, retry=True)
        assert other.call_id == one.call_id
        assert other.given_back == one.given_back

    @rule(target=talks, talk=talks, num_pieces=st.integers(0, 4), streams=st.tuples(st.booleans(), st.booleans()))
    def cut_and_ask_again(self, talk: Talk, num_pieces: int, streams: tuple[bool, bool]) -> Talk:
        """The client goes away when some pieces were made, and asks again: it goes on behind them."""
        model, longer = self.proxy.model, talk.longer(self.said(), stream=streams[0])
        known, num_asked, num_aborted = set(self.calls), len(model.requests), len(model.aborted)
        model.hangs_after = num_pieces
        with Wire(self.proxy.address) as wire:
            wire.post(f"/run/{self.proxy.key}{longer.dialect}", longer.body)
            wait_until(lambda: model.is_hanging or len(self.calls) > len(known), DEADLINE_S, poll_s=0.002)
        model.hangs_after = None
        wait_until(lambda: len(model.aborted) > num_aborted or len(self.calls) > len(known), DEADLINE_S, poll_s=0.002)
        is_whole = len(self.calls) > len(known)
        longer.body["stream"] = streams[1]
        self.ask(longer, retry=is_whole)
        made = [len(request.generated_ids) > 0 for request in model.requests[num_asked:]]
        assert made == ([False] if is_whole else [False, num_pieces > 0])
        assert set(self.calls) - known == {longer.call_id}
        return longer

    @rule(talk=talks)
    def count(self, talk: Talk) -> None:
        if talk.dialect == MESSAGES:
            answer = self.proxy.http.post(f"/run/{self.proxy.key}{COUNT_TOKENS}", json=talk.body)
            assert answer.json() == {"input_tokens": len(self.calls[talk.call_id].prompt_ids)}

    @rule()
    def make_the_shard_anew(self) -> None:
        self.proxy.restart_shard()

    # --- what the rules are made of ----------------------------------------------------------------------------

    def said(self) -> dict[str, Any]:
        self.num_said += 1
        return {"role": "user", "content": f"saying {self.num_said}"}

    def ask(self, talk: Talk, *, retry: bool = False) -> None:
        headers = {"x-stainless-retry-count": "1"} if retry else None
        http = self.proxy.http.post(f"/run/{self.proxy.key}{talk.dialect}", json=talk.body, headers=headers)
        assert http.status_code == 200, http.text
        talk.call_id, talk.given_back = read_answer(talk.dialect, http.text)
        self.delivered.add(talk.call_id)

    def check_built_on(self, longer: Talk, talk: Talk) -> None:
        """Its parent is the call of the answer, or one that asked and answered the very same."""
        calls = self.calls
        parent, answered = calls[calls[longer.call_id].parent_call_id or ""], calls[talk.call_id]
        assert parent.prompt_ids.tolist() == answered.prompt_ids.tolist()
        assert parent.output_ids.tolist() == answered.output_ids.tolist()
        history = [*parent.prompt_ids.tolist(), *parent.output_ids.tolist()]
        assert calls[longer.call_id].prompt_ids[: len(history)].tolist() == history


AnyOrder.TestCase.settings = settings(
    max_examples=max(2, int(os.environ.get("TIDEGATE_EXAMPLES", "20")) // 10),
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = AnyOrder.TestCase
