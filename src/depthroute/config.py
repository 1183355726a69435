"""Settings of a run: frozen dataclasses here, a TOML file and `key=value` overrides outside.

Generic: this file knows no field of any config. A config's fields are `str`, `bool`, `int`,
`float`, `Literal`, tuples of these, a `dict` by string, other configs, a `tagged_union` of configs,
or one of these `| None`. Only this file meets pydantic, which checks the types.
"""

import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import pydantic

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is wrong; the message has one line per problem, with its full dotted key."""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def config_dataclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass, the form of every config."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def tagged_union(*classes: type) -> Any:
    """Annotation of a field that holds one of several configs, told apart by their `name`.

    Each class declares `name: Literal["its_name"] = "its_name"`. A table must give its `name`,
    default or not.
    """
    if len(classes) == 1:
        return classes[0]
    return typing.Annotated[typing.Union[classes], pydantic.Field(discriminator="name")]  # noqa: UP007


def load(
    cls: type[T],
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    *,
    base: dict[str, Any] | None = None,
) -> T:
    """Read a config of class `cls`: `base`, then the file over it, then the overrides over both.

    Tables merge key by key, other values replace. Where the `name` of a `tagged_union` changes, the
    old table goes as a whole: its other keys belong to another class. `base = "other.toml"` in the
    file, relative to it, puts the file over that one.

    Args:
        cls: Config class, or a `tagged_union` of them.
        path: TOML file.
        overrides: `dotted.key=value`; a value that is not TOML is a plain string. If two set the
            same key the last one wins.
        base: Lowest layer, nested like a file; for example a stored `to_dict`.

    Raises:
        ConfigError: A file or override cannot be read, or a key, type or value is wrong.
    """
    values = base or {}
    if path is not None:
        values = _merge(cls, values, _read_with_base(cls, Path(path)))
    changes: dict[str, Any] = {}
    for override in overrides:
        changes = _merge(cls, changes, _parse_override(override))
    return from_dict(cls, _merge(cls, values, changes))


def from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """Build a config of class `cls` from nested dictionaries, as strictly as from a file.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or is refused.
    """
    # in a list, because pydantic takes settings for a list (not for a dataclass) and hands them
    # down; as JSON, because its strict mode for Python objects takes no table for a dataclass; a
    # date, which JSON lacks, as an array that no field accepts
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    adapter: pydantic.TypeAdapter[list[T]] = pydantic.TypeAdapter(list[cls], config=strict)  # type: ignore[valid-type]
    try:
        return adapter.validate_json(json.dumps([values], default=lambda _: [None, {}]))[0]
    except pydantic.ValidationError as error:
        lines = [_explain(cls, values, item) for item in error.errors()]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries and lists, equal to their own JSON round trip; undone by `from_dict`."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def dump(config: Any) -> str:
    """TOML text, to be written as UTF-8, that `load` reads back to an equal config.

    Raises:
        ConfigError: A field is None although leaving its key out means something else.
    """
    return "\n".join(_toml_lines(config, "")).lstrip("\n") + "\n"


# layers: files and overrides


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # bad TOML (the text gives the line) or not UTF-8
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


def _read_with_base(hint: Any, path: Path) -> dict[str, Any]:
    upper = _read(path)
    if "base" not in upper:
        return upper
    base = upper.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: expected string, got {_show(base)}")
    lower = _read(path.parent / base)
    if "base" in lower:
        raise ConfigError(f'{path}: base: expected a file without a base, but "{base}" has one')
    return _merge(hint, lower, upper)


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        wrong = "an empty key" if equals else 'no "="'
        raise ConfigError(f'override "{override}": expected dotted.key=value, got {wrong}')
    value: Any = text.strip()
    try:  # within an inline table no comment and no second key can hide behind the value
        document = tomllib.loads(f"x = {{x = {value}}}")
        value = document["x"]["x"] if list(document) == list(document["x"]) == ["x"] else value
    except ValueError:
        pass  # a plain string
    for part in reversed(parts):
        value = {part: value}
    return value


def _merge(hint: Any, lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = {**lower, **upper}
    if _tags(hint) and lower.get("name", merged.get("name")) != merged.get("name"):
        return dict(upper)
    hints = _fields(hint, merged)
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(lower.get(key), dict):
            merged[key] = _merge(hints.get(key), lower[key], value)
    return merged


# types


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types a value may have, without None and without annotations."""
    if get_origin(hint) is typing.Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, UnionType):
        return tuple(one for arg in get_args(hint) for one in _alternatives(arg) if one != NoneType)
    return (hint,)


def _tags(hint: Any) -> dict[str, Any]:
    """The classes of a `tagged_union` by name; empty for any other type."""
    classes = [one for one in _alternatives(hint) if dataclasses.is_dataclass(one)]
    if len(classes) < 2:
        return {}
    return {name: cls for cls in classes for name in get_args(get_type_hints(cls)["name"])}


