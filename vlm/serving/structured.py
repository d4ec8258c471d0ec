"""What a request says about the form of its texts: OpenAI's response_format, and structured_outputs as vLLM has it."""

import json
from collections.abc import Mapping
from typing import Any

from vlm.config.types import describe_json_mismatch, fits
from vlm.errors import printable
from vlm.serving.fields import RequestError, bad_request
from vlm.untrusted.sizes import JsonValue

FORMAT, EXTENSION = "response_format", "structured_outputs"
TYPES: Mapping[str, Any] = {FORMAT: dict, EXTENSION: dict}  # of the two fields
KINDS = ("text", "json_object", "json_schema")
SCHEMA_TYPES = {"name": str, "description": str, "schema": dict, "strict": bool}
EXTENSION_TYPES = {"json": dict | str, "regex": str, "choice": list[str], "json_object": bool}
ANY_OBJECT: dict[str, JsonValue] = {"type": "object"}


def read_grammar(content: Mapping[str, Any]) -> tuple[dict[str, JsonValue], dict[str, str]]:
    """Returns the option for the form of a request's texts, and its name by the field that states it.

    Both are empty if any text is allowed. `strict` has no effect: every schema is enforced.

    Args:
        content: The request without nulls.
    Raises:
        RequestError: A field is invalid, or both are given.
    """
    stated = {FORMAT: _read_format(content.get(FORMAT, {})), EXTENSION: _read_extension(content.get(EXTENSION, {}))}
    given = {field: options for field, options in stated.items() if options}
    if len(given) > 1:
        raise bad_request(f"{EXTENSION} and {FORMAT} exclude each other; send one of them", param=EXTENSION)
    for field, options in given.items():
        (name,) = options
        return options, {field: name}
    return {}, {}


def _read_format(value: Mapping[str, Any]) -> dict[str, JsonValue]:
    kind = value.get("type", "text")
    if kind not in KINDS:
        line = f"{FORMAT}.type: {printable(str(kind))[:60]} is not one of {', '.join(KINDS)}"
        raise bad_request(line, param=f"{FORMAT}.type")
    _check_keys(FORMAT, value, {"type": str, **({"json_schema": dict} if kind == "json_schema" else {})})
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    stated, name = value.get("json_schema"), f"{FORMAT}.json_schema"
    if stated is None:
        raise _missing(name)
    _check_keys(name, stated, SCHEMA_TYPES)
    if "schema" not in stated:
        raise _missing(f"{name}.schema")
    return {"json_schema": stated["schema"]}


def _read_extension(value: Mapping[str, Any]) -> dict[str, JsonValue]:
    _check_keys(EXTENSION, value, EXTENSION_TYPES)
    given = {name: part for name, part in value.items() if part is not False}
    if len(given) > 1:
        raise bad_request(f"{EXTENSION}: {' and '.join(given)} exclude each other; send one of them", param=EXTENSION)
    for name, part in given.items():
        if name == "json_object":
            return {"json_schema": ANY_OBJECT}
        if name != "json":
            return {name: part}
        try:
            schema = json.loads(part) if isinstance(part, str) else part
        except (ValueError, RecursionError) as fault:
            raise bad_request(f"{EXTENSION}.json: is not JSON", param=f"{EXTENSION}.json") from fault
        if not isinstance(schema, dict):
            line = f"{EXTENSION}.json: {describe_json_mismatch(schema, dict)}"
            raise bad_request(line, param=f"{EXTENSION}.json", code="invalid_type")
        return {"json_schema": schema}
    return {}


def _check_keys(name: str, fields: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Checks the keys of an object and the types of their values.

    Raises:
        RequestError: One is unknown or has a value of another type.
    """
    for key, value in fields.items():
        path = f"{name}.{printable(key)[:60]}"
        if key not in types:
            line = f"{path}: not supported; remove it, or send {', '.join(types)}"
            raise bad_request(line, param=path, code="unknown_parameter")
        if not fits(value, types[key]):
            raise bad_request(f"{path}: {describe_json_mismatch(value, types[key])}", param=path, code="invalid_type")


def _missing(name: str) -> RequestError:
    return bad_request(f"{name}: missing; send it", param=name, code="missing_parameter")
