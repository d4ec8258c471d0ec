"""Prompts over HTTP, in the format of POST /v1/completions: texts or token ids that the model continues."""

from collections.abc import Mapping
from typing import Annotated, Any

from vlm.errors import Range, UserError
from vlm.inference.command_options import CompletionOptions
from vlm.serving import generation
from vlm.serving.fields import EXTENSIONS_NEUTRAL, LABELS, FieldTable, bad_request, check_model, read_object
from vlm.serving.generation import MAX_TOP, OptionReader, TextRequest
from vlm.serving.reader import MAX_TEXT, RequestReader
from vlm.tasks.chat.completion import CompletionPredictor
from vlm.tasks.chat.predictor import ContextFullError, Prompt

FIELDS = FieldTable(
    options=generation.OPTIONS,
    types={
        **generation.TYPES,
        "prompt": str | list[str] | list[int] | list[list[int]],
        "echo": bool,
        "logprobs": Annotated[int, Range(0, MAX_TOP)],
    },
    labels=LABELS,
    neutral={
        **EXTENSIONS_NEUTRAL,
        "suffix": ("",),
        "add_special_tokens": (True,),
    },
    remedies={
        "best_of": "send n, which returns all texts",
        "suffix": "the model continues a prompt and does not fill in a gap; send only the prompt",
    },
)


class CompletionReader:
    """Reads prompts from requests.

    Args:
        predictor: The model.
        reader: The reader of /predict, which has the limits.
        name: The name of the model.
        max_prompts: Maximum number of texts of a request.
    """

    def __init__(self, predictor: CompletionPredictor, reader: RequestReader, name: str, *, max_prompts: int) -> None:
        self.predictor, self.reader, self.name = predictor, reader, name
        self.options = OptionReader(predictor, reader, max_prompts=max_prompts)

    async def read(self, body: bytearray, *, deadline: float) -> TextRequest:
        """Reads a request from a body.

        Args:
            body: It is empty afterwards.
            deadline: Time at which the request stops waiting for the budget, by the event loop's clock.
        Raises:
            HTTPException: The body is invalid, or the budget is not available in time.
        """
        size = len(body)
        content = await read_object(self.reader, body, deadline=deadline)
        FIELDS.check(content)
        check_model(content.get("model", self.name), self.name)
        return await self.reader.run_in_budget(deadline, size, self._read_request, content)

    def _read_request(self, content: Mapping[str, Any]) -> TextRequest:
        more = {name: content[name] for name in ("echo", "logprobs") if name in content}
        options = self.options.read(CompletionOptions, content, generation.OPTIONS, more)
        prompt, choices = content.get("prompt", ""), content.get("n", 1)
        sent = prompt if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt) else [prompt]
        self.options.check_count(len(sent), choices)
        if sum(len(item) for item in sent if isinstance(item, str)) > MAX_TEXT:
            raise bad_request(f"prompt: has more than {MAX_TEXT:,} characters", param="prompt")
        prompts, grammar = list[Prompt](), self.predictor.build_grammar(options)
        for number, item in enumerate(sent, start=1):
            try:
                tokens = self.predictor.encode(item, "prompt" if len(sent) == 1 else f"prompt {number}")
            except UserError as fault:
                code = "context_length_exceeded" if isinstance(fault, ContextFullError) else None
                raise bad_request(str(fault), param="prompt", code=code) from fault
            prompts.append(Prompt(tokens, None, options.seed, grammar))
        echoed = None
        if options.echo:
            texts = [item if isinstance(item, str) else self.predictor.decode(item) for item in sent]
            echoed = [text for text in texts for _ in range(choices)]
        return TextRequest(
            prompts=self.options.make_choices(prompts, choices, options),
            options=options.without_prompt_parts(),
            seed=options.seed,
            stream=bool(content.get("stream")),
            include_usage=bool(content.get("stream_options", {}).get("include_usage")),
            echoed=echoed,
        )
