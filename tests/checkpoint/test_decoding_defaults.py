"""generation_config.json: each key is used, changes no text, or is refused; distributions equal transformers'."""

from typing import Any

import pytest
import torch

from vlm.checkpoint.hugging_face import NEUTRAL, OPTIONS, UNSUPPORTED, read_decoding_defaults
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.options import DecodingOptions
from vlm.models.pretrained.fields import Fields

t = pytest.importorskip("transformers")
# Options with a value of another type, and those that a test of their own covers.
OTHER_TYPES = {"early_stopping", "do_sample", "max_length", "min_length", "bad_words_ids", "forced_eos_token_id"}
PLAIN: dict[str, Any] = {"min_p": 0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "guidance_scale": 1, "num_beams": 1}
PLAIN |= {"repetition_penalty": 1.0, "stop_strings": [], "suppress_tokens": [], "bad_words_ids": [], "min_length": 0}
PLAIN |= {"token_healing": False, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0}


def defaults_of(**values: Any) -> dict[str, Any]:
    return read_decoding_defaults(Fields(values, "generation_config.json"), prompted=True)


def test_each_key_of_transformers_is_known() -> None:
    """Every key that transformers writes is read, or changes no text; a key that neither knows is refused by name."""
    used = {option.name for option in OPTIONS.values()} | UNSUPPORTED.keys()
    assert not used & NEUTRAL
    stated = {name: 1 for name in t.GenerationConfig().to_dict().keys() - used - OTHER_TYPES}
    assert stated.keys() > NEUTRAL - {"trust_remote_code", "chat_format", "max_window_size"}
    assert defaults_of(**stated) == defaults_of()
    with pytest.raises(UserError, match=r"generation_config.json: new_penalty is 0.5, a key that vlm does not support"):
        defaults_of(**stated, new_penalty=0.5)


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
