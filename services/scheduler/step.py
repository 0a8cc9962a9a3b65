"""The optimizer step that is being filled or trained."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class OpenStep:
    """A step from its first group on. With streaming, groups join while others are trained."""

    step: int
    version: int
    num_seats: int
    """Groups that it trains; fewer than B if some were lost and the job closes its steps short."""
    group_ids: list[str] = field(default_factory=list)
    num_unclaimed: int = 0
    """Micro-steps that no cell has claimed, as last heard; a group that was told since counts as one."""
    is_closed: bool = False
    """All of its groups are told."""

    @property
    def num_missing(self) -> int:
        return self.num_seats - len(self.group_ids)
