"""Export files: written beside their name and renamed when they are whole, read row by row."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.errors import ConfigError, MachineError
from services.trajectory.export import SCHEMA, TrajectoryRow
from services.trajectory.rows import ARRAYS, plain, row_of

_TOKENS_A_GROUP = 1 << 20
_ROWS_A_GROUP = 256
_ROWS_A_READ = 8


class Format(StrEnum):
    """Formats of an export."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    ATIF = "atif"
    """A folder with documents of Harbor's Agent Trajectory Interchange Format."""


class RowWriter(Protocol):
    """Takes the rows of an export."""

    def write(self, rows: Sequence[TrajectoryRow]) -> None: ...
    def close(self) -> None: ...


def json_bytes(data: Mapping[str, Any], *, for_any_reader: bool = False) -> bytes:
    """JSON in UTF-8. Harnesses may send numbers that are none, which become null, and lone surrogates.

    These are escaped; ``for_any_reader``: they become question marks, for strict readers of JSON refuse them.
    """
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        if for_any_reader and isinstance(error, UnicodeEncodeError):
            return json_bytes(_plain_text(data))
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


class JsonlWriter:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def write(self, rows: Sequence[TrajectoryRow]) -> None:
        for row in rows:
            self._file.write(json_bytes(plain(row)) + b"\n")

    def close(self) -> None:
        self._file.close()


def _text(name: str) -> pa.Field:
    return pa.field(name, pa.string(), nullable=False)


