"""Texts under grammars: valid, complete, chosen as without a mask where that is valid, and refused if not supported."""

import json
import random
import re
from typing import Any

import pytest
import torch

from vlm.data.text.tokenizer import ByteTokenizer
from vlm.decoding.constraints import Rules
from vlm.decoding.continuation import continue_texts
from vlm.decoding.grammar import Grammar, GrammarSource, GrammarStates, Vocabulary
from vlm.decoding.loop import decode
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.decoding.schema import MAX_SCHEMA
from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.nn.position import RotaryPositions

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
WORDS = [
    b'{"',
    b'":',
    b'",',
    b"}}",
    b"red",
    b' "',
    b"\n  ",
    b"\xe6\x97",
    b"true",
    b"0.",
    b"12",
]  # of two bytes and more
TOKENS = [TOKENIZER.bytes_of(id) for id in range(TOKENIZER.vocab_size)]
BYTES, PIECES = (Vocabulary(tokens, [EOS]) for tokens in (TOKENS, TOKENS + WORDS))


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


NAME, COLOR = {"type": "string", "maxLength": 12}, {"enum": ["red", "green", "blue", None, 3]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=NAME, age={"type": "integer"}, member={"type": "boolean"}),
    "nested": closed(owner=closed(name=NAME, home=closed(city=NAME, code={"type": "integer"})), color=COLOR),
    "enums": closed(color=COLOR, size={"enum": ["S", "M", "L"]}, kind={"const": {"a": [1, "two"]}}),
    "array": {"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 300}, "maxItems": 5},
    "objects": {
        "type": "array",
        "items": closed(id={"type": "integer"}, tag=NAME),
        "minItems": 1,
        "maxItems": 3,
    },
    "pattern": closed(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}, day={"format": "date", "type": "string"}
    ),
    "numbers": closed(
        share={"type": "number", "minimum": 0, "maximum": 1},
        year={"type": "integer", "exclusiveMinimum": 1899, "maximum": 2100},
        step={"type": "integer", "multipleOf": 7},
    ),
    "any of": closed(value={"anyOf": [NAME, {"type": "integer"}, {"type": "null"}, closed(x={"type": "number"})]}),
    "references": {
        "$defs": {"point": closed(x={"type": "number"}, y={"type": "number"}), "text": NAME},
        **closed(
            at={"$ref": "#/$defs/point"}, path={"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2}
        ),
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "minLength": 2, "maxLength": 6}, {"type": "boolean"}, COLOR],
        "items": False,
        "minItems": 3,
    },
}


def source(schema: Any) -> GrammarSource:
    return GrammarSource("json_schema", json.dumps(schema))


