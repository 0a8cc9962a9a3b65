"""A scoring function: the share of vowels in answer.txt, as the tiny tasks' own verifier counts it."""

from __future__ import annotations

from pathlib import Path

from services.rollout.scoring.base import Score, ScoredRunView


def score(run: ScoredRunView, workspace: Path) -> Score:
    """No answer is worth 0; an answer that cannot be read is not the policy's fault, and no zero."""
    try:
        text = (workspace / "answer.txt").read_text(encoding="utf-8")
    except FileNotFoundError:
        return Score(0.0, valid=True, details={"num_characters": 0})
    except (OSError, UnicodeDecodeError) as error:
        return Score(None, valid=False, details={"reason": f"answer.txt cannot be read: {error}"})
    num_vowels = sum(character in "aeiou" for character in text)
    return Score(num_vowels / max(1, len(text)), valid=True, details={"num_characters": len(text)})
