"""Rows of an export as plain data and back, for JSON Lines and Parquet alike; what may be wrong with a row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

from services.common.errors import ConfigError
from services.proxy.types import CallPurpose
from services.rollout.types import Sampling
from services.trajectory.export import EARLIER_SCHEMAS, NOT_SAMPLED, SCHEMA, GroupFacts, TrajectoryRow
from services.trajectory.outcome import Outcome
from services.trajectory.paths import Fate
from services.trajectory.types import CallRole, LossReason

ARRAYS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "target_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
}
"""Columns with one value a token."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _one_of(kind: type[StrEnum]) -> AfterValidator:
    """A name of an enumeration, or nothing."""

    def check(value: str) -> str:
        if value not in ("", *kind):
            raise ValueError(f"it is not one of {', '.join(kind)}")
        return value

    return AfterValidator(check)


_Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Ids become names of files and stand in terminals."""


def _object_text(text: str) -> str:
    """JSON of an object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return text


_ObjectText = Annotated[str, AfterValidator(_object_text)]
_SAMPLING = TypeAdapter(Sampling)


def _sampling_text(text: str) -> str:
    """JSON of a ``Sampling``."""
    try:
        _SAMPLING.validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(f"it is no sampling ({error.errors()[0]['msg']})") from None
    unknown = json.loads(text).keys() - {one.name for one in fields(Sampling)}
    if unknown:
        raise ValueError(f"no sampling has {', '.join(sorted(unknown))}")
    return text


class _Function(_Model):
    name: str
    arguments: _ObjectText


class _ToolCall(_Model):
    id: str
    type: Literal["function"]
    function: _Function


class _Message(_Model):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Answer(_Message):
    role: Literal["assistant"]


class _Call(_Model):
    call_id: _Id
    ordinal: NonNegativeInt
    role: Annotated[str, _one_of(CallRole)]
    fate: Annotated[str, _one_of(Fate)]
    is_target: bool
    start: Annotated[int, Field(ge=1)]
    num_sampled_tokens: NonNegativeInt
    num_messages: NonNegativeInt
    finish_reason: Literal["stop", "length", "abort"]
    trainable: bool
    agent_id: str
    parent_agent_id: str = ""
    purpose: Annotated[str, _one_of(CallPurpose)] = str(CallPurpose.TURN)
    cells: list[str]
    started_at_s: FiniteFloat
    ended_at_s: FiniteFloat
    output_text: str
    answer: _Answer | None = None
    num_malformed_calls: NonNegativeInt = 0
    stop_string: str = ""
    sampling: Annotated[str, AfterValidator(_sampling_text)] | None = None
    requested_sampling: _ObjectText
    request: _ObjectText


_NEW_IN_CALLS = {name: one.default for name, one in _Call.model_fields.items() if not one.is_required()}
"""What calls of earlier schemas do not tell."""


class _LeftOut(_Model):
    role: Annotated[str, _one_of(CallRole)]
    num_tokens: NonNegativeInt


class _Selection(_Model):
    max_trajectories: int | None
    seed: int
    num_targets: NonNegativeInt
    num_left_out: NonNegativeInt
    num_not_trainable: NonNegativeInt
    num_superseded: NonNegativeInt
    left_out: list[_LeftOut]


class _Group(_Model):
    version: int | None
    state: Literal["", "open", "ready", "lost", "dropped", "cancelled"]
    reason: str
    loss_reason: Annotated[str, _one_of(LossReason)]
    trained_step: int | None


class _Row(_Model):
    """The columns of a row but for those with one value a token."""

    job_id: str
    group_id: _Id
    group: _Group
    task_name: str
    is_eval: bool
    run_id: _Id
    attempt: NonNegativeInt
    outcome: Annotated[str, _one_of(Outcome)] | None
    reward: FiniteFloat | None
    advantage: FiniteFloat | None
    wall_s: FiniteFloat | None
    detail: str
    evaluated_ref: str
    score_details: dict[str, Any]
    trajectory: NonNegativeInt
    num_trajectories: NonNegativeInt
    role: Annotated[str, _one_of(CallRole)]
    is_selected: bool
    draw: NonNegativeInt | None
    messages: list[_Message]
    tools: list[dict[str, Any]]
    num_prompt_tokens: NonNegativeInt
    n_run: NonNegativeInt
    target_weight: FiniteFloat
    calls: list[_Call]
    selection: _Selection | None


