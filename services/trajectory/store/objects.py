"""Objects of the store: the payloads of a sealed attempt's calls, one Parquet file each, in a folder or in S3.

An object's reference is relative to the store's own ``blobs`` folder, so that a job's folder can be moved; elsewhere it
is the object's whole URL, so that a reader needs no configuration. Objects never change once they are written.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np
from numpy.typing import NDArray

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.trajectory.encoding import Payload

FOLDER = "blobs"
_PARTIAL = ".partial-"
_LEAVES = {name: f"{name}.list.element" for name in ("prompt", "output", "logprobs")}


class ObjectGoneError(NotFoundError):
    """An object that an attempt refers to is not there."""


class ObjectStore:
    """Objects below one root. pyarrow is loaded with the first one."""

    def __init__(self, url: str, default_dir: Path | None, prefix: str = "") -> None:
        """``url``: the root for new objects; empty: ``default_dir``. ``prefix``: what new names begin with.

        Raises ``ConfigError`` for a URL that cannot be understood.
        """
        self._url = url.rstrip("/") if "?" not in url else url
        self._default_dir = default_dir
        self._prefix = prefix
        self._filesystems: dict[tuple[str, str, str], Any] = {}
        if url and urlsplit(url).scheme not in ("file", "s3"):
            raise ConfigError(
                f"the objects' URL {url!r} is neither of a folder nor of S3.",
                "Give file:///FOLDER or s3://BUCKET/PREFIX as trajectory.store.blob_url.",
            )

    def new_ref(self, name: str) -> str:
        """A reference that was never used, for an object called like ``name``."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        return self._ref(f"{self._prefix}{plain}-{secrets.token_hex(6)}.parquet")

    def write(self, ref: str, data: bytes) -> None:
        """Store an object; it is durable on return. ``MachineError`` if it could not be."""
        path = self._local(ref)
        try:
            if path is not None:
                _write_file(path, data)
                return
            filesystem, where = self._remote(ref)
            with filesystem.open_output_stream(where) as stream:
                stream.write(data)
        except OSError as error:
            raise _away(ref, error) from error

    def read(self, ref: str) -> bytes:
        """``ObjectGoneError`` if there is no such object, ``MachineError`` if it cannot be reached."""
        path = self._local(ref)
        try:
            if path is not None:
                return path.read_bytes()
            filesystem, where = self._remote(ref)
            with filesystem.open_input_file(where) as stream:
                return bytes(stream.read())
        except FileNotFoundError as error:
            raise ObjectGoneError(f"the calls' object {ref} is gone.", "It was deleted by hand, or moved.") from error
        except OSError as error:
            raise _away(ref, error) from error

    def delete(self, ref: str) -> None:
        """Delete an object. One that is gone is no error."""
        path = self._local(ref)
        try:
            if path is not None:
                path.unlink(missing_ok=True)
                return
            filesystem, where = self._remote(ref)
            with contextlib.suppress(FileNotFoundError):
                filesystem.delete_file(where)
        except OSError as error:
            raise _away(ref, error) from error

    def refs(self) -> list[str]:
        """The objects below this store's root and prefix, unfinished ones included."""
        from pyarrow import fs

        root = self._local(self._ref(self._prefix))
        try:
            if root is not None:
                found = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
                return [self._ref(f"{self._prefix}{path.relative_to(root).as_posix()}") for path in found]
            filesystem, where = self._remote(self._ref(self._prefix))
            base = where.rstrip("/")
            infos = filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
            names = [info.path[len(base) + 1 :] for info in infos if info.type == fs.FileType.File]
        except OSError as error:
            raise _away(self._url, error) from error
        return [self._ref(f"{self._prefix}{name}") for name in names]

    def check(self) -> None:
        """``ConfigError`` if the bucket of S3 does not exist, ``MachineError`` if it cannot be reached."""
        from pyarrow import fs

        filesystem, where = self._remote(self._url)
        bucket = where.partition("/")[0]
        try:
            info = filesystem.get_file_info(bucket)
        except OSError as error:
            raise _away(self._url, error) from error
        if info.type == fs.FileType.NotFound:
            raise ConfigError(f"there is no bucket {bucket!r}.", "Make it, or mend trajectory.store.blob_url.")

    def _ref(self, key: str) -> str:
        if not self._url:
            return key
        parts = urlsplit(self._url)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{key}"))

    def _local(self, ref: str) -> Path | None:
        if "://" not in ref:
            if self._default_dir is None:
                raise NotFoundError(f"the calls' object {ref} lies beside a store's files.", "Read that store.")
            return self._default_dir / ref
        parts = urlsplit(ref)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    def _remote(self, ref: str) -> tuple[Any, str]:
        from pyarrow import fs

        parts = urlsplit(ref)
        server = (parts.scheme, parts.netloc, parts.query)
        if server not in self._filesystems:
            try:
                self._filesystems[server] = fs.FileSystem.from_uri(urlunsplit(parts._replace(path="")))[0]
            except (ValueError, TypeError) as error:
                raise ConfigError(f"the objects' URL {ref!r} is not understood ({error}).", "See blob_url.") from error
        return self._filesystems[server], f"{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"


