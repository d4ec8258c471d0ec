"""Checks of a JSON schema before it is compiled: texts can end, and limits keep compilation below about a second."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from vlm.errors import UserError

MAX_SCHEMA = 2**16  # characters of a JSON schema
MAX_MULTIPLE = 10_000  # sum over all multipleOf of a schema; an automaton has a state for each remainder
MAX_DIGITS = 18  # of a number in a schema; llguidance reads integers of 64 bits
MAX_OPTIONAL = 400  # optional properties of an object; compilation takes time with the square of their number
MAX_PATTERN_KEYS = 64  # of patternProperties in a schema; whether two match the same name is computed for all pairs
MAX_JOINED = 10  # patterns that one text must match; whether any text does takes exponential time
MAX_PASSES = 50  # over the subschemas that refer to each other
# Keywords with subschemas, by how a value contains them.
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
OBJECTS = ("properties", "patternProperties")
SINGLE = ("items", "additionalProperties")


def check_schema(content: str) -> None:
    """Checks a JSON schema.

    Raises:
        UserError: It exceeds a limit, or no text of finite length is valid for it.
    """
    if len(content) > MAX_SCHEMA:
        raise UserError(f"--json-schema: has {len(content):,} characters; the maximum is {MAX_SCHEMA:,}")
    schema = json.loads(content)
    if "x-guidance" in schema:
        raise UserError("--json-schema: x-guidance is not supported; remove it")
    _check_numbers(schema)
    subschemas = list(_iter_subschemas(schema))
    if (keys := sum(len(_dictionary(part, "patternProperties")) for part in subschemas)) > MAX_PATTERN_KEYS:
        line = f"has {keys:,} patterns of patternProperties; the maximum is {MAX_PATTERN_KEYS}"
        raise UserError(f"--json-schema: {line}; combine them into fewer")
    joined = dict[int, int]()
    for part in subschemas:
        optional = _dictionary(part, "properties").keys() - {*map(str, _list(part, "required"))}
        if len(optional) > MAX_OPTIONAL:
            line = f"an object has {len(optional):,} optional properties; the maximum is {MAX_OPTIONAL}"
            raise UserError(f"--json-schema: {line}; require some, or remove them")
        joined[id(part)] = _count_joined(part, schema, joined)
        if joined[id(part)] > MAX_JOINED:
            line = f"more than {MAX_JOINED} patterns apply to the same value by allOf, $ref or anyOf"
            raise UserError(f"--json-schema: {line}; combine them into fewer")
    _check_end(schema, subschemas)


def _check_numbers(schema: Mapping[str, Any]) -> None:
    total = 0.0
    for name, value in _iter_numbers(schema):
        if abs(value) >= 10**MAX_DIGITS:
            raise UserError(f"--json-schema: {name} {value:.3g} has more than {MAX_DIGITS} digits; use a smaller one")
        if name == "multipleOf" and value:
            text = f"{value:.18f}".rstrip("0")
            total += abs(value) * 10 ** len(text.partition(".")[2])
    if total > MAX_MULTIPLE:
        raise UserError(f"--json-schema: the numbers of multipleOf exceed {MAX_MULTIPLE:,} in total; use smaller ones")


def _iter_numbers(schema: Any) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a schema with their keys."""
    pending = [("", schema)]
    while pending:
        name, part = pending.pop()
        if isinstance(part, dict):
            pending += part.items()
        elif isinstance(part, list):
            pending += [(name, item) for item in part]
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield name, part


def _dictionary(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    return value if isinstance(value := part.get(name), dict) else {}


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := part.get(name), list) else []


def _find_reference(part: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the subschema that `$ref` names by a JSON pointer (RFC 6901); None if there is none."""
    pointer = part.get("$ref")
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    target: Any = schema
    for key in pointer[1:].split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else None


def _contents(part: Mapping[str, Any], schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the subschemas of a schema, including the one that it refers to."""
    found = [item for name in LISTS for item in _list(part, name)]
    found += [item for name in OBJECTS for item in _dictionary(part, name).values()]
    found += [part.get(name) for name in SINGLE] + [_find_reference(part, schema)]
    return [item for item in found if isinstance(item, dict)]


def _iter_subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schema and all subschemas that it uses, each once, and after its own unless they refer to it."""
    seen, pending = {id(schema)}, [(schema, iter(_contents(schema, schema)))]
    while pending:
        part, remaining = pending[-1]
        following = next((item for item in remaining if id(item) not in seen), None)
        if following is None:
            yield part
            pending.pop()
        else:
            seen.add(id(following))
            pending.append((following, iter(_contents(following, schema))))


def _count_joined(part: Mapping[str, Any], schema: Mapping[str, Any], joined: Mapping[int, int]) -> int:
    """Returns an upper bound of the number of patterns that apply to a value of a schema, or to a part of it.

    Args:
        joined: The numbers of other subschemas by their ids.
    """

    def count(item: Any) -> int:
        return joined.get(id(item), 0)

    reference = _find_reference(part, schema)
    combined = {id(reference), *(id(item) for name in ("allOf", "anyOf", "oneOf") for item in _list(part, name))}
    inner = max((count(item) for item in _contents(part, schema) if id(item) not in combined), default=0)
    total = max(inner, sum(name in part for name in ("pattern", "format")))
    total += count(reference) + sum(map(count, _list(part, "allOf")))
    return total + sum(max(map(count, _list(part, name)), default=0) for name in ("anyOf", "oneOf"))


def _check_end(schema: dict[str, Any], subschemas: list[dict[str, Any]]) -> None:
    """Checks that a text of finite length is valid for a schema: references may not require themselves.

    Raises:
        UserError: None is, or this takes too long to find out.
    """
    endless = {id(part): part for part in subschemas}
    for _ in range(MAX_PASSES):
        before = len(endless)
        for part in list(endless.values()):
            if _can_end(part, schema, endless):
                del endless[id(part)]
        if id(schema) not in endless:
            return
        if len(endless) == before:
            line = "requires itself by $ref, so that no text can end"
            raise UserError(f"--json-schema: {line}; make the property optional, or allow another type by anyOf")
    raise UserError("--json-schema: too many subschemas refer to each other by $ref; simplify it")


def _can_end(part: Mapping[str, Any], schema: Mapping[str, Any], endless: Mapping[int, Any]) -> bool:
    """Returns True if a text of finite length is valid for a schema, provided that none is for the endless ones."""

    def ends(item: Any) -> bool:
        return id(item) not in endless

    if not ends(_find_reference(part, schema)) or not all(map(ends, _list(part, "allOf"))):
        return False
    if any(options and not any(map(ends, options)) for options in (_list(part, "anyOf"), _list(part, "oneOf"))):
        return False
    if part.get("type") == "object":
        properties, others = _dictionary(part, "properties"), part.get("additionalProperties")
        return all(ends(properties.get(name, others)) for name in map(str, _list(part, "required")))
    if part.get("type") == "array" and isinstance(least := part.get("minItems", 0), int):
        first = _list(part, "prefixItems")
        return all(map(ends, first[:least])) and (least <= len(first) or ends(part.get("items")))
    return True
