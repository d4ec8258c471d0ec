"""Keys of config.json that change nothing in what our models compute.

Every key of a config is read, listed here or in its architecture as neutral, or the reason for a refusal.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vlm.models.pretrained.fields import Fields

OFF: tuple[Any, ...] = (None, False, {}, [])  # values that switch off whatever a key is for
# Neutral with any value. Rates of dropout, initial values and gradient checkpointing matter in training only, which has
# its own settings here.
DROPOUTS = {
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classif_dropout"),
    *("classifier_dropout", "classifier_dropout_prob", "decoder_layerdrop", "drop_path_rate", "dropout"),
    *("dropout_rate", "embd_pdrop", "encoder_layerdrop", "hidden_dropout", "hidden_dropout_prob", "layerdrop"),
    *("qa_dropout", "resid_pdrop", "seq_classif_dropout", "summary_first_dropout", "neftune_noise_alpha"),
}
INITIAL = {"initializer_factor", "initializer_range", "init_std", "logit_scale_init_value", "layerscale_value"}
TRAINING = {
    "gradient_checkpointing",
    "label_smoothing",
    "use_reentrant_checkpoints",
    "ignore_index",
    *DROPOUTS,
    *INITIAL,
}
# Where a config comes from, what its classes return, how they compute it.
DESCRIPTION = {
    *("architectures", "model_type", "transformers_version", "name_or_path", "processor_class", "tokenizer_class"),
    *("finetuning_task", "task_specific_params", "model_max_length", "transformers.js_config", "is_llama_config"),
    *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "return_dict", "use_return_dict", "output_past"),
    *("output_attentions", "output_hidden_states", "tie_last_hidden_states", "chunk_size_feed_forward", "use_cache"),
    *("attn_implementation", "experts_implementation", "unsloth_fixed", "unsloth_version", "pretraining_tp"),
    *("id2label", "label2id", "num_labels", "problem_type", "tie_word_embeddings"),  # which models with heads read
}
# Read elsewhere: ids and decoding options by Folder.generation, quantisation where the weights are read.
ELSEWHERE = {
    *("bos_token_id", "cls_token_id", "eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("decoder_start_token_id", "prefix"),
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores"),
    *("remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate"),
    *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "quantization_config"),
}
COMMON = TRAINING | DESCRIPTION | ELSEWHERE


def refuse_unread_keys(config: Fields, neutral: Mapping[str, Collection[str]]) -> None:
    """Checks that every key of a config was read, or is neutral.

    Args:
        config: A config all of whose readers have run.
        neutral: By the path of an object in the file: its keys that are neutral with any value, besides COMMON.
    Raises:
        UserError: One is neither; its value may change what the model computes.
    """
    for fields, name in _unread(config, neutral):
        raise fields.fault(name, "a key that vlm does not support")


def _unread(config: Fields, neutral: Mapping[str, Collection[str]]) -> Iterable[tuple[Fields, str]]:
    known: Collection[str] = COMMON.union(neutral[config.within]) if config.within in neutral else ()
    for name, value in config.values.items():
        if name in known or name.startswith("_") or _is_off(value):
            continue
        path = f"{config.within}{name}"
        if isinstance(value, Mapping) and any(read.startswith(f"{path}.") for read in config.used):
            yield from _unread(config.part(name), neutral)
        elif path not in config.used:
            yield config, name


def _is_off(value: Any) -> bool:
    return any(value is off or (type(value) is type(off) and value == off) for off in OFF)
