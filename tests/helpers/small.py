"""Trainings of a few seconds, with everything that resuming could get wrong: dropout, augmentation, mixup, averages."""

COMMON = ["trainer=cpu", "trainer.log_every_n_steps=1", "data.eval_batch_size=8", "callbacks=ema", "seed=3"]
COMMON += ["callbacks.progress=null", "callbacks.checkpoints.every_n_steps=2", "callbacks.ema.decay=0.9"]
COMMON += ["data.batch_size=8", "data.num_workers=0"]
ADAMW = "optim=adamw"  # of tasks whose default is Muon, which learns eight samples by heart more slowly
SCENES = ["data.source.train_scenes=60", "data.source.val_scenes=20", "data.source.test_scenes=12"]

CAPTIONS = ["data.source.train_captions=60", "data.source.val_captions=20", "data.source.test_captions=12"]
PAIRS, STORIES = ([text.replace("captions", kind) for text in CAPTIONS] for kind in ("pairs", "stories"))
DOCUMENTS = ["data.source.train_documents=40", "data.source.val_documents=6", "data.source.test_documents=6"]
WIDTH = ["model.size.dim=32", "model.size.num_heads=2", "model.size.dropout=0.2"]
ENCODER = [*WIDTH, "model.size.encoder_depth=1"]
BOTH = [*ENCODER, "model.size.decoder_depth=1"]

TASKS = {
    "captioning": [*SCENES, *BOTH, "task.val_captions=4", "task.max_tokens=6", ADAMW],
    "classification": [
        *[*SCENES, *ENCODER, "task.mixup=0.4", "task.cutmix=0.5"],
        *["data.augment.min_scale=0.6", "data.augment.horizontal_flip=true"],
    ],
    "contrastive": [*SCENES, *ENCODER, "task.label_smoothing=0.1"],
    "detection": [
        *[*SCENES, *BOTH, "task.val_images=4", "task.max_tokens=16", "data.augment.min_scale=0.6", ADAMW],
        *["data.augment.horizontal_flip=true", "data.source.max_objects=3", "data.source.object_weights=[1,1,1]"],
    ],
    "image_questions": [*SCENES, *BOTH, "task.max_tokens=4", "model/fusion=prefix", ADAMW],
    "language_modeling": [
        *[*DOCUMENTS, "data.train_samples=60", *WIDTH, "model.size.depth=1"],
        *["task.sampled_batches=2", "task.prompt_tokens=4"],
    ],
    "preferences": [*SCENES, *BOTH, "task.max_tokens=6", "optim.lr=1e-3"],
    "photo_translation": [*SCENES, *BOTH, "task.val_texts=4", "task.max_tokens=6"],
    "text_classification": [*PAIRS, *ENCODER, ADAMW],
    "masked_language_modeling": [*CAPTIONS, *ENCODER],
    "span_answering": [*STORIES, *ENCODER, ADAMW],
    "tagging": [*CAPTIONS, *ENCODER],
    "text_to_image": [
        *[*SCENES, *BOTH, "task.val_texts=4", "task.fields.images.num_codes=64", "data.image_size=32", ADAMW],
        *["task.captioner=null", "optim.lr=2e-3"],
    ],
    "translation": [*SCENES, *BOTH, "task.val_texts=4", "task.max_tokens=6"],
}

# Models beside those that tasks choose by default: the task of each, and its smallest training.
_TRANSLATOR = [*SCENES, "model.size.dim=32", "model.size.dropout=0.2", "task.val_texts=4", "task.max_tokens=6"]
_TEXT = [text for text in TASKS["language_modeling"] if not text.endswith(("num_heads=2", "size.depth=1"))]
_TELLER = [text for text in TASKS["captioning"] if not text.endswith("decoder_depth=1")]
_WORDS = [*CAPTIONS, "model=tagger_words", "tokenizer=bytes", "model.size.dim=32", "model.size.encoder_depth=2"]
_RECURRENT = ["model/encoder=recurrent", "model.encoder.cell=gru"]
MODELS = {
    "bahdanau": ("translation", ["model=bahdanau", *_TRANSLATOR]),
    "lstm": ("language_modeling", ["model=lstm", *_TEXT]),
    "neural_lm": ("language_modeling", ["model=neural_lm", *_TEXT]),
    "seq2seq": ("translation", ["model=seq2seq", *_TRANSLATOR]),
    "show_attend_tell": ("captioning", ["model=show_attend_tell", *_TELLER, "task.doubly_stochastic=0.5"]),
    "recurrent tagger": ("tagging", [*TASKS["tagging"], *_RECURRENT]),
    "word tagger": ("tagging", [*_WORDS, "model.encoder.buckets=512", "model.encoder.spelling.width=32"]),
    "recurrent classifier": ("text_classification", [*TASKS["text_classification"], *_RECURRENT, "model.pool=mean"]),
}


BATCHES = 8  # of an epoch of any of them
COMPARING = ("contrastive",)  # tasks that compare the samples of a batch, so that batches are not accumulated


def accumulation_options(task: str) -> tuple[str, ...]:
    """The option that two batches make a step, for a task that allows it."""
    return () if task in COMPARING else ("trainer.accumulate_grad_batches=2",)


def task_of(name: str) -> str:
    """The task of a model of MODELS; a task itself."""
    return MODELS[name][0] if name in MODELS else name


def command(name: str, *more: str) -> list[str]:
    """The arguments of a small training of a task, or of a model of MODELS."""
    options = MODELS[name][1] if name in MODELS else TASKS[name]
    return [f"task={task_of(name)}", *COMMON, *options, *more]