def plain(row: TrajectoryRow) -> dict[str, Any]:
    """A row as JSON-ready data. Numbers come back exactly as they were."""
    data = {"schema": SCHEMA} | {one.name: getattr(row, one.name) for one in fields(row)}
    data["group"] = asdict(row.group)
    data["token_ids"] = row.token_ids.tolist()
    data["target_mask"] = row.target_mask.astype(np.int8).tolist()
    data["logprobs"] = [float(f"{value:.9g}") for value in row.logprobs.tolist()]  # 9 digits tell float32 apart
    data["versions"] = row.versions.tolist()
    return data


def row_of(data: Mapping[str, Any]) -> TrajectoryRow:
    """A row from plain data, checked. ``ConfigError`` with what is wrong."""
    if data.get("schema") not in (SCHEMA, *EARLIER_SCHEMAS):
        raise ConfigError(f"its schema is {data.get('schema')!r}, not {SCHEMA!r}.")
    given = {name: value for name, value in data.items() if name != "schema"}
    arrays = {name: _array(name, given.pop(name, None), kind) for name, kind in ARRAYS.items()}
    try:
        checked = _Row.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{place}: {said} (found {_short(first['input'])}).") from None
    calls = [{**_NEW_IN_CALLS, **call} for call in given["calls"]]
    row = TrajectoryRow(**{**given, **arrays, "calls": calls, "group": GroupFacts(**given["group"])})
    _check_lengths(row)
    _check_selection(row, checked)
    _check_calls(row)
    return row


def _array(name: str, given: Any, kind: type[np.generic]) -> NDArray[Any]:
    if not isinstance(given, list | np.ndarray):
        raise ConfigError(f"{name} is missing, or no list.")
    found = np.asarray(given)
    if not len(found):
        return np.empty(0, dtype=kind)
    if found.ndim != 1 or found.dtype.kind not in ("f" if kind is np.float32 else "iub") + "iu":
        raise ConfigError(f"{name} is no list of {'numbers' if kind is np.float32 else 'whole numbers'}.")
    if kind is np.float32:
        with np.errstate(over="ignore"):
            found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise ConfigError(f"{name}[{int(np.argmin(np.isfinite(found)))}] is not a finite number.")
        return found
    low, high = {"token_ids": (0, 2**31 - 1), "target_mask": (0, 1)}.get(name, (NOT_SAMPLED, 2**31 - 1))
    if found.min() < low or found.max() > high:
        raise ConfigError(f"{name} has numbers outside {low}..{high}.")
    return found.astype(kind)


def _check_lengths(row: TrajectoryRow) -> None:
    lengths = {name: len(getattr(row, name)) for name in ARRAYS}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"its arrays have different lengths: {told}.")


def _check_selection(row: TrajectoryRow, checked: _Row) -> None:
    if row.is_selected != (row.draw is not None):
        raise ConfigError(f"is_selected is {row.is_selected}, draw is {row.draw}: one of them is wrong.")
    if row.is_selected and row.selection is None:
        raise ConfigError("it is selected, but has no selection.")
    if row.n_run != (0 if checked.selection is None else checked.selection.num_targets):
        raise ConfigError(f"n_run is {row.n_run}, selection.num_targets another number.")
    if not math.isclose(row.target_weight * row.n_run, 1.0 if row.n_run else 0.0, rel_tol=1e-12):
        raise ConfigError(f"target_weight is {row.target_weight}, not 1 / n_run.")
    if row.target_mask.any() and not row.is_selected:
        raise ConfigError("it has targets, but is not selected.")


