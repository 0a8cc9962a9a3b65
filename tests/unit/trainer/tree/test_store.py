"""The store against plain dictionaries, at budgets from nothing to plenty."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from services.common.errors import ConfigError, MachineError
from services.trainer.tree import pagefile, saved
from services.trainer.tree.records import Layout
from services.trainer.tree.store import StateKey, StateStore, StoreBudget
from services.trainer.tree.tiers import MemoryTier

CPU = torch.device("cpu")
PAGE = 1024  # bytes of the states of ``page``
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def page(value: float = 0.0) -> tuple[Tensor, Tensor]:
    return torch.full((1, 2, 8, 8), float(value)), torch.full((1, 2, 8, 8), value + 0.5)


def key(chunk: int, layer: int = 0, part: str = "kv") -> StateKey:
    return StateKey(chunk, layer, part)


def value_of(states: Sequence[Tensor]) -> float:
    return float(states[0].flatten()[0])


def make_store(folder: Path | None, host_bytes: int | None, upper_bytes: int | None = None) -> StateStore:
    """``upper_bytes``: one more tier above the host's, as on a GPU."""
    store = StateStore(CPU, StoreBudget(host_bytes=host_bytes, folder=folder))
    if upper_bytes is not None:
        store._placement.tiers = [MemoryTier(0, CPU, upper_bytes), MemoryTier(1, CPU, host_bytes)]
    return store


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads of page files."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


class Model(RuleBasedStateMachine):
    """Any operations at any budgets: states are what was put, gradients bit for bit the sums in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-test-"))
        self.states: dict[StateKey, tuple[Tensor, ...]] = {}
        self.sums: dict[StateKey, list[Tensor]] = {}
        self.exact: dict[StateKey, list[Tensor]] = {}
        self.without: set[StateKey] = set()
        self.generator = torch.Generator().manual_seed(0)
        self.largest = 0

    @initialize(host=st.integers(0, 12), upper=st.one_of(st.none(), st.integers(0, 6)))
    def start(self, host: int, upper: int | None) -> None:
        self.host_bytes, self.upper_bytes = host * 512, None if upper is None else upper * 512
        self.store = make_store(self.folder, self.host_bytes, self.upper_bytes)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * 8).to(dtype)

    @rule(
        chunk=st.integers(0, 4),
        layer=st.integers(0, 1),
        part=st.sampled_from(["kv", "conv"]),
        sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=3),
        needs_gradient=st.integers(0, 3).map(bool),
    )
    def put(
        self,
        chunk: int,
        layer: int,
        part: str,
        sizes: list[tuple[int, torch.dtype]],
        needs_gradient: bool,
    ) -> None:
        at = key(chunk, layer, part)
        tensors = tuple(self.random((2, size), dtype) for size, dtype in sizes)
        if at in self.states:
            with pytest.raises(ValueError, match="put already"):
                self.store.put(at, tensors)
            return
        self.store.put(at, tensors, needs_gradient=needs_gradient)
        self.states[at] = tuple(tensor.clone() for tensor in tensors)
        for tensor in tensors:
            tensor.zero_()  # the store has copies
        layout = Layout.of(tensors)
        self.largest = max(self.largest, layout.num_bytes, layout.accumulated().num_bytes)
        if not needs_gradient:
            self.without.add(at)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), times=st.integers(1, 4))
    def get(self, data: st.DataObject, times: int) -> None:
        at = data.draw(st.sampled_from(sorted(self.states)))
        for _ in range(times):
            got = self.store.get(at)
            assert [t.dtype for t in got] == [t.dtype for t in self.states[at]]
            assert all(torch.equal(a, b) for a, b in zip(got, self.states[at], strict=True))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.store.prefetch(data.draw(st.sampled_from(sorted(self.states))))

    @precondition(lambda self: self.states)
    @rule(data=st.data(), times=st.integers(1, 4))
    def add(self, data: st.DataObject, times: int) -> None:
        at = data.draw(st.sampled_from(sorted(self.states)))
        given = data.draw(st.lists(st.booleans(), min_size=len(self.states[at]), max_size=len(self.states[at])))
        for _ in range(times):
            gradients = [
                self.random(tuple(s.shape), s.dtype) if is_given else None
                for s, is_given in zip(self.states[at], given, strict=True)
            ]
            self.store.add_gradient(at, gradients)
            if at in self.without or not any(given):
                continue
            zeros = [torch.zeros(s.shape, dtype=torch.float64) for s in self.states[at]]
            dtypes = [torch.float64 if s.dtype == torch.float64 else torch.float32 for s in self.states[at]]
            sums = self.sums.setdefault(at, [z.to(dtype, copy=True) for z, dtype in zip(zeros, dtypes, strict=True)])
            exact = self.exact.setdefault(at, zeros)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    sums[index] += gradient
                    exact[index] += gradient.double()
                    gradient.zero_()  # the store keeps no hold of it

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def gradient(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.states)))
        got = self.store.gradient(at)
        if at not in self.sums:
            assert got is None
            return
        assert got is not None
        for total, expected, exact in zip(got, self.sums[at], self.exact[at], strict=True):
            assert total.dtype == expected.dtype
            assert torch.equal(total, expected)
            torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-4)

    @rule(chunk=st.integers(0, 4))
    def release(self, chunk: int) -> None:
        self.store.release(chunk)
        for at in [at for at in self.states if at.chunk == chunk]:
            assert not self.store.has(at)
            for kept in (self.states, self.sums, self.exact):
                kept.pop(at, None)
            self.without.discard(at)

    @rule(host=st.integers(0, 12))
    def save_and_load(self, host: int) -> None:
        """Into a store of another budget, which goes on."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: None)  # it takes most of the time
            self.store.save(self.folder / "saved", label="a")
        self.store.close()
        self.host_bytes = host * 512
        self.store = make_store(self.folder, self.host_bytes, self.upper_bytes)
        self.store.load(self.folder / "saved", label="a")

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "store"):
            assert self.store.peaks.host <= self.host_bytes + self.largest
            assert self.store.peaks.device <= (self.upper_bytes or 0)
            assert all(self.store.has(at) for at in self.states)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for at in self.states:
                self.store.release(at.chunk)
            self.store._placement.traffic.settle()
            for ahead in list(self.store._placement.traffic._ahead):
                self.store._placement.traffic.forget(ahead)
            assert (self.store.device_bytes, self.store.host_bytes, self.store.disk_bytes) == (0, 0, 0)
            self.store.close()
        shutil.rmtree(self.folder)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# -- where records lie


