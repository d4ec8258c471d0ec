"""Small random language models of Hugging Face that were taught to converse: their tokenizers and chat templates."""

from typing import Any

import torch
import transformers as t
from hugging import TEXTS, wide
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SYSTEM = "<|im_start|>system\nYou are kind<|im_end|>\n"
ROW = "'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'"
ASKED = "{% if add_generation_prompt %}"
LLAMA3 = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'+ m['content'] | trim + '<|eot_id|>'"
# Chat templates as published folders have them, in fewer words.
TEMPLATES = {
    "chatml": f"{{% for m in messages %}}{{% if loop.first and m['role'] != 'system' %}}{{{{ '{SYSTEM}' }}}}"
    "{% endif %}"
    f"{{{{{ROW}}}}}{{% endfor %}}{ASKED}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}",
    "llama3": f"{{% for m in messages %}}{{% set content = {LLAMA3} %}}{{% if loop.index0 == 0 %}}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    f"{ASKED}{{{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}}}{{% endif %}}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + "
    f"'<end_of_turn>\n' }}}}{{% endfor %}}{ASKED}{{{{'<start_of_turn>model\n'}}}}{{% endif %}}",
}
# The begin and end tokens of each.
MARKS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "gemma": ["<bos>", "<end_of_turn>", "<start_of_turn>"],
}


def tokenizer_of(name: str) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=MARKS[name],
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    begin, end, *_ = MARKS[name]
    return t.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=begin, eos_token=end, chat_template=TEMPLATES[name]
    )


def saved_chat(folder: Any, name: str, *, room: int = 2048) -> Any:
    """The tokenizer of a Llama that is saved in a folder."""
    tokenizer = tokenizer_of(name)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": room, "vocab_size": len(tokenizer)}
    model = wide(t.LlamaForCausalLM(t.LlamaConfig(**sizes, **ids, pad_token_id=ids["eos_token_id"])), std=0.3)
    with torch.no_grad():
        for layer in model.modules():
            if type(layer).__name__.endswith("RMSNorm"):
                layer.weight.add_(1)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return tokenizer