def _check_calls(row: TrajectoryRow) -> None:
    """The sampled tokens are exactly those of the calls, and each call is a target as a whole or not at all."""
    sampled = np.zeros(len(row.token_ids), dtype=np.bool_)
    targets = np.zeros(len(row.token_ids), dtype=np.bool_)
    end, ordinal = 0, -1
    for call in row.calls:
        start, stop = call["start"], call["start"] + call["num_sampled_tokens"]
        if start < end or stop > len(row.token_ids) or call["ordinal"] <= ordinal:
            raise ConfigError(f"call {call['call_id']} does not follow the one before it, or ends behind the row.")
        if call["num_messages"] > len(row.messages):
            raise ConfigError(f"call {call['call_id']} had {call['num_messages']} messages, the row has fewer.")
        sampled[start:stop] = True
        targets[start:stop] = call["is_target"]
        end, ordinal = stop, call["ordinal"]
    if end != len(row.token_ids) and not (row.calls and row.calls[-1]["num_sampled_tokens"] == 0):
        raise ConfigError(f"its calls end at token {end}, the row at {len(row.token_ids)}.")
    if not np.array_equal(row.versions != NOT_SAMPLED, sampled):
        raise ConfigError("versions do not stand exactly where the calls sampled.")
    if not np.array_equal(row.target_mask, targets):
        raise ConfigError("target_mask does not stand exactly where the calls that are targets sampled.")
    if row.logprobs[~sampled].any():
        raise ConfigError("a token that was not sampled has a log-probability.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_RUN_FIELDS = (
    "job_id", "group_id", "group", "task_name", "is_eval", "attempt", "outcome", "reward", "advantage", "wall_s",
    "detail", "evaluated_ref", "score_details", "num_trajectories", "n_run", "selection",
)  # fmt: skip
"""What all rows of a run have alike."""


@dataclass
class RunCheck:
    """Takes in the rows of one run and finds what is wrong between them."""

    first: TrajectoryRow | None = None
    _calls: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    _trajectories: set[int] = field(default_factory=set)
    _draws: set[int] = field(default_factory=set)
    _targets: dict[str, int] = field(default_factory=dict)

    def take(self, row: TrajectoryRow) -> None:
        """Check a further row against those before it. ``ConfigError`` with what is wrong."""
        first = self.first = self.first or row
        for name in _RUN_FIELDS:
            if getattr(row, name) != getattr(first, name):
                raise ConfigError(f"{name} differs from that of the run's first row.")
        if row.trajectory in self._trajectories:
            raise ConfigError(f"the run has trajectory {row.trajectory} twice.")
        self._trajectories.add(row.trajectory)
        if row.draw is not None and row.draw in self._draws:
            raise ConfigError(f"two trajectories of the run have the draw {row.draw}.")
        if row.draw is not None:
            self._draws.add(row.draw)
        for at, call in enumerate(row.calls):
            self._take_call(row, at, call)

    def end(self) -> None:
        """Check what only the whole run tells. ``ConfigError`` with what is wrong."""
        num_targets = sum(self._targets.values())
        if self.first is not None and num_targets != self.first.n_run:
            raise ConfigError(
                f"run {self.first.run_id} has {num_targets} targets in its rows, and n_run is {self.first.n_run}.",
            )

    def _take_call(self, row: TrajectoryRow, at: int, call: dict[str, Any]) -> None:
        call_id, stop = call["call_id"], call["start"] + call["num_sampled_tokens"]
        start = row.calls[at - 1]["start"] + row.calls[at - 1]["num_sampled_tokens"] if at else 0
        alike = {name: value for name, value in call.items() if name not in ("is_target", "request", "num_messages")}
        facts = (
            row.calls[at - 1]["call_id"] if at else None,
            json.dumps(alike, sort_keys=True),
            hash(row.token_ids[start:stop].tobytes()),
            hash(row.logprobs[start:stop].tobytes()),
            hash(row.versions[start:stop].tobytes()),
        )
        if self._calls.setdefault(call_id, facts) != facts:
            raise ConfigError(f"call {call_id} is another one than in an earlier row of its run.")
        if call["is_target"] and self._targets.setdefault(call_id, 0):
            raise ConfigError(f"call {call_id} is a target in two rows of its run.")
        if call["is_target"]:
            self._targets[call_id] = call["num_sampled_tokens"]