def test_all_stays_in_memory_that_is_large_enough(tmp_path: Path) -> None:
    with_folder, without = make_store(tmp_path, 4 * PAGE), make_store(None, None)
    for store in (with_folder, without):
        for chunk in range(4):
            store.put(key(chunk), page())
        assert (store.host_bytes, store.disk_bytes, store.device_bytes) == (4 * PAGE, 0, 0)
        store.close()


def test_a_walk_over_pages_reads_only_those_that_do_not_fit(tmp_path: Path, reads: list[int]) -> None:
    """Throwing out the least recently used page would read all of them at each walk."""
    store = make_store(tmp_path, 16 * PAGE)
    for chunk in range(20):
        store.put(key(chunk), page(chunk))
    assert store.disk_bytes == 8 * PAGE  # four pages of room for those that pass
    for _ in range(5):
        reads.clear()
        for chunk in range(20):
            store.prefetch(key(chunk + 1))
            assert value_of(store.get(key(chunk))) == chunk
        assert sum(reads) == 8 * PAGE
    store.close()


def test_pages_that_are_walked_over_displace_states_that_are_read_once(tmp_path: Path, reads: list[int]) -> None:
    store = make_store(tmp_path, 8 * PAGE)
    for chunk in range(8):
        store.put(key(chunk, part="conv"), page())
    for chunk in range(4):
        store.put(key(chunk), page(chunk))
    for _ in range(4):
        for chunk in range(4):
            store.get(key(chunk))
    reads.clear()
    for chunk in range(4):
        assert value_of(store.get(key(chunk))) == chunk
    assert not reads
    assert [value_of(store.get(key(chunk, part="conv"))) for chunk in range(8)] == [0.0] * 8
    store.close()