def _fields(hint: Any, table: Any) -> dict[str, Any]:
    """The keys of a table, with their types; a `dict` may have any, so those that it has."""
    tags = _tags(hint)
    cls = tags.get(str(table.get("name"))) if tags else _alternatives(hint)[0]
    if get_origin(cls) is dict:
        return dict.fromkeys(table, get_args(cls)[1])
    return get_type_hints(cls, include_extras=True) if dataclasses.is_dataclass(cls) else {}


# messages


def _explain(cls: Any, values: Any, error: Any) -> str:
    """One line for one pydantic error, in terms of the keys that the user wrote."""
    loc = error["loc"][1:]  # without the index into the list of `from_dict`
    path, hint, value = _locate(cls, values, loc)
    match error["type"]:
        case "value_error":  # raised by a __post_init__
            text = str(error["ctx"]["error"])
        case "missing":
            text = f"required key is missing; expected {_expected(hint)}"
        case "unexpected_keyword_argument":
            _, owner, table = _locate(cls, values, loc[:-1])
            text = f"unknown key{_suggest(loc[-1], _fields(owner, table), 'known keys')}"
        case "union_tag_not_found":
            path = _join(path, "name")
            text = f"required key is missing; choices: {', '.join(sorted(_tags(hint)))}"
        case "union_tag_invalid":
            path, text = _join(path, "name"), _unknown(value["name"], _tags(hint))
        case "literal_error" if len(_alternatives(hint)) == 1:
            text = _unknown(value, get_args(_alternatives(hint)[0]))
        case kind if kind.endswith("_type") or kind in ("literal_error", "too_long"):
            text = f"expected {_expected(hint)}, got {_show(value)}"
        case _:
            text = error["msg"]
    return f"{path}: {text}" if path else text  # which names the keys of a check of the whole


def _locate(hint: Any, value: Any, loc: Iterable[str | int]) -> tuple[str, Any, Any]:
    """Follow a pydantic location: the dotted path, the type expected and the value there."""
    path = ""
    for step in loc:
        if tags := _tags(hint):  # then `step` repeats the name, which is not part of the path
            hint = tags[value["name"]]
            continue
        if len(_alternatives(hint)) > 1 or type(value) not in (dict, list, tuple):
            break  # `step` is pydantic's word for one of several types, or is inside a date
        path = _join(path, step)
        if isinstance(step, int):
            args = get_args(_alternatives(hint)[0])  # of a tuple
            hint = args[0] if args[-1] is Ellipsis else args[step]
            value = value[step] if step < len(value) else None
        else:
            hint, value = _fields(hint, value).get(step), value.get(step)
    return path, hint, value


def _join(path: str, step: str | int) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _unknown(value: Any, choices: Iterable[Any]) -> str:
    return f"unknown {json.dumps(value)}{_suggest(value, choices, 'choices')}"


def _suggest(value: Any, choices: Iterable[Any], label: str) -> str:
    known = sorted(str(choice) for choice in choices)
    nearest = difflib.get_close_matches(str(value), known, n=1)
    lead = f'; did you mean "{nearest[0]}"? ' if nearest else "; "
    return f"{lead}{label}: {', '.join(known)}"


def _expected(hint: Any) -> str:
    one, *others = _alternatives(hint)
    if others:
        return " or ".join(dict.fromkeys(_expected(each) for each in (one, *others)))
    if dataclasses.is_dataclass(one) or get_origin(one) is dict:
        return "table"
    if get_origin(one) is typing.Literal:
        return " or ".join(json.dumps(choice) for choice in get_args(one))
    if get_origin(one) is tuple:
        items = ("..." if item is Ellipsis else _expected(item) for item in get_args(one))
        return f"array [{', '.join(items)}]"
    return "string" if one is str else one.__name__


def _show(value: Any) -> str:
    kinds = {str: "string", list: "array", tuple: "array", dict: "table", NoneType: "value"}
    text = json.dumps(value, default=str)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{kinds.get(type(value), type(value).__name__)} {text}"


# writing


def _toml_lines(config: Any, path: str) -> Iterator[str]:
    tables = []
    for field in dataclasses.fields(config):
        key, value = _join(path, field.name), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((key, value))
        elif value is not None:
            yield f"{field.name} = {_toml(value, key)}"
        elif field.default is not None:
            raise ConfigError(f"{key}: TOML cannot say None, and without the key it is not None")
    for key, table in tables:
        yield from ("", f"[{key}]", *_toml_lines(table, key))


def _toml(value: Any, key: str) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item, key) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{_toml(name, key)} = {_toml(item, key)}" for name, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, float):
        return float.__repr__(value)  # the shortest text that reads back to the same number
    if isinstance(value, str | int):  # JSON writes these as TOML does, but for an unescaped DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigError(f"{key}: expected a value that TOML can say, got {_show(value)}")
