"""Required words in many texts at once against one text after the other."""

import pytest
import torch

from vlm.decoding.constraints import (
    RequiredWords,
    count_needed_tokens,
    count_required_tokens,
    missing_requirements,
    next_tokens,
)

CASES = {
    "one": (((1, 2, 1, 3),),),
    "ways": (((1,), (2, 3)), ((3, 3, 4),)),
    "overlaps": (((1, 2), (2, 2, 1)), ((2, 1, 2),), ((4,),)),
    "inside": (((1, 2, 3, 4),), ((2, 3),), ((3,),)),
}
ROWS, BEAMS, V, STEPS = 5, 3, 7, 14


@pytest.mark.parametrize("required", CASES.values(), ids=CASES)
def test_each_text_is_as_far_as_it_is_by_itself(required):
    words = RequiredWords(required, rows=ROWS, beams=BEAMS, device=torch.device("cpu"))
    texts = [[[] for _ in range(BEAMS)] for _ in range(ROWS)]
    seen = set()
    for step in range(STEPS):
        tokens, parents = torch.randint(1, 5, (ROWS, BEAMS)), torch.randint(BEAMS, (ROWS, BEAMS))
        words.append(tokens, parents)
        pairs = zip(tokens.tolist(), parents.tolist(), strict=True)
        texts = [[[*row[p], t] for t, p in zip(*pair, strict=True)] for row, pair in zip(texts, pairs, strict=True)]
        if step == 6:
            words.begin(torch.tensor([1, 4]))
            texts[1], texts[4] = ([[] for _ in range(BEAMS)] for _ in range(2))
        needed, gone = (
            words.count_needed_tokens(words.node, words.met),
            words.count_required_tokens(words.node, words.met),
        )
        wanted = words.next_token_mask()
        for row, beams in enumerate(texts):
            for beam, text in enumerate(beams):
                lacking = missing_requirements(text, required)
                assert words.met[row, beam].tolist() == [ways not in lacking for ways in required]
                assert needed[row, beam] == count_needed_tokens(text, lacking)
                assert gone[row, beam] == count_required_tokens(text, required)
                assert set(words.tokens[wanted[row, beam]].tolist()) == next_tokens(text, lacking)
                seen.add(len(lacking))
    assert len(seen) > 1


@pytest.mark.parametrize("room", range(-1, 8))
@pytest.mark.parametrize("required", CASES.values(), ids=CASES)
def test_tokens_are_left_by_which_a_text_can_still_hold_all(required, room):
    words = RequiredWords(required, rows=ROWS, beams=BEAMS, device=torch.device("cpu"))
    tokens = torch.randint(1, 5, (6, ROWS, BEAMS))
    for step in tokens:
        words.append(step, None)
    scores = torch.randn(ROWS * BEAMS, V)
    found = words.constrain(scores.clone(), torch.full((ROWS,), room), ends=(6,))
    for place, text in enumerate(tokens.flatten(1).T.tolist()):
        lacking, allowed = missing_requirements(text, required), set(range(V))
        if lacking:
            allowed -= {6}
        if lacking and count_needed_tokens((), lacking) > room:
            useful = next_tokens(text, lacking)
            allowed = {
                t for t in useful if count_needed_tokens([*text, t], missing_requirements([*text, t], lacking)) <= room
            }
        assert {t for t in range(V) if found[place, t] > -torch.inf} == allowed
        kept = sorted(allowed)
        assert torch.equal(found[place, kept], scores[place, kept])