def is_partial(ref: str) -> bool:
    """Whether an object was never completed."""
    return _PARTIAL in ref


def _write_file(path: Path, data: bytes) -> None:
    made = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    for folder in dict.fromkeys([path.parent, *(parent.parent for parent in made)]):
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _away(ref: str, error: OSError) -> MachineError:
    first_line = str(error).strip().partition("\n")[0]
    return MachineError(
        f"the objects at {urlsplit(ref)._replace(query='').geturl() or ref} cannot be reached ({first_line}).",
        "See that trajectory.store.blob_url is right, its server runs and its credentials are in the environment.",
    )


# -- what is in an object --


def object_of(payloads: Mapping[str, Payload]) -> bytes:
    """The payloads of calls, by call id, as a Parquet file.

    Columns: ``call_id``, ``prompt`` and ``output`` (lists of int32), ``logprobs`` (lists of float32), ``request`` and
    ``rest`` (JSON).
    """
    import pyarrow as pa
    from pyarrow import parquet

    ordered = list(payloads.values())
    table = pa.table(
        {
            "call_id": pa.array(list(payloads), pa.string()),
            "prompt": _lists([one.prompt for one in ordered], pa.int32()),
            "output": _lists([one.output for one in ordered], pa.int32()),
            "logprobs": _lists([one.logprobs for one in ordered], pa.float32()),
            "request": pa.array([one.request for one in ordered], pa.binary()),
            "rest": pa.array([one.rest for one in ordered], pa.string()),
        }
    )
    sink = pa.BufferOutputStream()
    parquet.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(_LEAVES.values(), "BYTE_STREAM_SPLIT"),
        write_statistics=False,
        row_group_size=max(1, len(ordered)),
    )
    return bytes(sink.getvalue())


def payloads_of(data: bytes) -> dict[str, Payload]:
    """What ``object_of`` wrote, bit for bit. ``MachineError`` if it is damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(pa.BufferReader(data), use_threads=False)
        prompts, outputs, logprobs = (_arrays(table.column(name)) for name in _LEAVES)
        texts = [table.column(name).to_pylist() for name in ("call_id", "request", "rest")]
    except (pa.ArrowException, KeyError) as error:
        raise MachineError(
            f"an object of the store is damaged ({error}).", "Restore it from a copy; its run's summary is intact."
        ) from error
    return {
        call_id: Payload(prompts[at], outputs[at], logprobs[at], request, rest)
        for at, (call_id, request, rest) in enumerate(zip(*texts, strict=True))
    }


def _lists(arrays: list[NDArray[Any]], element: Any) -> Any:
    import pyarrow as pa

    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(one) for one in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.empty(0)
    of_type = pa.list_(pa.field("element", element, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, element, from_pandas=False), type=of_type)


def _arrays(column: Any) -> list[NDArray[Any]]:
    lists = column.combine_chunks()
    if hasattr(lists, "chunks"):
        lists = lists.chunk(0)
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=True)
    return [values[start:end].copy() for start, end in itertools.pairwise(offsets)]
