"""generation_config.json: each key is used, changes no text, or is refused; distributions equal transformers'."""

from typing import Any

import pytest
import torch

from vlm.checkpoint.hugging_face import OPTIONS, UNSUPPORTED, read_decoding_defaults
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.options import DecodingOptions
from vlm.models.pretrained.fields import Fields

t = pytest.importorskip("transformers")
READ_ELSEWHERE = {"early_stopping", "do_sample", "max_length", "min_length", "bad_words_ids", "forced_eos_token_id"}
READ_ELSEWHERE |= {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
# Keys of speed and memory, of drafts that the model checks, and of what `generate` returns besides texts.
NEUTRAL = {
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight"),
    *("target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "renormalize_logits", "remove_invalid_values"),
    *("_from_model_config", "transformers_version"),
}
PLAIN: dict[str, Any] = {"min_p": 0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "guidance_scale": 1, "num_beams": 1}
PLAIN |= {"repetition_penalty": 1.0, "stop_strings": [], "suppress_tokens": [], "bad_words_ids": [], "min_length": 0}
PLAIN |= {"token_healing": False, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0}


def defaults_of(**values: Any) -> dict[str, Any]:
    return read_decoding_defaults(Fields(values, "generation_config.json"), prompted=True)


def test_each_key_of_transformers_has_its_place() -> None:
    known = {option.name for option in OPTIONS.values()} | UNSUPPORTED.keys() | READ_ELSEWHERE
    assert not known & NEUTRAL
    assert t.GenerationConfig().to_dict().keys() <= known | NEUTRAL


@pytest.mark.parametrize("name", PLAIN)
def test_a_neutral_value_changes_nothing(name: str) -> None:
    """Other than the filter that it turns off."""
    plain = DecodingOptions().resolve(defaults_of(), samples_by_default=True)
    assert DecodingOptions().resolve(defaults_of(**{name: PLAIN[name]}), samples_by_default=True).build_sampling() in (
        plain.build_sampling(),
        Sampling(**{name: PLAIN[name]}) if name in vars(plain.build_sampling()) else None,
    )


@pytest.mark.parametrize("name", ["top_h", "stop_strings", "guidance_scale", "watermarking_config", "max_time"])
def test_what_would_change_texts_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"generation_config.json: .*{name}"):
        defaults_of(**{name: 0.5})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_k": 0},
        {"top_k": 7, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.9, "min_p": 0},
        {"top_k": 0, "top_p": 0.0},
        {"temperature": 0.7, "top_k": 0, "min_p": 0.3},
    ],
)
def test_the_distribution_of_a_token_is_that_of_transformers(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=80, **sizes)).eval()
    model.lm_head.weight.data *= 40
    prompt = torch.tensor([[3, 5, 7]])
    stated = {"do_sample": True, **values}
    options = t.GenerationConfig(**stated, max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    scores = model.generate(prompt, generation_config=options).scores[0]
    sampling = DecodingOptions().resolve(defaults_of(**stated), samples_by_default=True).build_sampling()
    with torch.no_grad():
        ours = sampling.probabilities(model(prompt).logits[:, -1].double())
    torch.testing.assert_close(ours.float(), scores.softmax(-1), rtol=1e-4, atol=1e-6)
    assert (ours > 0).sum() == (scores > -torch.inf).sum()
