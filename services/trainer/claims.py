"""Who trains which micro-step, and what of it counts. Pure state machine.

A claim counts only when its gradient is reduced: a holder that dies or lets its lease run out gives everything back,
whatever it has computed, so every micro-step counts exactly once in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from services.common.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Lease:
    """One holder's live claims."""

    claim_ids: frozenset[int]
    expires_at_s: float


class ClaimBoard:
    """The micro-steps ``0 .. num_claims - 1`` of one optimizer step.

    Each is open, claimed by one holder under a lease, or reduced.
    """

    def __init__(self, num_claims: int, lease_s: float) -> None:
        """``num_claims``: micro-steps known now; ``add`` brings more."""
        self._open = list(range(num_claims))
        self._lease_s = lease_s
        self._leases: dict[str, Lease] = {}
        self._reduced: set[int] = set()
        self._num_claims = num_claims
        self._history: list[str] = []

    @property
    def open_ids(self) -> tuple[int, ...]:
        """What nobody holds, in order."""
        return tuple(self._open)

    @property
    def is_complete(self) -> bool:
        """Every micro-step's gradient is reduced."""
        return len(self._reduced) == self._num_claims

    @property
    def reduced_ids(self) -> frozenset[int]:
        """What counts."""
        return frozenset(self._reduced)

    def add(self, num_claims: int) -> range:
        """Further micro-steps come to the step; their ids."""
        added = range(self._num_claims, self._num_claims + num_claims)
        self._open += added
        self._num_claims += num_claims
        return added

    def lease_of(self, holder: str) -> Lease | None:
        return self._leases.get(holder)

    def is_late(self, holder: str, now_s: float) -> bool:
        """Whether a holder's lease ran out."""
        held = self._leases.get(holder)
        return held is not None and held.expires_at_s <= now_s

    def claim(self, holder: str, claim_ids: Iterable[int], now_s: float) -> tuple[int, ...]:
        """Take those of ``claim_ids`` that are open; the holder's whole lease is renewed. Returns what was taken."""
        self.expire(now_s)
        wanted = set(claim_ids)
        taken = tuple(claim_id for claim_id in self._open if claim_id in wanted)
        self._open = [claim_id for claim_id in self._open if claim_id not in wanted]
        held = self._leases.get(holder)
        live = (held.claim_ids if held else frozenset()) | frozenset(taken)
        self._leases[holder] = Lease(live, now_s + self._lease_s)
        self._note(f"{now_s:.3f} {holder} claims {taken}")
        return taken

    def renew(self, holder: str, now_s: float) -> None:
        """A holder may keep its claims for another lease, also when its own ran out and nobody took them back."""
        held = self._leases.get(holder)
        if held is not None:
            self._leases[holder] = Lease(held.claim_ids, now_s + self._lease_s)

    def reduced(self, holder: str, claim_ids: Iterable[int], now_s: float) -> bool:
        """A holder's gradient is in the sum. It is accepted whole, and only if ``claim_ids`` are exactly the
        holder's live claims; otherwise the holder loses its lease, its claims are open again, and the caller must
        not count the gradient.
        """
        self.expire(now_s)
        given = frozenset(claim_ids)
        held = self._leases.get(holder)
        if held is None or held.claim_ids != given:
            self._note(f"{now_s:.3f} {holder} reduces {sorted(given)}: refused")
            self.release(holder, now_s)
            return False
        if given & self._reduced:
            raise InvariantError(f"micro-steps {sorted(given & self._reduced)} would count twice", self.history)
        self._reduced |= given
        del self._leases[holder]
        self._note(f"{now_s:.3f} {holder} reduces {sorted(given)}")
        return True

    def release(self, holder: str, now_s: float) -> tuple[int, ...]:
        """A holder failed: its claims are open again. Returns them."""
        held = self._leases.pop(holder, None)
        return self._reopen(holder, held.claim_ids if held else (), now_s)

    def keep(self, holder: str, claim_ids: Set[int], now_s: float) -> tuple[int, ...]:
        """A holder has only ``claim_ids`` of its claims: the others are open again. Returns those."""
        held = self._leases.get(holder)
        if held is None:
            return ()
        self._leases[holder] = Lease(held.claim_ids & claim_ids, held.expires_at_s)
        return self._reopen(holder, held.claim_ids - claim_ids, now_s)

    def transfer(self, holder: str, heir: str, now_s: float) -> None:
        """All claims of a holder pass to another one, with their gradient; the heir's lease is renewed."""
        held, inherited = self._leases.pop(holder), self._leases.get(heir)
        claim_ids = held.claim_ids | (inherited.claim_ids if inherited else frozenset())
        self._leases[heir] = Lease(claim_ids, now_s + self._lease_s)
        self._note(f"{now_s:.3f} {heir} takes {sorted(held.claim_ids)} over from {holder}")

    def uncount(self, claim_ids: Set[int], now_s: float) -> tuple[int, ...]:
        """The sum itself was lost: of what counted, ``claim_ids`` are open again. Returns them."""
        lost = self._reduced & claim_ids
        self._reduced -= lost
        return self._reopen("the sum", lost, now_s)

    def _reopen(self, holder: str, claim_ids: Iterable[int], now_s: float) -> tuple[int, ...]:
        freed = tuple(sorted(claim_ids))
        if freed:
            self._open = sorted([*self._open, *freed])
            self._note(f"{now_s:.3f} {holder} gives back {freed}")
        return freed

    def expire(self, now_s: float) -> tuple[int, ...]:
        """Take back the claims of all leases that ran out. Returns them."""
        late = [holder for holder, lease in self._leases.items() if lease.expires_at_s <= now_s]
        return tuple(claim_id for holder in late for claim_id in self.release(holder, now_s))

    @property
    def history(self) -> str:
        """The last transitions, for error messages."""
        return "; ".join(self._history)

    def _note(self, line: str) -> None:
        self._history = [*self._history[-19:], line]
