"""Who trains which micro-step, and what of it counts. Pure state machine.

A claim counts only when its gradient is reduced: a holder that dies or lets its lease run out gives everything back,
whatever it has computed, so every micro-step counts exactly once in a step.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def lease_of(self, holder: str) -> Lease | None:
        return self._leases.get(holder)

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
        if held is None:
            return ()
        freed = tuple(sorted(held.claim_ids))
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