def _number(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


_TOOL_CALL = pa.struct(
    [_text("id"), _text("type"), pa.field("function", pa.struct([_text("name"), _text("arguments")]), nullable=False)]
)
_MESSAGE = pa.struct(
    [
        _text("role"),
        _text("content"),
        pa.field("reasoning_content", pa.string()),
        pa.field("tool_calls", pa.list_(_TOOL_CALL)),
        pa.field("tool_call_id", pa.string()),
    ]
)
_CALL = pa.struct(
    [
        _text("call_id"),
        _number("ordinal", pa.int32()),
        _text("role"),
        _text("fate"),
        _number("is_target", pa.bool_()),
        _number("start", pa.int32()),
        _number("num_sampled_tokens", pa.int32()),
        _number("num_messages", pa.int32()),
        _text("finish_reason"),
        _number("trainable", pa.bool_()),
        *(_text(name) for name in ("agent_id", "parent_agent_id", "purpose")),
        pa.field("cells", pa.list_(pa.string()), nullable=False),
        _number("started_at_s", pa.float64()),
        _number("ended_at_s", pa.float64()),
        _text("output_text"),
        pa.field("answer", _MESSAGE),
        _number("num_malformed_calls", pa.int32()),
        _text("stop_string"),
        pa.field("sampling", pa.string()),
        _text("requested_sampling"),
        _text("request"),
    ]
)
_SELECTION = pa.struct(
    [
        _number("max_trajectories", pa.int32(), nullable=True),
        *(_number(name, pa.int64()) for name in ("seed", "num_targets", "num_left_out", "num_not_trainable")),
        _number("num_superseded", pa.int64()),
        pa.field("left_out", pa.list_(pa.struct([_text("role"), _number("num_tokens", pa.int64())])), nullable=False),
    ]
)
_GROUP = pa.struct(
    [
        _number("version", pa.int64(), nullable=True),
        *(_text(name) for name in ("state", "reason", "loss_reason")),
        _number("trained_step", pa.int64(), nullable=True),
    ]
)
PARQUET_SCHEMA = pa.schema(
    [
        _text("schema"),
        *(_text(name) for name in ("job_id", "group_id")),
        pa.field("group", _GROUP, nullable=False),
        _text("task_name"),
        _number("is_eval", pa.bool_()),
        _text("run_id"),
        _number("attempt", pa.int32()),
        pa.field("outcome", pa.string()),
        *(_number(name, pa.float64(), nullable=True) for name in ("reward", "advantage", "wall_s")),
        *(_text(name) for name in ("detail", "evaluated_ref", "score_details")),
        *(_number(name, pa.int32()) for name in ("trajectory", "num_trajectories")),
        _text("role"),
        _number("is_selected", pa.bool_()),
        _number("draw", pa.int32(), nullable=True),
        pa.field("messages", pa.list_(_MESSAGE), nullable=False),
        _text("tools"),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("target_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        *(_number(name, pa.int64()) for name in ("num_prompt_tokens", "n_run")),
        _number("target_weight", pa.float64()),
        pa.field("calls", pa.list_(_CALL), nullable=False),
        pa.field("selection", _SELECTION),
    ],
    metadata={"tidegate.schema": SCHEMA},
)
"""The columns of a Parquet export. What harnesses and scorers shape freely are JSON texts."""
_JSON_TEXTS = ("tools", "score_details")


class ParquetWriter:
    """Row groups of about a million tokens, compressed with zstd."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, PARQUET_SCHEMA, compression="zstd")
        self._rows: list[TrajectoryRow] = []
        self._num_tokens = 0

    def write(self, rows: Sequence[TrajectoryRow]) -> None:
        for row in rows:
            self._rows.append(row)
            self._num_tokens += len(row.token_ids)
            if self._num_tokens >= _TOKENS_A_GROUP or len(self._rows) >= _ROWS_A_GROUP:
                self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        columns = [self._column(field) for field in PARQUET_SCHEMA]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=PARQUET_SCHEMA))
        self._rows, self._num_tokens = [], 0

    def _column(self, field: pa.Field) -> pa.Array:
        if field.name == "schema":
            values: list[Any] = [SCHEMA] * len(self._rows)
        elif field.name in _JSON_TEXTS:
            values = [json.dumps(getattr(row, field.name)) for row in self._rows]
        elif field.name == "group":
            values = [asdict(row.group) for row in self._rows]
        else:
            values = [getattr(row, field.name) for row in self._rows]
        try:
            return pa.array(values, type=field.type)
        except UnicodeEncodeError:
            return pa.array(_plain_text(values), type=field.type)


def _plain_text(value: Any) -> Any:
    """Text as any reader takes it: lone surrogates, which harnesses may send, become question marks."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case dict():
            return {_plain_text(name): _plain_text(one) for name, one in value.items()}
        case list():
            return [_plain_text(one) for one in value]
    return value


# -- reading --


def read_rows(path: Path) -> Iterator[tuple[str, TrajectoryRow]]:
    """The rows of a JSONL or Parquet export, each with its place in the file, checked one by one.

    ``ConfigError`` names the file, the line (or row) and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        yield from (_read_parquet(path) if is_parquet else _read_jsonl(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.", "Name an exported file.") from None


def _read_jsonl(path: Path) -> Iterator[tuple[str, TrajectoryRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            try:
                data = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise wrong(place, f"it is no JSON ({error})") from None
            if not isinstance(data, dict):
                raise wrong(place, "it is no JSON object")
            yield place, _checked(place, data)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a finite number")


def _read_parquet(path: Path) -> Iterator[tuple[str, TrajectoryRow]]:
    try:
        file = pq.ParquetFile(path)
        missing = [name for name in PARQUET_SCHEMA.names if name not in file.schema_arrow.names]
        if missing:
            raise wrong(str(path), f"it has no column {missing[0]}")
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS_A_READ):
            for at in range(batch.num_rows):
                number += 1
                place = f"{path}, row {number}"
                yield place, _checked(place, _parquet_row(batch, at))
    except pa.ArrowInvalid as error:
        raise wrong(str(path), f"it is no Parquet file that can be read ({str(error).splitlines()[0]})") from None


def _parquet_row(batch: pa.RecordBatch, at: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in batch.schema.names:
        value = batch.column(name)[at]
        if name in ARRAYS and isinstance(value, pa.ListScalar) and value.values is not None:
            row[name] = value.values.to_numpy(zero_copy_only=False)
        else:
            row[name] = value.as_py()
    if isinstance(row.get("messages"), list):
        row["messages"] = [_without_nulls(message) for message in row["messages"]]
    for call in row.get("calls") or ():
        if isinstance(call, dict) and "answer" in call:
            call["answer"] = _without_nulls(call["answer"])
    for name in _JSON_TEXTS:
        with contextlib.suppress(ValueError, TypeError):
            row[name] = json.loads(row[name])
    return row


def _without_nulls(message: Any) -> Any:
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else message


def _checked(place: str, data: Mapping[str, Any]) -> TrajectoryRow:
    try:
        return row_of(data)
    except ConfigError as error:
        raise wrong(place, error.message.rstrip(".")) from None


def wrong(place: str, what: str) -> ConfigError:
    """The error for a file that cannot be imported."""
    return ConfigError(f"{place}: {what}.", "Nothing was imported. Import reads what `tidegate runs export` wrote.")


# -- writing, all or nothing --


@contextlib.contextmanager
def new_file(out: Path, *, force: bool) -> Iterator[Path]:
    """A path to write to; renamed to ``out`` when the block ends well, and gone when it does not.

    ``ConfigError`` if ``out`` exists (without ``force``) or cannot be written, ``MachineError`` if the disk fails.
    """
    with _new(out, force=force) as part:
        if out.is_dir():
            raise ConfigError(f"{out} is a folder.", "Name a file.")
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        _refuse_existing(out, force=force)
        part.replace(out)


@contextlib.contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """The same for a folder of documents. With ``force`` an earlier export is replaced, but no other folder."""
    with _new(out, force=force) as part:
        if out.exists() and not _is_export(out):
            raise ConfigError(f"{out} is no folder of an export alone.", "Name another one; nothing was replaced.")
        part.mkdir()
        yield part
        _refuse_existing(out, force=force)
        old = part.with_suffix(".old")
        if out.exists():
            out.replace(old)
        part.replace(out)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _new(out: Path, *, force: bool) -> Iterator[Path]:
    _refuse_existing(out, force=force)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {out.absolute().parent}.", "Make it first, or name another output.")
    part = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    _remove(part)  # a process of this number may have been killed
    try:
        yield part
    except PermissionError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}.", "Name an output in a folder of yours.") from None
    except OSError as error:
        raise MachineError(f"cannot write {out}: {error.strerror or error}.", "Nothing was left behind.") from None
    finally:
        _remove(part)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _refuse_existing(out: Path, *, force: bool) -> None:
    if not force and (out.exists() or out.is_symlink()):
        raise ConfigError(f"{out} exists.", "Name another output, or replace it with --force.")


def _is_export(folder: Path) -> bool:
    return folder.is_dir() and all(one.is_file() and one.suffix == ".json" for one in folder.iterdir())
