"""Models: the built-in ones are built once and whole; a folder that cannot work is refused with what to do."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.models import check_model, load_architecture, resolve_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny-qwen3", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_the_tiny_model_is_the_same_wherever_it_is_built(tiny: Path, tmp_path: Path) -> None:
    again = resolve_model("tiny-qwen3", tmp_path)
    assert again != tiny
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()


def test_a_built_model_is_not_built_again(tiny: Path) -> None:
    made_at_ns = (tiny / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny-qwen3", tiny.parent) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == made_at_ns


def test_two_builders_at_once_make_one_model_and_leave_no_scratch(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:  # the lock is per open file, so it holds between threads as between processes
        paths = list(pool.map(lambda _: resolve_model("tiny-qwen3", tmp_path), range(2)))
    assert paths[0] == paths[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        paths[0].name,
        paths[0].name + ".lock",
    ]


def test_the_tiny_tokenizer_keeps_any_text_and_ends_turns_with_one_token(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Täglich grüßt: ls -la | wc\n\t🦊"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert len(tokenizer) == json.loads((tiny / "config.json").read_text())["vocab_size"]


def test_the_tiny_template_extends_what_it_rendered_before(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    call = {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a.txt"},
    ]
    first = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert whole.startswith(first)
    assert '{"name": "run", "arguments": {"command": "ls"}}' in whole


def test_a_folder_is_taken_as_it_is(copy: Path, tmp_path: Path) -> None:
    assert resolve_model(str(copy), tmp_path / "unused") == copy
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("removed", "complaint"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "safetensors"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat template"),
    ],
)
def test_a_folder_that_cannot_work_is_refused_with_what_to_do(copy: Path, removed: str, complaint: str) -> None:
    (copy / removed).unlink()
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_model(copy)
    assert caught.value.hint


def test_a_template_inside_the_tokenizer_config_counts(copy: Path) -> None:
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    check_model(copy)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        resolve_model("no-such-model", tmp_path)


@pytest.mark.parametrize("content", ['{"model_type": "no-such-architecture"}', "{"])
def test_an_architecture_that_nobody_knows_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json cannot be understood"):
        load_architecture(copy)
