"""A folder that holds what a store held, whole or not at all.

::

    <folder>/states-00000002.bin   bytes of all states and gradients, one after another
             manifest.json         what lies where; it is replaced last and names its file of bytes
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from services.common.errors import ConfigError, MachineError
from services.trainer.tree.records import Layout

_FORMAT = f"tidegate-states-1-{sys.byteorder}"
_MANIFEST = "manifest.json"
_DATA = re.compile(r"states-(\d{8})\.bin")


@dataclass(frozen=True, slots=True)
class Item:
    """A key and what the store knows of it, beside its bytes."""

    chunk: int
    layer: int
    part: str
    needs_gradient: bool
    uses: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a state or of its gradient are."""

    layout: Layout
    offset: int
    crc32: int


def write(folder: Path, label: str, items: Iterable[tuple[Item, Iterable[tuple[Layout, Tensor]]]]) -> None:
    """Saves items, each with the bytes of its state and, if there is one, of its gradient (uint8, CPU).

    They are taken one by one. Until the manifest is replaced the folder holds what it held.

    Raises:
        MachineError: the folder cannot be written, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"states-{max((number for number, _ in _data(folder)), default=0) + 1:08d}.bin"
        with path.open("xb", buffering=0) as file:
            entries = [_entry(file, item, parts) for item, parts in items]
            os.fsync(file.fileno())
        manifest = {"format": _FORMAT, "label": label, "file": path.name, "entries": entries}
        staged = folder / f".{_MANIFEST}.tmp"
        with staged.open("w", encoding="utf-8") as text:
            json.dump(manifest, text)
            text.flush()
            os.fsync(text.fileno())
        staged.replace(folder / _MANIFEST)
        _sync(folder)
    except OSError as error:
        _remove_all_but(folder, _committed(folder))
        raise MachineError(
            f"states cannot be saved in {folder}: {error.strerror}.",
            "Free space on its disk, or save to another folder.",
        ) from error
    _remove_all_but(folder, path.name)


class Reader:
    """Reads what ``write`` has saved."""

    def __init__(self, folder: Path, label: str) -> None:
        """Raises:
        ConfigError: the folder holds no whole save, one of another format, or one with another label.
        """
        self._folder = folder
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            self._entries: list[dict[str, Any]] = manifest["entries"]
            self._file = (folder / str(manifest["file"])).open("rb", buffering=0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder} holds no saved states.", "Begin anew, or name the right folder.") from error
        if (manifest["format"], manifest["label"]) != (_FORMAT, label):
            self.close()
            raise ConfigError(
                f"{folder} holds other states: {manifest['format']} {manifest['label']!r}, not {_FORMAT} {label!r}.",
                "Name another folder, or delete this one to begin anew.",
            )

    def items(self) -> Iterator[tuple[Item, Place, Place | None]]:
        """Each item with the place of its state and of its gradient."""
        for entry in self._entries:
            gradient = entry["gradient"]
            yield Item(**entry["item"]), _place(entry["state"]), None if gradient is None else _place(gradient)

    def read(self, place: Place) -> Tensor:
        """The bytes at a place (uint8, CPU).

        Raises:
            ConfigError: they are not what was saved.
        """
        buffer = torch.empty(place.layout.num_bytes, dtype=torch.uint8)
        self._file.seek(place.offset)
        rest = data = buffer.numpy().data
        while rest and (num_bytes := self._file.readinto(rest)):
            rest = rest[num_bytes:]
        if rest or zlib.crc32(data) != place.crc32:
            raise ConfigError(f"the states saved in {self._folder} are damaged.", "Delete the folder and begin anew.")
        return buffer

    def close(self) -> None:
        """May be called again."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entry(file: BinaryIO, item: Item, parts: Iterable[tuple[Layout, Tensor]]) -> dict[str, Any]:
    places: list[dict[str, Any] | None] = []
    for layout, buffer in parts:
        rest = data = buffer.numpy().data
        places.append({"tensors": layout.to_json(), "offset": file.tell(), "crc32": zlib.crc32(data)})
        while rest:
            rest = rest[file.write(rest) :]
    state, gradient = (*places, None)[:2]
    return {"item": asdict(item), "state": state, "gradient": gradient}


def _place(saved: dict[str, Any]) -> Place:
    return Place(Layout.from_json(saved["tensors"]), saved["offset"], saved["crc32"])


def _data(folder: Path) -> list[tuple[int, Path]]:
    """The files of bytes with their numbers."""
    found = ((_DATA.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in found if match]


def _committed(folder: Path) -> str | None:
    """Name of the file of bytes that counts."""
    try:
        return str(json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_all_but(folder: Path, name: str | None) -> None:
    with contextlib.suppress(OSError):  # what stays goes with the next save
        for _, path in _data(folder):
            if path.name != name:
                path.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
