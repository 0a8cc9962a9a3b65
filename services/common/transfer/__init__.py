"""Bytes between processes and machines: weights today, KV blocks and gradients by the same interface."""

from services.common.transfer.base import Exposed, TransferEngine
from services.common.transfer.mooncake import open_transfer_engine

__all__ = ["Exposed", "TransferEngine", "open_transfer_engine"]