def test_gradients_displace_states_and_states_are_written_once(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, 8 * PAGE)
    for chunk in range(6):
        store.put(key(chunk), page(chunk))
    for _ in range(3):
        for chunk in range(6):
            store.get(key(chunk))
    for chunk in range(6):
        store.add_gradient(key(chunk), page(1))
    store._placement.traffic.settle()
    monkeypatch.setattr(os, "pwrite", fail(errno.EROFS))  # nothing is written any more
    reads.clear()
    for _ in range(3):
        for chunk in range(6):
            assert value_of(store.get(key(chunk))) == chunk
            store.add_gradient(key(chunk), page(1))
    assert sum(reads) == 3 * 6 * PAGE  # all gradients lie in memory, all states on disk
    assert all(value_of(store.gradient(key(chunk)) or ()) == 4.0 for chunk in range(6))
    store.close()


def test_released_memory_is_filled_with_what_is_used(tmp_path: Path, reads: list[int]) -> None:
    store = make_store(tmp_path, 4 * PAGE)
    for chunk in range(8):
        store.put(key(chunk), page(chunk))
    for chunk in range(4):
        store.release(chunk)
    for chunk in range(4, 7):
        store.get(key(chunk))
    reads.clear()
    for chunk in range(4, 7):
        assert value_of(store.get(key(chunk))) == chunk
    assert not reads
    store.close()


def test_disk_is_given_back_when_chunks_are_released(tmp_path: Path) -> None:
    store = make_store(tmp_path, 0)
    file = store._placement.require_file()._file
    for chunk in range(8):
        store.put(key(chunk), page())
    assert os.fstat(file.fileno()).st_size == store.disk_bytes == 8 * PAGE
    for chunk in range(7, 3, -1):
        store.release(chunk)
    assert os.fstat(file.fileno()).st_size == store.disk_bytes == 4 * PAGE
    assert store.peaks.disk == 8 * PAGE
    store.close()


def test_nothing_lies_in_the_folder_even_while_pages_do(tmp_path: Path) -> None:
    """So a process that is killed leaves nothing behind."""
    store = make_store(tmp_path, 0)
    store.put(key(0), page())
    assert not list(tmp_path.iterdir())
    store.close()
    store.close()


def test_reading_ahead_is_done_by_the_time_it_is_needed(tmp_path: Path, reads: list[int]) -> None:
    store = make_store(tmp_path, 4 * PAGE)
    for chunk in range(12):
        store.put(key(chunk), page(chunk))
    store.prefetch(key(11))
    store._placement.traffic._pool.submit(int).result()  # the thread has come past it
    assert reads == [PAGE]
    assert value_of(store.get(key(11))) == 11
    assert reads == [PAGE]
    store.prefetch(key(99))  # there is none
    store.prefetch(key(10))
    store.release(10)
    store.close()


# -- what is refused


def test_a_state_is_put_once_and_gradients_have_its_shape() -> None:
    store = make_store(None, None)
    store.put(key(0), page())
    with pytest.raises(ValueError, match="put already"):
        store.put(key(0), page())
    with pytest.raises(ValueError, match="a gradient"):
        store.add_gradient(key(0), (torch.zeros(1), None))
    with pytest.raises(ValueError, match="zip"):
        store.add_gradient(key(0), (None,))
    for call in (store.get, store.gradient):
        with pytest.raises(KeyError):
            call(key(1))
    store.close()


def test_states_under_inference_mode_serve_autograd() -> None:
    store = make_store(None, None)
    with torch.inference_mode():
        store.put(key(0), page(2))
    weight = torch.ones(1, requires_grad=True)
    (store.get(key(0))[0] * weight).sum().backward()
    assert weight.grad is not None
    assert float(weight.grad) == 256.0


