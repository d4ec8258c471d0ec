"""Fields of a task as its config names them."""

from vlm.config.compose import compose
from vlm.training.run.build import build_fields

INPUT = "vlm.data.text.inputs.InputField"


def test_fields_of_equal_tokenizers_share_one() -> None:
    fields = compose(["tokenizer=bytes"])["task"]["fields"]
    other = {**fields["captions"]["tokenizer"], "lowercase": True}
    source = {"_target_": INPUT, "tokenizer": fields["captions"]["tokenizer"], "max_len": 8}
    nodes = {**fields, "source": source, "apart": {**source, "tokenizer": other}}
    built = build_fields({"task": {"fields": nodes}})
    assert list(built) == [*fields, "source", "apart"]
    assert built["source"].tokenizer is built["captions"].tokenizer
    assert built["apart"].tokenizer is not built["source"].tokenizer
    assert built["images"].tokenizer is None
