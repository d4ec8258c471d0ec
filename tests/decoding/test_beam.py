"""Beam search against all sequences there are, one by one, without a cache."""

from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from vlm.decoding.beam import part_size, top_indices
from vlm.decoding.constraints import Rules
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.models.context import Context

V, STEPS, BOS, EOS = 5, 4, 1, 2
WIDE = 4 * V ** (STEPS - 1)  # more beams than there are hypotheses at any step
RULES = {rule.name for rule in fields(Rules)}
OPTIONS = {
    "plain": {},
    "short": {"length_penalty": 0.0},
    "long": {"length_penalty": 2.0},
    "shortest": {"length_penalty": -1.0},
    "min_tokens": {"min_tokens": 2},
    "no_repeat_1": {"length_penalty": 2.0, "no_repeat_ngram": 1},
    "no_repeat_2": {"length_penalty": 2.0, "no_repeat_ngram": 2},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_wanted": {"repetition_penalty": 0.6},
    "banned": {"length_penalty": 2.0, "banned": ((3,), (0, 4))},
    "required": {"required": (((3, 0),),)},
    "required_ways": {"required": (((4, 4), (0,)), ((3,),))},
    "prefix": {"prefix": (3, 0)},
    "cut": {"max_tokens": 2, "length_penalty": 3.0},
}
OPTIONS["all"] = {"length_penalty": 0.7, "prefix": (4,), "min_tokens": 2, "no_repeat_ngram": 2}
OPTIONS["all"] |= {"repetition_penalty": 1.2, "banned": ((0, 3),), "required": (((3,),),)}


@torch.no_grad()
def step_logprobs(decoder, context, texts):
    """Log-probabilities of the next token after each of some texts of one length, for one image."""
    rows = Context(context.states.expand(len(texts), -1, -1), context.mask.expand(len(texts), -1))
    return decoder.head(decoder(torch.tensor(texts), None, rows))[:, -1].log_softmax(-1).tolist()


def holds(text, words):
    return any(tuple(text[at : at + len(words)]) == tuple(words) for at in range(len(text)))


def rule_score(logprob, token, text, rules, *, begin=1):
    """The score of a token after a text (which has the begin token), or None where it may not come."""
    if token in text:
        logprob *= rules.repetition_penalty
    n = rules.no_repeat_ngram
    if n and any(text[at : at + n] == [*text[len(text) - n + 1 :], token] for at in range(len(text) - n + 1)):
        return None
    if any(holds([*text, token][-len(words) :], words) for words in rules.banned if len(text) >= len(words) - 1):
        return None
    if token == EOS and len(text) - begin < rules.min_tokens:
        return None
    return logprob


def every_text(decoder, context, decoding):
    """(score, tokens, log-probabilities) of all texts that the rules leave, best first."""
    rules, limit = decoding.rules, min(decoding.max_tokens or STEPS, STEPS)
    steps = min(limit + 1, STEPS) - len(rules.prefix)
    limit -= len(rules.prefix)
    found, memory = {}, {}
    for length in range(steps):
        texts = [(BOS, *rules.prefix, *tokens) for tokens in product(range(V), repeat=length)]
        memory |= zip(texts, step_logprobs(decoder, context, texts), strict=True)

    def scores_after(text):
        """Scores and log-probabilities by the tokens that may come after a text."""
        scores = {token: rule_score(memory[text][token], token, list(text), rules) for token in range(V)}
        return {token: (score, memory[text][token]) for token, score in scores.items() if score is not None}

    for length in range(1, min(steps, limit) + 1):
        for tokens in product(range(V), repeat=length):
            if EOS in tokens[:-1] or (length < min(steps, limit) and tokens[-1] != EOS):
                continue
            text, total, logprobs = (BOS, *rules.prefix), 0.0, []
            for token in tokens:
                after = scores_after(text)
                if token not in after:
                    break
                total, logprobs, text = total + after[token][0], [*logprobs, after[token][1]], (*text, token)
            else:
                if not all(any(holds(text[1:], words) for words in ways) for ways in rules.required):
                    continue
                after = scores_after(text) if tokens[-1] != EOS and steps > limit else {}
                # No room but for the end token: the text ends where that is likeliest, else it is cut.
                if after and max(after, key=lambda token: after[token][0]) == EOS:
                    total, logprobs, tokens = total + after[EOS][0], [*logprobs, after[EOS][1]], (*tokens, EOS)
                found[tokens] = (total / len(tokens) ** decoding.length_penalty, list(tokens), logprobs)
    return sorted(found.values(), reverse=True)