def test_too_little_memory_without_a_folder_is_told() -> None:
    store = make_store(None, 3 * PAGE)
    for chunk in range(3):
        store.put(key(chunk), page())
    with pytest.raises(MachineError, match=r"do not fit memory: 3072 bytes of cpu memory are used.*set page_dir"):
        store.put(key(3), page())
    with pytest.raises(MachineError, match="do not fit"):
        store.add_gradient(key(0), page())
    assert not store.has(key(3))
    assert store.gradient(key(0)) is None
    assert value_of(store.get(key(0))) == 0.0
    store.close()


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no folder .*gone for page files.*Create it"):
        make_store(tmp_path / "gone", 0)


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="no folder"):
        make_store(tmp_path / "file", 0)


def test_page_files_keep_to_their_limit(tmp_path: Path) -> None:
    store = StateStore(CPU, StoreBudget(host_bytes=0, folder=tmp_path, disk_bytes=2 * PAGE))
    store.put(key(0), page())
    store.put(key(1), page())
    with pytest.raises(MachineError, match=r"2048 are used and 1024 more.*Raise page_bytes"):
        store.put(key(2), page())
    store.release(0)
    store.put(key(2), page(2))
    assert value_of(store.get(key(2))) == 2.0
    store.close()


def fail(error: int) -> Any:
    def failing(*_: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    return failing


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, 4 * PAGE)
    for chunk in range(6):
        store.put(key(chunk), page(chunk))
    used = store.disk_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(errno.ENOSPC))
        with pytest.raises(MachineError, match=r"is full: 1024 more bytes.*Free space"):
            store.put(key(6), page(6))
    assert not store.has(key(6))
    assert store.disk_bytes == used
    store.put(key(6), page(6))
    assert [value_of(store.get(key(chunk))) for chunk in range(7)] == list(range(7))
    store.close()


def test_a_gradient_that_the_disk_lost_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, 8 * PAGE)
    for chunk in range(12):
        store.put(key(chunk), page())
        store.add_gradient(key(chunk), page())
    on_disk = [at for at, entry in store._entries.items() if entry.gradient and entry.gradient.level is None]
    store._placement.traffic.settle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail(errno.EIO))
        store.add_gradient(on_disk[0], page())  # in the background
        with pytest.raises(MachineError, match="cannot be read or written"):
            store.gradient(on_disk[0])
    for call in (store.get, store.gradient):
        with pytest.raises(MachineError):
            call(key(0))
    store.close()


# -- saving


def filled(folder: Path) -> StateStore:
    store = make_store(folder, 4 * PAGE)
    for chunk in range(6):
        store.put(key(chunk), page(chunk), needs_gradient=chunk != 3)
        store.add_gradient(key(chunk), page(10 * chunk))
    return store


def assert_filled(store: StateStore) -> None:
    for chunk in range(6):
        assert value_of(store.get(key(chunk))) == chunk
        gradient = store.gradient(key(chunk))
        assert (None if gradient is None else value_of(gradient)) == (None if chunk == 3 else 10 * chunk)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.save(tmp_path / "saved", label="step 3")
    assert_filled(store)  # which goes on
    store.close()
    for host_bytes in (0, None):
        other = make_store(tmp_path, host_bytes)
        other.load(tmp_path / "saved", label="step 3")
        assert_filled(other)
        with pytest.raises(ValueError, match="cannot load others"):
            other.load(tmp_path / "saved", label="step 3")
        other.close()


