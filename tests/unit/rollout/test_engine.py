"""What an engine needs of its surroundings, without starting one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from services.rollout.cell import call_seed
from services.rollout.config import CellsConfig, EngineConfig, RolloutConfig
from services.rollout.engine import Engine, _first_line, _sockets_folder, engine_env, hidden_ids
from tests.unit.proxy.templates import CHATML
from tests.unit.proxy.templates import tokenizer as tokenizer_of


def test_no_cpu_setting_reaches_a_gpu_cell() -> None:
    env = engine_env(RolloutConfig(cells=CellsConfig(gpus_per_cell=1)), 0)
    assert env["HF_HUB_OFFLINE"] == "1"
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"} & env.keys()


def test_cpu_cells_are_not_bound_to_one_core() -> None:
    env = engine_env(RolloutConfig(engine=EngineConfig(num_threads=3)), 1)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("name", ["max_model_len", "logprobs_mode"])
def test_what_a_job_relies_on_cannot_be_overruled(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        EngineConfig(extra={name: 1})
    assert EngineConfig(extra={"seed": 1}).extra == {"seed": 1}


def test_a_refused_setting_of_the_engine_is_named_with_its_reason() -> None:
    """The first line of pydantic's message, by which vLLM refuses settings, only counts them."""
    with pytest.raises(ValidationError) as refused:
        EngineConfig(max_model_len=1)
    assert _first_line(refused.value) == "ValidationError: Input should be greater than or equal to 16"
    assert _first_line(RuntimeError("no memory\n  at line 3")) == "RuntimeError: no memory"


def test_the_cell_can_be_imported_without_vllm() -> None:
    program = "import sys, services.rollout.cell; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_calls_of_a_group_get_different_seeds_and_a_call_always_the_same() -> None:
    first, second = call_seed(7, "g000000-r0-a0-c0", 0), call_seed(7, "g000000-r1-a0-c0", 0)
    assert first is not None
    assert second is not None
    assert first != second
    assert first == call_seed(7, "g000000-r0-a0-c0", 0)
    assert 0 <= first < 1 << 63


def test_a_call_that_goes_on_does_not_draw_the_same_numbers_again() -> None:
    assert call_seed(7, "g000000-r0-a0-c0", 0) != call_seed(7, "g000000-r0-a0-c0", 5)


def test_no_seed_stays_none() -> None:
    assert call_seed(None, "g000000-r0-a0-c0", 0) is None


def test_an_engine_leaves_no_socket_file_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/before")
    with _sockets_folder():
        folder = Path(os.environ["VLLM_RPC_BASE_PATH"])
        (folder / "socket").write_text("")
    assert not folder.exists()
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/before"


def test_special_tokens_stay_in_the_text_if_parsers_need_them_and_end_no_answer() -> None:
    tokenizer = marked_by("<tool_call>", "[TOOL_CALLS]", "<|eom|>", "<|python_tag|>")
    end = tokenizer.convert_tokens_to_ids(["<|eom|>", "<|im_end|>"])
    hidden = hidden_ids(tokenizer, frozenset(end))
    ids = tokenizer.encode("<|im_start|>a <tool_call>b[TOOL_CALLS]é🦊<|python_tag|><|eom|><|im_end|><|endoftext|>")
    engine = Engine(EngineConfig(), "")
    engine._tokenizer, engine._hidden_ids = tokenizer, hidden
    assert engine.decode(ids) == "a <tool_call>b[TOOL_CALLS]é🦊<|python_tag|>"
    assert engine.decode(end) == engine.decode([]) == ""


def test_a_stop_token_that_parsers_know_is_left_out_all_the_same() -> None:
    tokenizer = marked_by("<|message_sep|>")
    stop = tokenizer.convert_tokens_to_ids("<|message_sep|>")
    assert stop not in hidden_ids(tokenizer, frozenset())
    assert stop in hidden_ids(tokenizer, frozenset([stop]))


def test_without_such_tokens_the_text_is_that_of_the_tokenizer() -> None:
    tokenizer = marked_by()
    engine = Engine(EngineConfig(), "")
    engine._tokenizer, engine._hidden_ids = tokenizer, hidden_ids(tokenizer, frozenset([2]))
    for text in ("<|im_start|>assistant\nLs -la\n<|im_end|>\n", " a  b ", "grüße 🦊<|endoftext|>"):
        ids = tokenizer.encode(text)
        assert engine.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def marked_by(*special: str) -> PreTrainedTokenizerFast:
    made = tokenizer_of(CHATML)
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made
