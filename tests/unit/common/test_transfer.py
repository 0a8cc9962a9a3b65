"""What the transfer engine refuses before it touches the network."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.errors import MachineError, WeightsError
from services.common.transfer import open_transfer_engine
from services.common.transfer.mooncake import describe_segment


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(MachineError) as caught:
        open_transfer_engine("tcp", "host.invalid")
    assert caught.value.hint


def test_only_contiguous_bytes_are_exposed() -> None:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    with pytest.raises(ValueError, match="contiguous"):
        engine.expose(np.zeros((4, 4), dtype=np.uint8)[:, 1])
    with pytest.raises(ValueError, match="uint8"):
        engine.expose(np.zeros(4, dtype=np.float32))
    engine.close()


def test_closed_engine_moves_nothing_and_closes_again() -> None:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    engine.close()
    engine.close()
    with pytest.raises(WeightsError):
        engine.expose(np.zeros(4, dtype=np.uint8))


def test_segment_descriptor_names_the_exposed_buffers() -> None:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    exposed = engine.expose(np.zeros(4096, dtype=np.uint8))
    buffers = describe_segment(exposed.segment, timeout_s=5.0)["buffers"]
    assert [(buffer["addr"], buffer["length"]) for buffer in buffers] == [(exposed.address, exposed.size_bytes)]
    engine.withdraw(exposed)
    assert describe_segment(exposed.segment, timeout_s=5.0)["buffers"] in (None, [])
    engine.close()