def test_a_new_save_replaces_the_old_one(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.save(tmp_path / "saved")
    store.release(5)
    store.save(tmp_path / "saved")
    assert len(list((tmp_path / "saved").iterdir())) == 2
    other = make_store(tmp_path, None)
    other.load(tmp_path / "saved")
    assert not other.has(key(5))
    assert other.has(key(4))
    store.close()
    other.close()


def test_a_save_that_is_not_whole_is_not_taken(tmp_path: Path) -> None:
    """Every state of the folder that a killed save can leave: only files without the manifest."""
    store = filled(tmp_path)
    folder = tmp_path / "saved"
    store.save(folder)
    store.close()
    (folder / "manifest.json").rename(folder / ".manifest.json.tmp")
    with pytest.raises(ConfigError, match="holds no saved states"):
        make_store(None, None).load(folder)


def test_a_process_killed_while_saving_leaves_the_save_before(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.save(tmp_path / "saved")
    store.close()
    child = os.fork()
    if child == 0:
        try:
            setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010 - mypy
            other = make_store(None, None)
            other.put(key(9), page())
            other.save(tmp_path / "saved")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list((tmp_path / "saved").glob("states-*.bin"))) == 2
    other = make_store(tmp_path, None)
    other.load(tmp_path / "saved")
    assert_filled(other)
    other.save(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("states-*.bin"))) == 1
    other.close()


@pytest.mark.parametrize("call", ["fsync"])
def test_a_save_that_fails_keeps_the_one_before(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path)
    store.save(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(saved.os, call, fail(errno.ENOSPC))
        with pytest.raises(MachineError, match="cannot be saved"):
            store.save(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("states-*.bin"))) == 1
    assert_filled(store)
    other = make_store(tmp_path, None)
    other.load(tmp_path / "saved")
    assert_filled(other)
    store.close()
    other.close()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path)
    folder = tmp_path / "saved"
    store.save(folder, label="a")
    store.close()
    empty = make_store(None, None)
    with pytest.raises(ConfigError, match=r"other states.*'a'.*'b'"):
        empty.load(folder, label="b")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": "tidegate-states-0-big"}))
    with pytest.raises(ConfigError, match="tidegate-states-0-big"):
        empty.load(folder, label="a")
    for wrong in ("{", "[]", "{}"):
        (folder / "manifest.json").write_text(wrong)
        with pytest.raises(ConfigError, match="no saved states"):
            empty.load(folder, label="a")
    with pytest.raises(ConfigError, match="no saved states"):
        empty.load(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_bytes_are_noticed(tmp_path: Path, damage: str) -> None:
    store = filled(tmp_path)
    store.save(tmp_path / "saved")
    store.close()
    (path,) = (tmp_path / "saved").glob("states-*.bin")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(ConfigError, match="damaged"):
        make_store(None, None).load(tmp_path / "saved")


# -- pieces


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pagefile.PageFile]:
    monkeypatch.setattr(pagefile, "PIECE_BYTES", 64)
    file = pagefile.PageFile(tmp_path, None)
    yield file
    file.close()


def test_records_are_changed_piece_by_piece(file: pagefile.PageFile) -> None:
    extent = file.allocate(1024)
    file.write(extent, torch.full((1024,), 255, dtype=torch.uint8))
    values = torch.randn(100)
    file.set(extent, [(128, values)])
    file.add(extent, [(128, values), (640, torch.ones(3))])
    into = torch.empty(1024, dtype=torch.uint8)
    file.read(extent, into)
    expected = torch.zeros(256)
    expected[32:132] = values * 2
    expected[160:163] = 1
    assert torch.equal(into.view(torch.float32), expected)


def test_a_file_system_that_reserves_nothing_serves_too(
    file: pagefile.PageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.EOPNOTSUPP))
    extent = file.allocate(256)
    file.write(extent, torch.ones(200, dtype=torch.uint8))
    into = torch.empty(256, dtype=torch.uint8)
    file.read(extent, into)
    assert int(into.sum()) == 200


def test_short_reads_and_writes_go_on(file: pagefile.PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:5]], offset))
    extent = file.allocate(100)
    data = torch.arange(100).to(torch.uint8)
    file.write(extent, data)
    into = torch.empty_like(data)
    file.read(extent, into)
    assert torch.equal(into, data)


def test_layouts_survive_json() -> None:
    layout = Layout.of([torch.zeros(2, 3).bfloat16(), torch.zeros(()), torch.zeros(0, 4, dtype=torch.bool)])
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert [tuple(view.shape) for view in layout.views(buffer)] == [(2, 3), (), (0, 4)]