def choose(*texts: str, **options: bool) -> GrammarSource:
    return GrammarSource("choice", json.dumps(texts), **options)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """A random model whose next token depends on the text."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": PIECES.size, "max_len": 4096, "dim": 16, "depth": 1, "num_heads": 2}
    model = Decoder(**sizes, positions=RotaryPositions(head_dim=8)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def continuations(
    decoder: Decoder, prompts: list[list[int]], grammars: list[Grammar | None], **options: Any
) -> list[list[int]]:
    """The tokens of each continuation, with the end token."""
    texts: list[list[int]] = [[] for _ in prompts]
    settings: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 3000, "seed": 0} | options
    for step in continue_texts(decoder, prompts, eos_id=EOS, grammars=grammars, **settings):
        for item in step:
            texts[item.prompt].append(item.token)
    return texts


def text_of(tokens: list[int]) -> str:
    return b"".join((TOKENS + WORDS)[token] for token in tokens).decode()


@pytest.mark.sample(plain=1, slow=10)
@pytest.mark.parametrize("name", SCHEMAS)
def test_sampled_answers_of_random_weights_end_and_validate(decoder: Decoder, name: str) -> None:
    grammar, count = PIECES.compile(source(SCHEMAS[name])), 100
    prompts = [[5 + place, 7] for place in range(count)]
    texts = continuations(decoder, prompts, [grammar] * count)
    ended = [tokens for tokens in texts if tokens[-1] == EOS]
    print(f"{name}: {len(ended)} of {count} end; the longest has {max(map(len, texts))} tokens")
    assert len(ended) >= 0.99 * count
    check = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    for tokens in ended:
        check.validate(json.loads(text_of(tokens)))
        assert grammar.accepts(tokens[:-1])
    assert len({tuple(tokens) for tokens in texts}) > count // 4  # not one text for all


def test_each_row_of_a_batch_has_its_own_grammar_and_equals_a_batch_of_one(decoder: Decoder) -> None:
    sources = [choose("yes", "no"), GrammarSource("regex", "[a-f]{3,6}x"), None, source(SCHEMAS["flat"]), choose("é😀")]
    grammars = [None if item is None else PIECES.compile(item) for item in sources]
    prompts = [[9, 4], [8], [3, 3, 3, 3], [30, 31, 32], [7]]
    together = continuations(decoder, prompts, grammars, max_tokens=150)
    alone = [
        continuations(decoder, [prompt], [grammar], max_tokens=150)[0]
        for prompt, grammar in zip(prompts, grammars, strict=True)
    ]
    assert together == alone
    yes, letters, free, flat, face = together
    assert text_of(yes) in ("yes", "no") and text_of(face) == "é😀"
    assert re.fullmatch("[a-f]{3,6}x", text_of(letters))
    jsonschema.validate(json.loads(text_of(flat)), SCHEMAS["flat"])
    assert free == continuations(decoder, [prompts[2]], [], max_tokens=150)[0]  # as without any grammar
    assert all(tokens[-1] == EOS for tokens in (yes, letters, flat, face))


def test_masks_of_threads_are_those_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = [PIECES.compile(source(schema)) for schema in SCHEMAS.values()]
    masks = []
    for limit in (0, 10**9):
        monkeypatch.setattr("vlm.decoding.grammar.PARALLEL", limit)
        states = GrammarStates(grammars, columns=1)
        states.begin(range(len(grammars)))
        for _ in range(4):
            scores = torch.zeros(len(grammars), PIECES.size)
            states.constrain(scores)
            masks.append(scores)
            states.append(scores.flip(1).argmax(1, keepdim=True).neg().add(PIECES.size - 1).tolist())
    assert all(map(torch.equal, masks[:4], masks[4:])) and len({str(mask.tolist()) for mask in masks}) == 4


def test_the_window_moves_and_the_grammar_goes_on(scramble: Any) -> None:
    torch.manual_seed(1)
    small = scramble(Decoder(vocab_size=BYTES.size, max_len=8, dim=16, depth=1, num_heads=2))
    grammars = [BYTES.compile(GrammarSource("regex", pattern)) for pattern in ("(ab){12}", "(cde){7}")]
    texts = continuations(small, [[5], [6, 7, 8]], grammars)
    assert [text_of(tokens) for tokens in texts] == ["ab" * 12, "cde" * 7]


@pytest.mark.parametrize("columns", [1, 3])
def test_the_decoding_loop_with_rows_that_change_equals_one_input_at_a_time(decoder: Decoder, columns: int) -> None:
    grammar = PIECES.compile(source(closed(color=COLOR, n={"type": "integer"})))
    sampling = Sampling(temperature=0.8)
    decoding = Decoding(sampling=sampling, results=columns, rules=Rules(grammar=grammar), max_tokens=400, seed=2)

    def texts(ids: list[int], rows: int) -> dict[int, list[list[int]]]:
        found = decode(decoder, [(ids, None)], decoding, bos_id=1, eos_id=EOS, rows=rows)
        return {ids[place]: [text.tokens for text in best] for place, best in found}

    together = texts([4, 5, 6, 7, 8], rows=2)
    assert together == {id: texts([id], rows=1)[id] for id in range(4, 9)}
    for best in together.values():
        for tokens in best:
            jsonschema.validate(json.loads(text_of(tokens)), closed(color=COLOR, n={"type": "integer"}))
    assert len({str(best) for best in together.values()}) > 1


def test_a_prefix_is_not_part_of_what_a_grammar_reads(decoder: Decoder) -> None:
    rules = Rules(grammar=PIECES.compile(choose("red", "green")), prefix=(50, 51))
    ((_, (best,)),) = decode(decoder, [([0], None)], Decoding(rules=rules), bos_id=1, eos_id=EOS, rows=1)
    assert text_of(best.tokens) in ("red", "green")


def test_bans_and_repetition_do_not_break_a_grammar(decoder: Decoder) -> None:
    rules = Rules(grammar=PIECES.compile(choose("abababab")), banned=((100,),), no_repeat_ngram=2, min_tokens=40)
    ((_, (best,)),) = decode(decoder, [([0], None)], Decoding(rules=rules), bos_id=1, eos_id=EOS, rows=1)
    assert text_of(best.tokens) == "abababab"


def test_a_greedy_text_that_is_valid_is_the_same_with_a_mask() -> None:
    """The model writes a given text, of which every prefix has its own hidden state; the mask must change nothing."""
    written = '{"name": "Ann é",\n  "age": 41, "member": false}\n'
    tokens = [*TOKENIZER.encode(written), EOS]

    class Reciter(Decoder):
        """A decoder whose likeliest next token is that of a text."""

        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.randn(len(hidden), BYTES.size, generator=torch.Generator().manual_seed(self.said))
            logits[:, tokens[self.said]] = 10.0
            self.said += 1
            return logits

    sizes: dict[str, Any] = {"vocab_size": BYTES.size, "max_len": 512, "dim": 16, "depth": 1, "num_heads": 2}
    greedy = Sampling(temperature=0.0)
    said = []
    for grammars in ([], [BYTES.compile(source(SCHEMAS["flat"]))]):
        model = Reciter(**sizes).eval()
        model.said = 0
        said += continuations(model, [[5]], grammars, sampling=greedy)
    assert said[0] == said[1] == tokens


@pytest.mark.slow
def test_a_trained_model_writes_the_same_valid_greedy_texts_with_a_mask() -> None:
    """The model learns to continue a prompt with a JSON object of the prompt's words."""
    dice = random.Random(0)

    def draw_example() -> tuple[str, str]:
        name, age = "".join(dice.choices("abcdefgh", k=dice.randint(2, 4))), dice.randint(1, 99)
        member = dice.random() < 0.5
        return f"{name} {age} {'in' if member else 'out'}: ", json.dumps({"name": name, "age": age, "member": member})

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": BYTES.size, "max_len": 128, "dim": 64, "depth": 2, "num_heads": 4}
    model = Decoder(**sizes, positions=RotaryPositions(head_dim=16))
    optimizer, steps, rate = torch.optim.AdamW(model.parameters(), weight_decay=0.01), 300, 3e-3
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50) * (1 - step / steps)
        rows = [[*TOKENIZER.encode("".join(draw_example())), EOS] for _ in range(48)]
        length = max(map(len, rows))
        tokens = torch.tensor([row + [EOS] * (length - len(row)) for row in rows])  # (B, L)
        labels = torch.tensor([row + [-100] * (length - len(row)) for row in rows])
        logits = model.head(model(tokens[:, :-1]))  # (B, L - 1, V)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
    prompts = [TOKENIZER.encode(draw_example()[0]) for _ in range(80)]
    greedy: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "max_tokens": 100}
    free = continuations(model.eval(), prompts, [], **greedy)
    masked = continuations(model, prompts, [BYTES.compile(source(SCHEMAS["flat"]))] * len(prompts), **greedy)
    check = jsonschema.Draft202012Validator(SCHEMAS["flat"])

    def is_valid(tokens: list[int]) -> bool:
        try:
            return tokens[-1] == EOS and check.is_valid(json.loads(text_of(tokens)))
        except ValueError:
            return False

    places = [place for place, tokens in enumerate(free) if is_valid(tokens)]
    print(f"{len(places)} of {len(free)} texts are valid without a mask, {len({*map(tuple, free)})} of them different")
    assert len(places) >= 50 and len({tuple(free[place]) for place in places}) >= 25
    assert [masked[place] for place in places] == [free[place] for place in places]
    assert all(map(is_valid, masked))


