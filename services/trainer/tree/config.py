"""Configuration of the tree executor."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.trainer.tree.plan import ModeChoice, PlanOptions, PrefixGradient, Recompute


class TreeConfig(BaseModel):
    """How a micro-step's forest of token segments is evaluated. None of it but ``prefix_gradient`` changes a result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_gradient: PrefixGradient = PrefixGradient.EXACT
    """``exact``, or ``detached``: what runs share (their prompt, and answers as far as they begin alike) gets no
    gradient, as in LongStraw; cheaper and only approximate."""
    mode: ModeChoice = ModeChoice.AUTO
    """``pack``: a whole forest in one pass (models of softmax attention only). ``walk``: chunk by chunk. ``auto``: pack
    what fits ``memory_bytes``."""
    recompute: Recompute = Recompute.AUTO
    """What a walk does with the activations of inner chunks: ``chunk`` evaluates them again, ``keep`` keeps them,
    ``auto`` keeps what fits ``memory_bytes``."""
    memory_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory for states, their gradients and activations on the device that trains, beside weights, gradients of
    weights and optimizer."""
    host_bytes: int = Field(default=0, ge=0)
    """Memory of the host for states that do not fit the device. On a CPU there is only ``memory_bytes``."""
    page_dir: Path | None = None
    """Folder on a fast local disk for states that fit neither; none: they may not."""
    page_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of the page file; none: as many as the disk has."""
    min_chunk_tokens: int = Field(default=64, ge=1)
    """Chunks are made no smaller to fit memory; a step that would need smaller ones is refused."""
    max_chunk_tokens: int = Field(default=8192, ge=1)
    """Chunks are as large as memory allows between these."""
    head_rows: int = Field(default=1024, ge=1)
    """Most targets whose logits are held at once."""
    pack_attention: Literal["auto", "nodes", "flex"] = "auto"
    """How a packed forest attends. ``nodes``: each node to its path by PyTorch's scaled dot product attention;
    ``flex``: one FlexAttention with a block mask. ``auto``: ``flex`` on a GPU."""
    context_parallel: bool = False
    """The ranks of a cell share each chunk (its tokens, states and attention) instead of the micro-steps."""

    @model_validator(mode="after")
    def _check(self) -> TreeConfig:
        if self.context_parallel and self.mode is ModeChoice.PACK:
            raise ValueError("ranks share the chunks of a walk, not a packed pass: leave mode at auto")
        if self.page_bytes is not None and self.page_dir is None:
            raise ValueError("page_bytes are those of the file in page_dir: set page_dir too")
        if self.min_chunk_tokens > self.max_chunk_tokens:
            raise ValueError("min_chunk_tokens is above max_chunk_tokens")
        return self

    def options(self, alignment_tokens: int = 1) -> PlanOptions:
        """What the plan is told."""
        return PlanOptions(
            prefix_gradient=self.prefix_gradient,
            recompute=self.recompute,
            mode=self.mode,
            min_chunk_tokens=self.min_chunk_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            alignment_tokens=alignment_tokens,
            head_rows=self.head_rows,
        )
