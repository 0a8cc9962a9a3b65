"""Configuration of scoring: which scorer gives runs their reward, and its limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ENTRY_POINT = re.compile(r"[\w.-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class HarborScoring(BaseModel):
    """Each task's own tests/test.sh, in a sandbox without network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["harbor"] = "harbor"
    timeout_s: float | None = Field(default=None, gt=0)
    """Limit of one evaluation; None: the task's `[verifier].timeout_sec`, which also wins where it is smaller."""


class FunctionScoring(BaseModel):
    """A Python function, in a process of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["function"] = "function"
    path: str
    """``package.module:function``, or the name of an entry point of the group ``tidegate.scorers``. It is called with
    the run and the path of a copy of its workspace, and returns a number or a ``Score``."""
    python_path: tuple[str, ...] = ()
    """Folders from which it is imported, besides what is installed; relative to the job's configuration file."""
    timeout_s: float = Field(default=60, gt=0)
    """Limit of one evaluation; then its process group is killed."""
    memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    """Most resident memory of its process tree."""
    max_processes: int = Field(default=64, ge=4)
    """Most processes of it."""

    @field_validator("path")
    @classmethod
    def _path_can_be_a_function(cls, path: str) -> str:
        if not (_DOTTED if ":" in path else _ENTRY_POINT).fullmatch(path):
            raise ValueError("write package.module:function, or the name of an entry point")
        return path


class JudgeScoring(BaseModel):
    """A language model behind an OpenAI-compatible chat completions API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["judge"] = "judge"
    base_url: str
    """URL before ``/chat/completions``, as ``https://api.openai.com/v1``."""
    model: str
    """Name of the judging model."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key where the job is started; empty: no key. Never the key."""
    prompt: str = ""
    """Replaces the built-in prompt. ``{instruction}``, ``{answer}``, ``{diff}`` (what changed in the workspace),
    ``{files}`` (the workspace's text files), ``{scale_min}`` and ``{scale_max}`` are replaced."""
    answer_file: str = ""
    """File of the workspace that is ``{answer}``; empty: the harness's standard output."""
    read: Literal["json_schema", "json", "regex"] = "json"
    """How the number is read: the whole answer is a JSON object with a number ``score`` (``json_schema`` also makes the
    server enforce that), or ``pattern`` finds it."""
    pattern: str = ""
    """Regular expression with a group ``score``, for ``read: regex``. Matches that disagree are no score."""
    scale_min: float = 0.0
    """The score that becomes reward 0."""
    scale_max: float = 10.0
    """The score that becomes reward 1."""
    temperature: float | None = Field(default=0.0, ge=0)
    """Temperature of the judge; None: the server's own."""
    max_output_tokens: int = Field(default=1024, ge=1)
    """Most tokens of an answer of the judge; also what an answer may cost at most."""
    output_limit_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name by which the server knows that limit."""
    max_part_chars: int = Field(default=20_000, ge=100)
    """Longest answer, diff or files in the prompt; the middle of a longer one is left out."""
    timeout_s: float = Field(default=180, gt=0)
    """Limit of one evaluation, retries included; then its process group is killed."""
    request_timeout_s: float = Field(default=60, gt=0)
    """Limit of one request."""
    max_attempts: int = Field(default=5, ge=1)
    """Requests of one evaluation: after 429, 5xx and lost connections it is asked again."""
    backoff_s: float = Field(default=1.0, gt=0)
    """Wait before the second request; doubles each time, and a server's retry-after wins."""
    max_cost_usd: float = Field(ge=0)
    """Most that the job may spend on the judge. A call that could exceed it is not made."""
    price_per_million_input_usd: float = Field(ge=0)
    """Price of a million prompt tokens."""
    price_per_million_output_usd: float = Field(ge=0)
    """Price of a million tokens of the judge's answers."""

    @field_validator("base_url")
    @classmethod
    def _url_is_http(cls, url: str) -> str:
        if not re.match(r"https?://[^/?#\s@]+", url) or "@" in url or "?" in url:
            raise ValueError("write an http or https URL without user, password or query")
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _variable_is_a_name(cls, name: str) -> str:
        if name and not _VARIABLE.fullmatch(name):
            raise ValueError("write the name of an environment variable, never the key itself")
        return name

    @model_validator(mode="after")
    def _choices_fit(self) -> JudgeScoring:
        if self.scale_min >= self.scale_max:
            raise ValueError(f"scale_min ({self.scale_min:g}) must be below scale_max ({self.scale_max:g})")
        if self.prompt and not any(f"{{{name}}}" in self.prompt for name in ("answer", "diff", "files")):
            raise ValueError("prompt shows nothing of the run: use {answer}, {diff} or {files}")
        if (self.read == "regex") != bool(self.pattern):
            raise ValueError("pattern belongs to read: regex, which needs one")
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if self.pattern and "score" not in groups:
            raise ValueError("pattern has no group score: write (?P<score>...) around the number")
        return self


ScoringConfig = Annotated[HarborScoring | FunctionScoring | JudgeScoring, Field(discriminator="kind")]