def test_tokens_of_one_text_several_ends_and_padded_weights() -> None:
    tokens = [b"", b"", b"yes", b"y", b"es", b"yes", b"no"]
    grammar = Vocabulary(tokens, [0, 1]).compile(choose("yes"))
    states = GrammarStates([grammar, None], columns=1)
    states.begin([0, 1])

    def allowed_tokens() -> list[list[int]]:
        scores = torch.zeros(2, 9)  # two rows of the weights have no token
        states.constrain(scores)
        return [(row == 0).nonzero()[:, 0].tolist() for row in scores]

    free = [*range(9)]
    assert allowed_tokens() == [[2, 3, 5], free]
    states.append([[3], [8]])
    assert allowed_tokens() == [[4], free]
    states.append([[4], [8]])
    assert allowed_tokens() == [[0, 1], free]
    states.append([[1], [8]])
    assert allowed_tokens() == [free, free]  # ended texts are unconstrained
    states.begin([0])
    assert allowed_tokens()[0] == [2, 3, 5]
    states.select([0, 0])  # a row that is repeated goes on by itself
    states.append([[3], [2]])
    assert allowed_tokens() == [[4], [0, 1]]


DEEP: Any = {}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
REFUSED: dict[str, tuple[GrammarSource, str]] = {
    "keyword": (source({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "type": (source({"type": "text"}), "text"),
    "unsatisfiable": (source({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
    "remote": (source({"$ref": "http://example.com/schema"}), "example.com"),
    "lookahead": (GrammarSource("regex", "(?=a)b"), "look"),
    "open group": (GrammarSource("regex", "(a"), "group"),
    "closing group": (GrammarSource("regex", "a)|(b"), "group"),
    "long schema": (source({"title": "x" * MAX_SCHEMA}), "65,536"),
    "deep schema": (source(DEEP), "recursion"),
    "options of the library": (source({"x-guidance": {"lenient": True}}), "x-guidance"),
    "many multiples": (source({"items": {"multipleOf": 99991}}), "multipleOf"),
    "long number": (source({"type": "integer", "maximum": 10**40}), "digits"),
    "long pattern": (GrammarSource("regex", "a" * 10_000), "8,192"),
    "no choice": (choose(), "1 to 1,024"),
    "empty choice": (choose("a", ""), "empty"),
    "long choices": (choose("a" * 70_000), "65,536"),
    "product of objects": (
        source({"allOf": [{"anyOf": [{"properties": {f"x{j}": {"const": i}}} for i in (0, 1)]} for j in range(24)]}),
        "too large",
    ),
}


def all_optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{place}": {} for place in range(count)}}


def self_reference(**others: Any) -> dict[str, Any]:
    return {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a", **others}


PATTERNS = [{"type": "string", "pattern": f"{letter}.*{letter}"} for letter in "abcdefghijk"]
ENDLESS = {
    "root": {"$ref": "#"},
    "pair": self_reference(),
    "property": closed(a=NAME, b={"$ref": "#"}),
    "others": {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
    "items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "first item": {"type": "array", "prefixItems": [NAME, {"$ref": "#"}], "minItems": 2},
    "each branch": {"anyOf": [closed(a={"$ref": "#"}), {"$ref": "#"}]},
    "within": closed(a=closed(b={"$ref": "#/properties/a"})),
    "escaped": {"$defs": {"a/b c": closed(x={"$ref": "#/$defs/a~1b%20c"})}, "$ref": "#/$defs/a~1b%20c"},
}
REFUSED |= {f"endless {name}": (source(schema), "no text can end") for name, schema in ENDLESS.items()}
REFUSED |= {
    f"joined by {name}": (source(schema), "more than 10 patterns apply to the same value")
    for name, schema in {
        "all of": {"allOf": PATTERNS},
        "nesting": {"allOf": [{"allOf": PATTERNS[:6]}, {"anyOf": [NAME, {"allOf": PATTERNS[6:]}]}]},
        "references": {
            "$defs": {f"d{place}": {**one, "$ref": f"#/$defs/d{place + 1}"} for place, one in enumerate(PATTERNS[:10])}
            | {"d10": PATTERNS[10]},
            "$ref": "#/$defs/d0",
        },
        "properties": {"allOf": [{"type": "object", "properties": {"a": one}} for one in PATTERNS]},
    }.items()
}
REFUSED |= {
    "optional properties": (source(all_optional(401)), "401 optional properties; the maximum is 400"),
    "pattern properties": (
        source({"type": "object", "patternProperties": {f"^{place}$": {} for place in range(65)}}),
        "65 patterns of patternProperties; the maximum is 64",
    ),
}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}'),
        (closed(a={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), '{"a": {"a": null}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        ({"type": "array", "prefixItems": [NAME], "items": {"$ref": "#"}, "minItems": 1}, '["a", ["b"]]'),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]}, "[1, [2, 3]]"),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a": null}'),
        (all_optional(400), '{"p7": 1, "p399": []}'),
        ({"allOf": [{"type": "string", "maxLength": 30}, *PATTERNS[:3]]}, '"abcabc"'),
    ],
)
def test_recursion_that_can_end_and_schemas_at_the_limits_are_allowed(schema: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema)
    assert BYTES.compile(source(schema)).accepts(TOKENIZER.encode(text))


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_is_not_supported_is_refused_with_its_reason(name: str) -> None:
    grammar, reason = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        BYTES.compile(grammar)
    assert str(refused.value).startswith(grammar.option) and "\n" not in str(refused.value)


def test_texts_that_the_tokens_cannot_write_are_refused() -> None:
    with pytest.raises(UserError, match="matches no text"):
        Vocabulary([b"", b"a"], [0]).compile(choose("b"))


def test_a_text_without_a_possible_next_token_ends_and_is_not_accepted() -> None:
    vocabulary = Vocabulary([b"", b"a", b"c"], [0])
    grammar = vocabulary.compile(choose("ab"))
    decoder = Decoder(vocab_size=3, max_len=16, dim=8, depth=1, num_heads=1).eval()
    ((_, (best,)),) = decode(decoder, [([0], None)], Decoding(rules=Rules(grammar=grammar)), bos_id=0, eos_id=0, rows=1)
    assert best.tokens == [1, 0] and not grammar.accepts([1])


def test_beams_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="--choice and --beam"):
        Decoding(beam=2, rules=Rules(grammar=BYTES.compile(choose("a"))))


def test_compiled_grammars_are_kept_and_the_oldest_is_dropped() -> None:
    vocabulary = Vocabulary(TOKENS, [EOS])
    first = vocabulary.compile(choose("0"))
    assert vocabulary.compile(choose("0")) is first
    for number in range(1, 40):
        vocabulary.compile(choose(str(number)))
    assert vocabulary.compile(choose("0")) is not first
