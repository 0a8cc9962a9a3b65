"""A language model as a scorer, through an OpenAI-compatible chat completions API, within a budget."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path
from typing import Any

import httpx

from services.rollout.scoring.base import Score, ScoredRunView, invalid
from services.rollout.scoring.budget import BUDGET_FILE, Budget, BudgetSpentError
from services.rollout.scoring.config import JudgeScoring
from services.rollout.scoring.contents import diff, listing, read_texts
from services.rollout.scoring.harbor import read_untrusted
from services.rollout.scoring.judge_text import (
    cost_usd,
    messages,
    read_score,
    request_body,
    reward_of,
    worst_cost_usd,
)
from services.trajectory.outcome import Outcome

_MAX_ANSWER_FILE_BYTES = 1 << 20
_MAX_BACKOFF_S = 60.0
_ERRORS_WORTH_ASKING_AGAIN = (408, 409, 425, 429)


class JudgeScorer:
    """Asks a judge about a run's answer and workspace."""

    def __init__(self, config: JudgeScoring, api_key: str, job_dir: Path) -> None:
        """``job_dir`` holds the ledger that all runners of the job share."""
        self._config = config
        self._api_key = api_key
        self._budget = Budget(job_dir / BUDGET_FILE, config.max_cost_usd)

    def score(self, run: ScoredRunView, workspace: Path) -> Score:
        """Ask until there is an answer, within the time limit. A call that the budget does not cover is not made."""
        deadline_s = time.monotonic() + self._config.timeout_s
        try:
            asked = self._messages(run, workspace)
        except (OSError, UnicodeDecodeError) as error:
            return invalid(f"judge: {self._config.answer_file} of the workspace cannot be read: {error}")
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        with httpx.Client(headers=headers) as client:
            why = ""
            for attempt in range(self._config.max_attempts):
                left_s = deadline_s - time.monotonic()
                answer = self._ask(client, asked, min(self._config.request_timeout_s, left_s))
                if isinstance(answer, Score):
                    return answer
                why, wait_s = answer
                wait_s = self._backoff_s(attempt) if wait_s is None else wait_s
                if time.monotonic() + wait_s >= deadline_s:
                    limit = f"no answer within {self._config.timeout_s:g} s"
                    return invalid(f"judge: {limit}: {why}", Outcome.VERIFIER_TIMEOUT)
                if attempt + 1 < self._config.max_attempts:
                    time.sleep(wait_s)
        return invalid(f"judge: no answer to {self._config.max_attempts} requests: {why}")

    def _messages(self, run: ScoredRunView, workspace: Path) -> list[dict[str, str]]:
        config = self._config
        answer = run.answer
        if config.answer_file:
            file = workspace / config.answer_file
            if not file.resolve().is_relative_to(workspace.resolve()):
                raise OSError("it leads out of the workspace")
            answer = read_untrusted(file, _MAX_ANSWER_FILE_BYTES)
        before, after = read_texts(Path(run.task.path, "environment", "files")), read_texts(workspace)
        untrusted = {"answer": answer, "diff": diff(before, after), "files": listing(after)}
        mark = f"agent-{secrets.token_hex(8)}"
        return messages(config, instruction=run.task.instruction, untrusted=untrusted, mark=mark)

    def _ask(
        self, client: httpx.Client, asked: list[dict[str, str]], timeout_s: float
    ) -> Score | tuple[str, float | None]:
        """One request: a score, or what befell it and after how many seconds the server wants to be asked again."""
        try:
            reservation = self._budget.reserve(worst_cost_usd(self._config, asked))
        except BudgetSpentError as error:
            return invalid(f"judge: {error}", is_final=True)
        except (OSError, ValueError, TypeError) as error:
            return invalid(f"judge: its budget cannot be kept: {error}", is_final=True)
        try:
            url = f"{self._config.base_url}/chat/completions"
            response = client.post(url, json=request_body(self._config, asked), timeout=max(0.05, timeout_s))
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):  # else it may have been billed
                self._budget.settle(reservation, 0.0)
            return f"{type(error).__name__}: {error}", None
        if response.status_code == 200:
            return self._scored(response, reservation, asked)
        self._budget.settle(reservation, 0.0)
        why = f"it answered {response.status_code}: {response.text[:200]}"
        if response.status_code in _ERRORS_WORTH_ASKING_AGAIN or response.status_code >= 500:
            return why, _retry_after_s(response)
        return invalid(f"judge: {why}", is_final=True)

    def _scored(self, response: httpx.Response, reservation: str, asked: list[dict[str, str]]) -> Score:
        try:
            body = response.json()
            text = body["choices"][0]["message"]["content"] or ""
            tokens = _tokens(body)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            self._budget.settle(reservation, worst_cost_usd(self._config, asked))
            return invalid(f"judge: it answered no chat completion: {response.text[:200]!r}")
        spent_usd = worst_cost_usd(self._config, asked) if tokens is None else cost_usd(self._config, *tokens)
        self._budget.settle(reservation, spent_usd)
        details = {"judge": self._config.model, "cost_usd": spent_usd}
        score, reason = read_score(self._config, str(text))
        if score is None:
            return invalid(f"judge: {reason}", details=details)
        return Score(
            reward_of(self._config, score), True, details={**details, "judge_score": score, "judge_reason": reason}
        )

    def _backoff_s(self, attempt: int) -> float:
        """Doubles with each attempt; half of it is random, so that many runs do not ask at once."""
        return min(self._config.backoff_s * 2**attempt, _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)


def _tokens(body: dict[str, Any]) -> tuple[int, int] | None:
    """Prompt and answer tokens that are billed, if the answer says so."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        return None
    return int(usage["prompt_tokens"]), int(usage["completion_tokens"])


def _retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.replace(".", "", 1).isdecimal() else None
