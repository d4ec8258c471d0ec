"""What requests for conversations and for completions have in common: options, choices and limits on their number."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from vlm.errors import Range, UserError
from vlm.inference.command_options import ChatOptions
from vlm.inference.options import build_options
from vlm.serving import structured
from vlm.serving.fields import Neutral, bad_request, describe_option_error, read_stop_strings
from vlm.serving.reader import MAX_ITEMS, RequestReader
from vlm.tasks.chat.predictor import ChatPredictor, Prompt
from vlm.untrusted.sizes import JsonValue

MAX_CHOICES = 8
MAX_TOP = 20  # most probable tokens that a request may ask for
MAX_GENERATED = 2**17  # tokens of all choices of a request
MAX_SCORES = 2**19  # log-probabilities of a response
SEEDS = 2**62  # a request without a seed gets a random one below this
# Fields that set an option of vlm, by name.
OPTIONS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
}
# Types of fields that are read here or by an endpoint.
TYPES = {
    "model": str,
    "n": Annotated[int, Range(1, MAX_CHOICES)],
    "stream": bool,
    "stream_options": dict,
    **structured.TYPES,
}
# Values of sampling options that exclude no token. Other values turn sampling on.
KEEPS_ALL: Neutral = {"temperature": (), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
OptionsType = TypeVar("OptionsType", bound=ChatOptions)


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request for texts.

    Args:
        prompts: The prompt of each choice, in the order of the response.
        options: Options of the texts.
        seed: Seed of the first choice of each prompt.
        stream: Whether the texts are streamed.
        include_usage: Whether the stream ends with the numbers of tokens.
        echoed: The text that each choice begins with; None if it does not repeat the prompt.
    """

    prompts: Sequence[Prompt]
    options: ChatOptions
    seed: int
    stream: bool
    include_usage: bool
    echoed: Sequence[str] | None = None


class OptionReader:
    """Reads the options of requests for texts.

    Args:
        predictor: The model.
        reader: The reader of /predict, which has the limits and the defaults.
        max_prompts: Maximum number of choices of a request.
    """

    def __init__(self, predictor: ChatPredictor, reader: RequestReader, *, max_prompts: int) -> None:
        self.predictor, self.rows, self.max_prompts = predictor, reader.rows, max_prompts
        known = predictor.options.__dataclass_fields__
        self.defaults = {name: value for name, value in reader.defaults.items() if name in known}

    def read(
        self,
        kind: type[OptionsType],
        content: Mapping[str, Any],
        fields: Mapping[str, str],
        more: Mapping[str, JsonValue],
    ) -> OptionsType:
        """Returns the options of a request.

        Args:
            content: The request.
            fields: Names of options by the fields that set them.
            more: Options that the endpoint has read, with their values.
        Raises:
            RequestError: One is invalid, or does not suit the model.
        """
        sent: dict[str, Any] = {name: value for name, value in content.items() if name in fields}
        if "stop" in sent:
            sent["stop"] = read_stop_strings(sent["stop"])
        bias = sent.get("logit_bias")
        if isinstance(bias, dict) and len(bias) > MAX_ITEMS[""]:
            raise bad_request(f"logit_bias: has more than {MAX_ITEMS['']:,} tokens", param="logit_bias")
        values = {"seed": secrets.randbelow(SEEDS), **self.defaults}  # without --seed, answers differ
        values |= {fields[name]: value for name, value in sent.items()}
        if any(name in sent and sent[name] not in keeps_all for name, keeps_all in KEEPS_ALL.items()):
            values["sample"] = True
        elif values.get("sample") is False:
            values = {name: value for name, value in values.items() if name not in KEEPS_ALL}
        grammar, grammar_fields = structured.read_grammar(content)
        try:
            options = build_options(kind, {**values, **more, **grammar}, use="chat", client=True)
            self.predictor.check_options(options)
        except UserError as fault:
            raise describe_option_error(fault, {**fields, **grammar_fields}, content) from fault
        return replace(options, batch_size=self.rows)

    def check_count(self, prompts: int, choices: int) -> None:
        """Checks the number of texts of a request.

        Raises:
            RequestError: There are too many.
        """
        if prompts * choices > self.max_prompts:
            line = f"{prompts:,} prompts x n {choices} exceed the maximum of {self.max_prompts} texts; send fewer"
            raise bad_request(line, param="n" if prompts == 1 else "prompt")

    def make_choices(self, prompts: Sequence[Prompt], choices: int, options: ChatOptions) -> list[Prompt]:
        """Returns each prompt once per choice, before any work starts.

        Raises:
            RequestError: The request would take too many tokens or log-probabilities.
        """
        _, max_tokens, _ = self.predictor.plan_decoding(options)
        lengths = [min(max_tokens, self.predictor.count_available_tokens(prompt)) for prompt in prompts]
        generated = choices * sum(lengths)
        if len(prompts) * choices > 1 and generated > MAX_GENERATED:
            many = f"{len(prompts)} prompts x n {choices}" if len(prompts) > 1 else f"n {choices}"
            line = (
                f"{many} x max_tokens may be {generated:,} tokens; the maximum is {MAX_GENERATED:,}; lower one of them"
            )
            raise bad_request(line, param="max_tokens" if choices == 1 else "n", code="token_budget_exceeded")
        if options.logprobs is not None:
            echoed = sum(len(prompt.tokens) for prompt in prompts) if getattr(options, "echo", False) else 0
            scores = choices * (sum(lengths) + echoed) * (1 + options.logprobs)
            if scores > MAX_SCORES:
                line = (
                    f"logprobs: may be {scores:,} numbers; the maximum is {MAX_SCORES:,}; lower max_tokens or logprobs"
                )
                raise bad_request(line, param="logprobs", code="token_budget_exceeded")
        return [choice for prompt in prompts for choice in prompt.choices(choices)]
