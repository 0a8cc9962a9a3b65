"""How the cells in training share the micro-steps of the step in flight. Pure state machine.

Events go in, grants come out: what a cell is to do next. A cell has one grant at a time. The core's ranks claim like
anyone else; what is in the core's sum counts, what a satellite has summed counts once the core has absorbed it. So a
satellite that dies, fails, is late or goes back to rollout gives back everything that the core has not absorbed.

What a sum holds is never assumed but reported: ranks that were restarted have lost theirs, and what the report lacks is
open again. The optimizer steps when all groups are told and every micro-step is in the core's sum; nothing can be
claimed any more then, so the window to join has closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import StrEnum

from services.common.errors import InvariantError
from services.trainer.claims import ClaimBoard

_MAX_CLAIMS_PER_RANK = 4
"""Micro-steps that a cell claims at once, for each of its ranks: so many share a forward where they are small."""


class GrantKind(StrEnum):
    """What a cell is to do."""

    ACCUMULATE = "accumulate"
    """Add the gradient of ``keys`` to its sum."""
    COLLECT = "collect"
    """Hand its sum over."""
    ABSORB = "absorb"
    """The core: add the sum that grant ``source`` brought."""
    UPDATE = "update"
    """The core: step the optimizer with a sum of exactly ``keys``."""
    DISCARD = "discard"
    """Forget its sum: the cell left. Needs no answer."""
    DISMISS = "dismiss"
    """Forget its sum: the cell was late, and takes part again only when it joins again. Needs no answer."""


@dataclass(frozen=True, slots=True)
class Grant:
    grant_id: int
    cell_id: str
    kind: GrantKind
    keys: tuple[str, ...] = ()
    source: int = -1


@dataclass(frozen=True, slots=True)
class Told:
    """Micro-steps come to the step."""

    keys: tuple[str, ...]
    is_last: bool
    """No more will come."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A satellite is ready to work: its weights are those from which the step starts, its sum is empty."""

    cell_id: str


@dataclass(frozen=True, slots=True)
class Left:
    """A satellite takes part no more."""

    cell_id: str


@dataclass(frozen=True, slots=True)
class Summed:
    """What a cell's sum holds after a grant: to accumulate, to absorb, or to update (which was then not done)."""

    grant_id: int
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class HandedIn:
    """The sum of a satellite is here."""

    grant_id: int
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Failed:
    """A satellite could not do what it was granted."""

    grant_id: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


WorkEvent = Told | Joined | Left | Summed | HandedIn | Failed | Ticked


@dataclass(slots=True)
class _Member:
    busy: Grant | None = None
    handed_in: int = -1
    """The grant that brought its sum, while the core has not begun to absorb that."""


