"""The ranks that share the chunks of a plan: who holds which tokens, and how tensors come from one to another.

A chunk's tokens are split into one run of consecutive tokens a rank, of sizes that differ by at most one, the longer
ones first; ranks behind the last token have none. All sums are taken in the order of ranks, so results repeat.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.errors import TrainingError
from services.trainer.tree.kernels import accumulation_dtype

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_HEADER_NUMBERS = 8
"""Type, number of dimensions, and the dimensions of a tensor that is sent."""


def split_tokens(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """How many consecutive tokens each rank holds."""
    base, more = divmod(num_tokens, num_ranks)
    return tuple(base + (rank < more) for rank in range(num_ranks))


class Ranks:
    """One rank's view of a process group. Every method that talks to others is to be called on all of them, in one
    order; those that differ by rank (``send``, ``receive``) in pairs.

    Raises ``TrainingError`` if another rank is gone or does not answer within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group``: None for the default one."""
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self.task = "a step"
        """What is being done, for errors."""
        self.sent_bytes = 0
        """To other ranks, so far."""
        self._on_their_way: list[tuple[dist.Work, Tensor]] = []

    def part(self, num_tokens: int) -> slice:
        """The tokens of a chunk that this rank holds."""
        sizes = split_tokens(num_tokens, self.size)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    # -- all to all -----------------------------------------------------------------------------------------------

    def gather(self, tensor: Tensor, num_tokens: int, dim: int = 0) -> Tensor:
        """The tokens of all ranks, of each rank's along ``dim``. No gradient goes through."""
        sizes = split_tokens(num_tokens, self.size)
        longest = sizes[0]
        padded = _padded(tensor.detach(), longest, dim).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._telling("gathering tokens"):
            dist.all_gather(parts, padded, group=self._group)
        self.sent_bytes += padded.nbytes * (self.size - 1)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def exchange(self, tensor: Tensor, num_tokens: int, dim: int = 0) -> list[Tensor]:
        """``tensor`` has something for the tokens of all ranks along ``dim``: what every rank has for this one's."""
        sizes = split_tokens(num_tokens, self.size)
        leaving = torch.cat([part.reshape(-1) for part in tensor.detach().split(sizes, dim)])
        one = tensor.numel() // num_tokens
        own = one * sizes[self.rank]
        arrived = leaving.new_empty(own * self.size)
        with self._telling("exchanging parts"):
            dist.all_to_all_single(
                arrived, leaving, [own] * self.size, [one * size for size in sizes], group=self._group
            )
        self.sent_bytes += (leaving.numel() - own) * leaving.itemsize
        shape = list(tensor.shape)
        shape[dim] = sizes[self.rank]
        return [part.view(shape) for part in arrived.view(self.size, own)]

    def total(self, tensor: Tensor, num_tokens: int, dim: int = 0) -> Tensor:
        """``exchange``, summed in the type of accumulation."""
        first, *others = self.exchange(tensor, num_tokens, dim)
        total = first.to(accumulation_dtype(tensor.dtype))
        for other in others:
            total += other
        return total.to(tensor.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        """Of all ranks, in place; on every rank."""
        with self._telling("adding up"):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def collect(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Join tensors whose first dimension is ``sizes[rank]``, on every rank."""
        padded = _padded(tensor.detach(), max(sizes), 0).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._telling("gathering slices"):
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    # -- one to one -----------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, label: str, *, with_header: bool = False) -> None:
        """Start to send; ``settle`` waits. ``label``: what it is; the receiver names the same."""
        tensor = tensor.detach().contiguous()
        messages = [tensor]
        if with_header:
            header = torch.zeros(_HEADER_NUMBERS, dtype=torch.int64)
            header[: 2 + tensor.dim()] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape])
            messages.insert(0, header.to(tensor.device))
        for message in messages:
            with self._telling(f"sending {label}"):
                work = dist.isend(message, group=self._group, group_dst=to, tag=_tag(label))
            if work is not None:
                self._on_their_way.append((work, message))
            self.sent_bytes += message.nbytes

    def receive(self, source: int, label: str, device: torch.device) -> Tensor:
        """A tensor that was sent with a header."""
        header = self.receive_into(torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device=device), source, label)
        dtype, num_dims, *shape = header.tolist()
        return self.receive_into(torch.empty(shape[:num_dims], dtype=_DTYPES[dtype], device=device), source, label)

    def receive_into(self, tensor: Tensor, source: int, label: str) -> Tensor:
        """A tensor that was sent without a header, of the shape and type that it is known to have."""
        with self._telling(f"waiting for {label}"):
            dist.recv(tensor, group=self._group, group_src=source, tag=_tag(label))
        return tensor

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._on_their_way:
            with self._telling("waiting for what it sent to arrive"):
                work.wait()
        self._on_their_way.clear()

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
            raise TrainingError(
                f"rank {self.rank} of the {self.size} that share chunks failed in {self.task}, {what}: {reason}.",
                "Another rank has ended or hangs: look into the logs of all ranks of the cell for the first error.",
            ) from error


def _padded(tensor: Tensor, size: int, dim: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _tag(label: str) -> int:
    """So that messages find their receiver in whatever order they leave."""
    return zlib.crc32(label.encode()) & 0x7FFFFFFF