@pytest.fixture
def decoder(make_decoder):
    return make_decoder(V, STEPS, sharpness=0.7)


@pytest.mark.sample(slow=17)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_brute_force(decoder, make_context, name):
    rules = {key: value for key, value in OPTIONS[name].items() if key in RULES}
    options = {key: value for key, value in OPTIONS[name].items() if key not in RULES}
    context, decoding = make_context(2), Decoding(beam=WIDE, results=4, rules=Rules(**rules), **options)
    ways = [replace(decoding, prune=prune) for prune in (True, False)]
    both = [decode_batch(decoder, context, way, bos_id=BOS, eos_id=EOS) for way in ways]
    for place in range(2):
        one = Context(context.states[place : place + 1], context.mask[place : place + 1])
        truth = every_text(decoder, one, decoding)[:4]
        for found in both:
            assert [text.tokens for text in found[place]] == [tokens for _, tokens, _ in truth]
            for text, (score, _, logprobs) in zip(found[place], truth, strict=True):
                assert text.score == pytest.approx(score, abs=1e-5)
                assert text.logprobs == pytest.approx(logprobs, abs=1e-5)


def naive_beam(decoder, context, decoding, steps):
    """Vijayakumar et al. 2018, algorithm 1, over lists; one group is plain beam search."""
    width, alpha = decoding.beam // decoding.groups, decoding.length_penalty
    groups = [[((), 0.0)] for _ in range(decoding.groups)]
    finished = [[] for _ in groups]
    for step in range(steps):
        taken = []
        for number, beams in enumerate(groups):
            grown = []
            texts = [(BOS, *tokens) for tokens, _ in beams]
            rows = step_logprobs(decoder, context, texts) if texts else []
            for (tokens, total), row in zip(beams, rows, strict=True):
                for token, logprob in enumerate(row):
                    penalty = decoding.diversity * taken.count(token)
                    grown.append((total + logprob - penalty, (*tokens, token), total + logprob))
            grown.sort(reverse=True)
            for rank, (_, tokens, total) in enumerate(grown[: 2 * width]):
                if rank < width and (tokens[-1] == EOS or step == steps - 1):
                    finished[number].append((total / len(tokens) ** alpha, tokens))
            finished[number] = sorted(finished[number], reverse=True)[:width]
            going = [(tokens, total) for _, tokens, total in grown[: 2 * width] if tokens[-1] != EOS]
            groups[number] = going[:width]
            taken += [tokens[-1] for tokens, _ in groups[number]]
    return sorted((pair for found in finished for pair in found), reverse=True)


@pytest.mark.sample(plain=6, slow=8)
@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.8, 1.5])
@pytest.mark.parametrize("beam, groups, results", [(1, 1, 1), (2, 1, 1), (3, 1, 3), (4, 2, 4), (6, 3, 2), (3, 3, 3)])
def test_narrow_beams_and_groups_equal_a_search_over_lists(make_decoder, make_context, beam, groups, results, alpha):
    steps = 7
    decoder, context = make_decoder(9, steps, sharpness=0.6), make_context(3)
    decoding = Decoding(beam=beam, groups=groups, results=results, length_penalty=alpha, diversity=0.4)
    found = decode_batch(decoder, context, decoding, bos_id=BOS, eos_id=EOS)
    for place, texts in enumerate(found):
        one = Context(context.states[place : place + 1], context.mask[place : place + 1])
        truth = dict((tokens, score) for score, tokens in reversed(naive_beam(decoder, one, decoding, steps)))
        ranked = sorted(truth.items(), key=lambda pair: -pair[1])[:results]
        if beam > 1:  # one beam alone is greedy search, which takes an end token even where it could be beaten
            assert [tuple(text.tokens) for text in texts] == [tokens for tokens, _ in ranked]
            assert [text.score for text in texts] == pytest.approx([score for _, score in ranked], abs=1e-5)


# Strict inequalities need texts that end early, and a random decoder with a prefix ends none.
CROSS = pytest.mark.parametrize("kind", ["cross"], indirect=True)