class WorkQueue:
    """The micro-steps of one step, told by their keys, and the cells that train them.

    ``num_ranks``: of each cell. ``lease_s``: a satellite that is busy for longer is late.
    """

    def __init__(self, core_id: str, num_ranks: int, lease_s: float) -> None:
        self._core_id = core_id
        self._num_ranks = num_ranks
        self._board = ClaimBoard(0, lease_s)
        self._keys: list[str] = []
        self._ids: dict[str, int] = {}
        self._members: dict[str, _Member] = {core_id: _Member()}
        self._is_told = False
        self._num_grants = 0
        self._counted_by: dict[int, str] = {}

    # -- what it says of itself --

    @property
    def num_unclaimed(self) -> int:
        """Micro-steps that nobody has claimed."""
        return len(self._board.open_ids)

    @property
    def is_busy(self) -> bool:
        """Whether any cell is at work."""
        return any(member.busy is not None for member in self._members.values())

    @property
    def shares(self) -> dict[str, int]:
        """Counted micro-steps by the cell that computed them."""
        counted = [self._counted_by[claim_id] for claim_id in self._board.reduced_ids]
        return {cell_id: counted.count(cell_id) for cell_id in dict.fromkeys(counted)}

    def cell_of(self, grant_id: int) -> str | None:
        """The cell that is busy with a grant; None: the grant is over, or was taken back."""
        for cell_id, member in self._members.items():
            if member.busy is not None and member.busy.grant_id == grant_id:
                return cell_id
        return None

    # -- events --

    def handle(self, event: WorkEvent, now_s: float) -> list[Grant]:
        """Take an event in; what is to be done next.

        Raises:
            InvariantError: an event that cannot be.
        """
        grants = self._dismiss_late(now_s)
        match event:
            case Told():
                self._tell(event)
            case Joined(cell_id):
                self._members.setdefault(cell_id, _Member())  # of one that joins twice, its reports tell the rest
            case Left(cell_id):
                if self._remove(cell_id, now_s):
                    grants.append(self._grant(cell_id, GrantKind.DISCARD))
            case Summed() | HandedIn() | Failed():
                grants += self._end(event, now_s)
        return [*grants, *self._hand_out(now_s)]

    def _tell(self, event: Told) -> None:
        if self._is_told:
            raise InvariantError(f"micro-steps {event.keys} come to a step that was complete.", self._board.history)
        for key, claim_id in zip(event.keys, self._board.add(len(event.keys)), strict=True):
            if key in self._ids:
                raise InvariantError(f"micro-step {key} was told twice.", self._board.history)
            self._keys.append(key)
            self._ids[key] = claim_id
        self._is_told = event.is_last

    def _end(self, event: Summed | HandedIn | Failed, now_s: float) -> list[Grant]:
        """A grant is over. Nothing follows from one that was taken back before."""
        cell_id = self.cell_of(event.grant_id)
        if cell_id is None:
            return []
        self._members[cell_id].busy = None
        match event:
            case Summed(_, keys) if cell_id == self._core_id:
                self._count(keys, now_s)
            case Summed(_, keys):
                if not self._keep(cell_id, keys, now_s):
                    return [self._grant(cell_id, GrantKind.DISMISS)]
            case HandedIn(grant_id, keys):
                self._take_in(cell_id, grant_id, keys, now_s)
            case Failed():
                self._remove(cell_id, now_s)
        return []

    def _count(self, keys: Set[str], now_s: float) -> None:
        """The core says what is in its sum: that and nothing else counts."""
        held = {self._ids[key] for key in keys if key in self._ids}
        lease = self._board.lease_of(self._core_id)
        claimed = lease.claim_ids if lease is not None else frozenset()
        if len(held) < len(keys) or held - claimed - self._board.reduced_ids:
            raise InvariantError(f"the core's sum holds what it was not given: {sorted(keys)}.", self._board.history)
        self._board.uncount(self._board.reduced_ids - held, now_s)
        self._board.keep(self._core_id, held, now_s)
        lease = self._board.lease_of(self._core_id)
        if lease is not None:
            self._board.reduced(self._core_id, lease.claim_ids, now_s)

    def _keep(self, cell_id: str, keys: Set[str], now_s: float) -> bool:
        """A satellite says what is in its sum. False: it holds what is not its own, so all of it is void."""
        held = {self._ids.get(key, -1) for key in keys}
        lease = self._board.lease_of(cell_id)
        if lease is None or held - lease.claim_ids:
            self._remove(cell_id, now_s)
            return False
        self._board.keep(cell_id, held, now_s)
        if not held:
            self._board.release(cell_id, now_s)
        return True

    def _take_in(self, cell_id: str, grant_id: int, keys: Set[str], now_s: float) -> None:
        """A satellite's sum is accepted whole, and only if it holds exactly what the satellite claimed."""
        lease = self._board.lease_of(cell_id)
        if lease is not None and lease.claim_ids == {self._ids.get(key, -1) for key in keys}:
            self._members[cell_id].handed_in = grant_id
        else:
            self._board.release(cell_id, now_s)

    def _remove(self, cell_id: str, now_s: float) -> bool:
        """A satellite takes part no more: its claims are open again. Whether it took part."""
        if cell_id == self._core_id:
            raise InvariantError("the core cannot leave a step.", self._board.history)
        self._board.release(cell_id, now_s)
        return self._members.pop(cell_id, None) is not None

    def _dismiss_late(self, now_s: float) -> list[Grant]:
        """Leases run only while a satellite is at work: one that waits for groups is not late."""
        at_work = {
            cell_id for cell_id, member in self._members.items() if member.busy is not None and cell_id != self._core_id
        }
        late = [cell_id for cell_id in at_work if self._board.is_late(cell_id, now_s)]
        for cell_id in late:
            self._remove(cell_id, now_s)
        for cell_id in self._members.keys() - at_work:
            self._board.renew(cell_id, now_s)
        return [self._grant(cell_id, GrantKind.DISMISS) for cell_id in late]

    # -- grants --

    def _hand_out(self, now_s: float) -> list[Grant]:
        """The next grant of every idle cell; the core comes first."""
        grants = []
        for cell_id, member in self._members.items():
            if member.busy is None:
                grant = self._for_core(now_s) if cell_id == self._core_id else self._for_satellite(cell_id, now_s)
                if grant is not None:
                    member.busy = grant
                    grants.append(grant)
        return grants

    def _for_core(self, now_s: float) -> Grant | None:
        for cell_id, member in self._members.items():
            if member.handed_in >= 0:
                return self._absorb(cell_id, member, now_s)
        if self._board.open_ids:
            return self._claim(self._core_id, now_s)
        if self._is_told and self._board.is_complete:
            return self._grant(self._core_id, GrantKind.UPDATE, self._keys)
        return None

    def _absorb(self, cell_id: str, member: _Member, now_s: float) -> Grant:
        """From here on the claims are the core's: whatever becomes of the satellite, they stand or fall with this."""
        lease = self._board.lease_of(cell_id)
        assert lease is not None
        keys = [self._keys[claim_id] for claim_id in sorted(lease.claim_ids)]
        self._board.transfer(cell_id, self._core_id, now_s)
        grant = self._grant(self._core_id, GrantKind.ABSORB, keys, member.handed_in)
        member.handed_in = -1
        return grant

    def _for_satellite(self, cell_id: str, now_s: float) -> Grant | None:
        if self._members[cell_id].handed_in >= 0:
            return None
        if self._board.open_ids:
            return self._claim(cell_id, now_s)
        if self._is_told and self._board.lease_of(cell_id) is not None:
            self._board.renew(cell_id, now_s)
            return self._grant(cell_id, GrantKind.COLLECT)
        return None

    def _claim(self, cell_id: str, now_s: float) -> Grant:
        """Few at a time, and fewer towards the end, so that the cells end together."""
        open_ids = self._board.open_ids
        share = len(open_ids) // (2 * len(self._members))
        number = max(self._num_ranks, min(share, _MAX_CLAIMS_PER_RANK * self._num_ranks))
        taken = self._board.claim(cell_id, open_ids[:number], now_s)
        self._counted_by.update(dict.fromkeys(taken, cell_id))
        return self._grant(cell_id, GrantKind.ACCUMULATE, [self._keys[claim_id] for claim_id in taken])

    def _grant(self, cell_id: str, kind: GrantKind, keys: Iterable[str] = (), source: int = -1) -> Grant:
        self._num_grants += 1
        return Grant(self._num_grants, cell_id, kind, tuple(keys), source)
