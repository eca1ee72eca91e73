"""Frozen dataclasses to JSON and back, strictly: a file that a person edited or cut short is refused by field name."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class RecordError(Exception):
    """Which field is missing, unknown or of the wrong kind."""


def to_json(record: Any) -> Any:
    """Nested dicts and lists of a dataclass; tuples become lists."""
    if dataclasses.is_dataclass(record):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    return [to_json(item) for item in record] if isinstance(record, tuple) else record


def from_json(kind: type[T], data: object, where: str = "") -> T:
    """A `kind` (a dataclass of numbers, strings, tuples and dataclasses, each perhaps optional) from `to_json`'s data.

    Raises `RecordError` for anything missing, unknown, of another type, or not finite.
    """
    if not isinstance(data, dict):
        raise RecordError(f"{where or 'the file'} is not an object")
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise RecordError(f"unknown field {_join(where, unknown[0])}")
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        place = _join(where, field.name)
        if field.name in data:
            values[field.name] = _value(hints[field.name], data[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"no field {place}")
    try:
        return kind(**values)
    except ValueError as error:
        raise RecordError(f"{where or 'the file'}: {error}") from None


def _value(hint: Any, data: object, place: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        return None if data is None else _value(options[0], data, place)
    if get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise RecordError(f"{place} is not a list")
        return tuple(_value(get_args(hint)[0], item, f"{place}[{at}]") for at, item in enumerate(data))
    if dataclasses.is_dataclass(hint):
        return from_json(hint, data, place)  # type: ignore[arg-type]
    accepts = _SCALARS[hint]
    if not accepts(data):
        raise RecordError(f"{place} is {data!r}, not {_NAMES[hint]}")
    return float(data) if hint is float else data  # type: ignore[arg-type]


def _is_number(data: object) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)


_SCALARS: dict[Any, Callable[[object], bool]] = {
    float: _is_number,
    int: lambda data: isinstance(data, int) and not isinstance(data, bool),
    bool: lambda data: isinstance(data, bool),
    str: lambda data: isinstance(data, str),
}
_NAMES = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
