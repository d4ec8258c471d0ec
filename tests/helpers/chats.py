"""Small random language models of Hugging Face that were taught to converse: their tokenizers and chat templates."""

import base64
from pathlib import Path
from typing import Any

import transformers as t
from hugging import TEXTS, save_parts, wide
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
SYSTEM = "<|im_start|>system\nYou are kind<|im_end|>\n"
ROW = "'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'"
ASKED = "{% if add_generation_prompt %}"
LLAMA3 = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'+ m['content'] | trim + '<|eot_id|>'"
# These two have branches for tools, which conversations here do not take.
QWEN25 = r"""
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{ 'SYSTEM' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or m.role == 'system' and not loop.first or m.role == 'assistant' and not m.tool_calls %}
        {{- ROW }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>' + m.role }}
        {%- for call in m.tool_calls %}{{ '<call>' + call.name }}{% endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}{{ '<result>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""".replace("SYSTEM", SYSTEM).replace(
    "ROW", ROW
)
QWEN3 = r"""
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}{% set tool_start = '<tool_response>' %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or m.role == 'system' and not loop.first %}{{ ROW }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}{% set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and loop.last %}
            {{- '<|im_start|>' + m.role + '\n<think>\n' + thought + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{ '<|im_start|>' + m.role + '\n' + content }}{% endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}{{ '<result>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""".replace("ROW", ROW)
LLAMA31 = r"""{{ bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set told = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set told = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{ 'They run in ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\n' }}{{ 'Today Date: ' + date_string + '\n\n' }}{{ told }}{{ '<|eot_id|>' }}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or 'tool_calls' in m) %}{{ ROW }}
    {%- elif m.role == 'ipython' %}{{ 'ipython says ' + m['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""".replace(
    "ROW", LLAMA3
)
FIXED = "{% set date_string = '26 Jul 2024' %}"
TODAY = "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% else %}FIXED{% endif %}"
# Chat templates as published folders have them, in fewer words.
TEMPLATES = {
    "chatml": f"{{% for m in messages %}}{{% if loop.first and m['role'] != 'system' %}}{{{{ '{SYSTEM}' }}}}"
    "{% endif %}"
    f"{{{{{ROW}}}}}{{% endfor %}}{ASKED}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}",
    "llama3": f"{{% for m in messages %}}{{% set content = {LLAMA3} %}}{{% if loop.index0 == 0 %}}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    f"{ASKED}{{{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}}}{{% endif %}}",
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "llama31": LLAMA31,
    "llama32": LLAMA31.replace(FIXED, TODAY.replace("FIXED", FIXED)),
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + "
    f"'<end_of_turn>\n' }}}}{{% endfor %}}{ASKED}{{{{'<start_of_turn>model\n'}}}}{{% endif %}}",
}
LLAMA3_MARKS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
# The begin and end tokens of each.
MARKS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen25": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    **{f"llama{version}": list(LLAMA3_MARKS) for version in ("3", "31", "32")},
    "gemma": ["<bos>", "<end_of_turn>", "<start_of_turn>"],
}


def digit_pairs(special: list[str]) -> Tokenizer:
    """Byte-level pairs, digits apart, as Llama 3, Qwen2 and SmolLM2 have them."""
    made = Tokenizer(models.BPE())
    bytes_of, digits = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([digits, bytes_of]), decoders.ByteLevel()
    options = {"initial_alphabet": bytes_of.alphabet(), "special_tokens": special, "show_progress": False}
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=340, **options))
    return made


def tokenizer_of(name: str) -> Any:
    begin, end, *_ = MARKS[name]
    special = {"bos_token": begin, "eos_token": end, "chat_template": TEMPLATES[name]}
    return t.PreTrainedTokenizerFast(tokenizer_object=digit_pairs(MARKS[name]), **special)


def saved_chat(folder: Any, name: str, *, room: int = 2048) -> Any:
    """The tokenizer of a Llama that is saved in a folder."""
    tokenizer = tokenizer_of(name)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": room, "vocab_size": len(tokenizer)}
    config = t.LlamaConfig(**sizes, **ids, pad_token_id=ids["eos_token_id"])
    save_parts(folder, (tokenizer, wide(t.LlamaForCausalLM(config), std=0.3, norms="RMSNorm")))
    return tokenizer


def url_of(path: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(path).read_bytes()).decode()


def image_content(text: str, *paths: str) -> list[dict[str, Any]]:
    """A content of images and a text, as clients write it."""
    return [
        *({"type": "image_url", "image_url": {"url": url_of(path), "detail": "low"}} for path in paths),
        {"type": "text", "text": text},
    ]
