"""Texts that are sampled in training: of what they depend, beside greedy answers, and the rows that hold them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reward_steps
import torch
from preference_steps import make_batch, save_models
from tiny_checkpoints import FILES

from vlm.checkpoint import load as ckpt
from vlm.data.batch import Batch, CaptionRow, TextRows, next_token_rows
from vlm.data.records import Question, Record
from vlm.data.text.conversation_field import ConversationField, QuestionField
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.tasks.image_questions.predict import answer_questions
from vlm.tasks.shared.rewards import Target
from vlm.tasks.shared.rollouts import Prompts, build_rows, number_texts, read_prompts, sample_texts
from vlm.tasks.shared.text_tasks import prompt_contexts

FIRST = Question("what color is the cross?", "red")
SECOND = Question("and the circle?", "blue", before=FIRST.turns)
OTHER = Question("is there a triangle?", "no")


def sampling(**options: Any) -> Decoding:
    return Decoding(sampling=Sampling(), logprobs=False, **options)


def load(task: str) -> tuple[Any, Any]:
    loaded = ckpt.read(FILES / f"{task}.ckpt")
    return ckpt.load_model(loaded).eval().double(), tokenizer_from_state(loaded["vlm"]["tokenizer"])


def some_images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def draw_captions(model: Any, tokenizer: Any, names: list[str], seed: int = 0) -> list[list[list[int]]]:
    count = len(names)
    prompts = Prompts(names, names, [Target("", ["x"])] * count, list(range(count)), [[tokenizer.bos_id]] * count)
    rows = next_token_rows([[[1, 2]]] * count, 0)
    images = some_images(3)[["a", "b", "c"].index(names[0]) :][:count] if names[0] in "abc" else some_images(count)
    return sample_texts(model, images, rows, prompts, tokenizer, sampling(results=4, max_tokens=6, seed=seed))


def test_captions_depend_on_seed_and_id_alone() -> None:
    captioner = load("captioning")
    together = draw_captions(*captioner, ["a", "b", "c"])
    assert [draw_captions(*captioner, [id])[0] for id in "abc"] == together
    assert draw_captions(*captioner, ["a", "b", "c"], seed=1) != together
    assert draw_captions(*captioner, ["z"]) != together[:1]
    assert len({tuple(text) for row in together for text in row}) > 4


def read_questions(tokenizer: Any, questions: list[list[Question]]) -> tuple[Prompts, TextRows]:
    field = QuestionField(tokenizer=tokenizer, max_len=96)
    field.compares = True
    records = [Record(name, {"questions": asked}) for name, asked in zip("ab", questions, strict=True)]
    rows = field.collate([field.encode(record, (0, 0, 0)) for record in records])
    batch = Batch([record.id for record in records], {"questions": rows}, [])
    return read_prompts(batch, rows, partial(field.prompt, room=60)), rows


def test_answers_are_sampled_from_their_prompts() -> None:
    """Greedy ones are those of the evaluation's loop, and sampled ones do not depend on other prompts."""
    model, tokenizer = load("image_questions")
    prompts, rows = read_questions(tokenizer, [[FIRST, OTHER], [OTHER]])
    assert prompts.names == ["a", "a#1", "b"] and prompts.ids == ["a", "a", "b"] and prompts.rows == [0, 0, 1]
    assert [target.references for target in prompts.targets] == [["red"], ["no"], ["no"]]
    images = some_images(2)
    greedy = sample_texts(model, images, rows, prompts, tokenizer, Decoding(max_tokens=8, logprobs=False))
    asked = [prompts.tokens[:2], prompts.tokens[2:]]
    with torch.no_grad():
        answers = answer_questions(model, tokenizer, model.encode(images), asked, max_tokens=8)
    assert [text for (text,) in greedy] == [answer.tokens for row in answers for answer in row]
    options = sampling(results=3, max_tokens=8)
    together = sample_texts(model, images, rows, prompts, tokenizer, options)
    alone = Prompts(*(column[2:] for column in prompts[:3]), rows=[0], tokens=prompts.tokens[2:])
    assert sample_texts(model, images[1:], rows, alone, tokenizer, options) == together[2:]
    assert len({tuple(text) for row in together for text in row}) > 4