@CROSS
def test_pruning_changes_nothing_but_the_steps(make_decoder, make_context):
    decoder, context = make_decoder(11, 12, sharpness=0.5), make_context(24)
    steps = []
    for prune in (True, False):
        trees = {}
        decoding = Decoding(beam=4, results=2, length_penalty=0.6, prune=prune)
        steps.append((decode_batch(decoder, context, decoding, bos_id=BOS, eos_id=EOS, trees=trees), trees))
    assert [[text.tokens for text in texts] for texts in steps[0][0]] == [
        [text.tokens for text in texts] for texts in steps[1][0]
    ]
    assert sum(map(len, steps[0][1].values())) < sum(map(len, steps[1][1].values()))


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_required_words_are_in_every_text(make_decoder, make_context, beam):
    decoder, context = make_decoder(40, 9), make_context(4)
    required = (((7, 8, 9),), ((30,), (31, 32)))
    found = decode_batch(
        decoder,
        context,
        Decoding(beam=beam, results=min(beam, 2), rules=Rules(required=required)),
        bos_id=BOS,
        eos_id=EOS,
    )
    for texts in found:
        for text in texts:
            assert holds(text.tokens, (7, 8, 9)) and (holds(text.tokens, (30,)) or holds(text.tokens, (31, 32)))


@CROSS
def test_more_beams_find_required_texts_at_least_as_probable(make_decoder, make_context):
    decoder, context = make_decoder(40, 9), make_context(24)
    rules = Rules(required=(((7, 8),), ((30,),)))
    means = []
    for beam in (2, 12):
        decoding = Decoding(beam=beam, length_penalty=0.0, rules=rules)
        found = decode_batch(decoder, context, decoding, bos_id=BOS, eos_id=EOS)
        means.append(sum(texts[0].score for texts in found))
    assert means[1] > means[0]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"beam": 0}, "--beam"),
        ({"results": 3, "beam": 2}, "--results"),
        ({"beam": 4, "groups": 3}, "--groups"),
        ({"length_penalty": float("nan")}, "--length-penalty"),
        ({"beam": 2, "groups": 2, "rules": Rules(required=(((1,),),))}, "--require"),
        ({"beam": 2, "diversity": -1.0}, "--diversity"),
        # These have no room.
        ({"rules": Rules(prefix=(3,) * 4)}, "--prefix"),
        ({"rules": Rules(required=(((3,) * 5,),))}, "--require"),
        ({"rules": Rules(min_tokens=STEPS + 1)}, "--min-tokens"),
    ],
)
def test_impossible_options_are_refused(decoder, make_context, options, named):
    with pytest.raises(UserError, match=named):
        decode_batch(decoder, make_context(1), Decoding(**options), bos_id=BOS, eos_id=EOS)


@pytest.mark.parametrize(
    "rules, named",
    [
        ({"required": (((3,),),), "banned": ((3,),)}, "--ban forbids required word 1;"),
        ({"required": (((0,),), ((1, 3, 4), (4,))), "banned": ((4,),)}, "--ban forbids required word 2;"),
        ({"required": (((3, 4, 3, 4),),), "no_repeat_ngram": 2}, "--ban or --no-repeat-ngram forbids required word 1;"),
        ({"banned": ((),)}, "has no tokens"),
        ({"required": (((),),)}, "has no tokens"),
    ],
)
def test_contradictions_are_refused_before_decoding(rules, named):
    with pytest.raises(UserError, match=f"^--.*{named}"):
        Rules(**rules)
    assert Rules(required=(((3,), (4,)),), banned=((3,),)).required  # one way is left


@pytest.mark.parametrize("options", [{}, {"beam": 2}, {"sampling": Sampling(), "results": 2}])
def test_a_text_ends_where_the_rules_leave_no_token(make_decoder, make_context, options):
    """With four words and an end token that must not come, no text without repetition is longer than four."""
    decoder = make_decoder(V, 9)
    decoding = Decoding(rules=Rules(no_repeat_ngram=1, min_tokens=7), **options)
    for texts in decode_batch(decoder, make_context(6), decoding, bos_id=BOS, eos_id=EOS):
        for text in texts:
            assert sorted(text.tokens[:3]) == [0, 3, 4] and text.tokens[3:] in ([], [EOS])


@pytest.mark.parametrize("count", [1, 8, 20])
@pytest.mark.parametrize("size", [69, 8_000, 4 * 8_000, 3 * 50_257, 4 * 7_919, 7_919])
def test_the_best_are_those_of_a_whole_sort(size, count):
    scores = torch.randn(3, size)
    scores[1, 5:] = -torch.inf  # a text with few tokens left
    places = top_indices(scores, count)
    assert all(len(set(row)) == count for row in places.tolist())
    torch.testing.assert_close(scores.gather(1, places), scores.sort(descending=True).values[:, :count])
    assert size % part_size(size) == 0
