"""Chat templates of the families that models use, and a tokenizer that is trained on the spot."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from services.proxy.renderer import HfRenderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHATML_DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOLS_AND_REASONING = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Drops the reasoning of turns before the last user message, so its rendering of a history changes."""

STRICT_TOOLS = """\
{%- for m in messages %}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a tool message must follow its call') }}
{%- endif %}
{%- if m.role == 'assistant' %} {{ m.content }}
{%- for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}{% endfor %}<|im_end|>
{%- else %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]
{%- endif %}
{%- endfor %}"""
"""Refuses a tool message without its call, and marks no start of the answer."""

SPACED_END = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + ' <|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""Puts a space between an answer and its end."""

FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Renders no answer at all: nothing can be built on what was sampled."""

_CORPUS = [
    "You are an agent. Create a file named color.txt that contains the word blue.\n\n```bash\necho blue > x\n```\n",
    "system user assistant tool I should run the command. hello.txt done the a of to and in is it for on with",
    '{"name": "bash", "arguments": {"command": "ls -la"}} {"returncode": 0, "output": ""}',
]


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer that ends turns with ``<|im_end|>`` (id 2); id 0 is ``<|endoftext|>``."""
    made = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


@functools.cache
def renderer(template: str = CHATML) -> HfRenderer:
    """A renderer of a template; ``<|endoftext|>`` too ends an answer."""
    return HfRenderer(tokenizer(template), end_of_turn_ids=[0])