def test_rows_hold_each_prompt_with_its_texts() -> None:
    _, tokenizer = load("image_questions")
    prompts, rows = read_questions(tokenizer, [[FIRST, OTHER], [OTHER]])
    sampled = [[[7, 8], [9]], [[10], [11, 12]], [[13], [14]]]
    built = build_rows(None, rows, prompts, sampled, tokenizer.pad_id)
    texts = [
        built.tokens[row][built.segments[row] == number].tolist()  # type: ignore[index]
        for row, count in ((0, 4), (1, 2))
        for number in range(1, count + 1)
    ]
    pairs = [(prompt, text) for prompt, row in zip(prompts.tokens, sampled, strict=True) for text in row]
    assert texts == [[*prompt, *text] for prompt, text in pairs]
    assert built.targets.labels.tolist() == [token for _, text in pairs for token in text]
    assert number_texts(built, prompts, 2).tolist() == [at for at, (_, text) in enumerate(pairs) for _ in text]


def test_all_turns_of_the_conversations_in_a_row_are_asked() -> None:
    _, tokenizer = load("image_questions")
    record = Record("a", {"questions": [FIRST, SECOND, OTHER]})

    def ask(max_len: int, epoch: int) -> list[Question]:
        field = ConversationField(tokenizer=tokenizer, max_len=max_len)
        plain = field.encode(record, (0, epoch, 0))
        assert not plain.references
        field.compares = True
        row = field.encode(record, (0, epoch, 0))
        assert isinstance(row, CaptionRow) and row.texts == plain.texts
        return list(row.references)

    assert ask(400, 0) == [FIRST, SECOND, OTHER]
    assert {tuple(ask(60, epoch)) for epoch in range(9)} == {(FIRST, SECOND), (OTHER,)}  # one conversation fits


def test_prompts_with_images_inside_are_answered_as_in_an_evaluation(tmp_path: Path) -> None:
    start, reference = save_models(tmp_path, "images dpo")
    task: Any = reward_steps.build_task(start, reference, "group")
    batch = make_batch(task, reward_steps.make_records())
    rows, images = batch["questions"], task.preprocess.normalize(batch["images"])
    prompts = read_prompts(batch, rows, lambda reference: [])
    task.model.eval()
    options = {"max_tokens": 6, "ends": tuple(task.ends)}
    greedy = sample_texts(task.model, images, rows, prompts, task.tokenizer, Decoding(**options, logprobs=False))
    task.search.begin()
    with torch.no_grad():
        parts = prompt_contexts(rows, task.model.encode(images).states)
        texts = [text for part in parts for text in task.search.texts(part, final=False)]
    found = [task.tokenizer.decode([token for token in text if token not in task.ends]) for (text,) in greedy]
    assert found == [task.tokenizer.decode(text.tokens[:6]) for text in texts]
    sampled = sample_texts(task.model, images, rows, prompts, task.tokenizer, sampling(results=2, **options))
    built = build_rows(task.fields["questions"], rows, prompts, sampled, task.tokenizer.pad_id)
    assert built.targets.labels.tolist() == [token for row in sampled for text in row for token in text]
    assert built.num_states == rows.num_states
    hidden = task.model(images, built.tokens, built.segments, built.image_states, built.scored)
    assert hidden.isfinite().all() and (built.tokens == -1).sum() == 2 * (rows.tokens == -1).sum()


def test_samples_without_references_ask_nothing() -> None:
    rows: Any = SimpleNamespace(references=[["a dog"], []])
    prompts = read_prompts(Batch(["a", "b"], {}, []), rows, lambda reference: [1])
    assert prompts.names == ["a"] and prompts.rows == [0]
