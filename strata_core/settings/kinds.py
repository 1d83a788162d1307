"""Kinds of settings: how a value is read from text or TOML, checked, and written back as text.

:func:`parse` and :func:`check` raise :class:`ValueError` with a reason that does not name the setting or its source;
the caller, who knows both, makes a :class:`strata_core.errors.SettingsError` of it.
"""

from __future__ import annotations

import difflib
import enum
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from strata_core.settings.schema import Setting


class Kind(enum.Enum):
    """What a setting holds; the value is the word that help and documentation use."""

    BOOL = "on|off"
    INT = "N"
    FLOAT = "F"
    TEXT = "TEXT"
    PATH = "PATH"
    SIZE = "SIZE"
    LIST = "TEXT,..."
    PAIRS = "key=N,..."


_TRUE = frozenset({"1", "on", "yes", "true"})
_FALSE = frozenset({"0", "off", "no", "false"})
UNIT_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def near(word: str, known: Iterable[str]) -> str:
    """``'; did you mean X?'`` for the known word closest to ``word``, or ``''`` when none is close."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def parse(setting: Setting, raw: object) -> Any:
    """Value of ``setting`` from text (command line, environment) or from a TOML value.

    :raises ValueError: ``raw`` is not such a value or out of range; the message says why.
    """
    if setting.auto and raw == "auto":
        return None
    value = _PARSERS[setting.kind](setting, raw.strip() if isinstance(raw, str) else raw)
    check(setting, value)
    return value


def check(setting: Setting, value: Any) -> None:
    """Check a parsed value, or one given in Python, against the setting's type, choices and range.

    :raises ValueError: it does not fit.
    """
    if value is None and (setting.auto or setting.kind is Kind.PATH):
        return
    wanted = _TYPES.get(setting.kind, type(setting.default))
    if not isinstance(value, wanted) or (isinstance(value, bool) and setting.kind is not Kind.BOOL):
        raise ValueError(f"{value!r} is not {_WORDS[setting.kind]}")
    if setting.kind is Kind.LIST and not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} is not {_WORDS[setting.kind]}")
    if setting.choices and value not in setting.choices:
        known = [str(choice) for choice in setting.choices]
        raise ValueError(f"{str(value)!r} is not one of {', '.join(known)}{near(str(value), known)}")
    if setting.minimum is not None and value < setting.minimum:
        raise ValueError(f"{value} is less than {setting.minimum}")
    if setting.maximum is not None and value > setting.maximum:
        raise ValueError(f"{value} is more than {setting.maximum}")


def format_value(setting: Setting, value: Any) -> str:
    """Text of ``value`` that :func:`parse` reads back as the same value (list items must not contain commas)."""
    if value is None:
        return "auto" if setting.auto else ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting.kind is Kind.LIST:
        return ",".join(value)
    if setting.kind is Kind.PAIRS:
        return ",".join(f"{name}={number}" for name, number in attrs.asdict(value).items())
    return str(value)


def _parse_bool(setting: Setting, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise ValueError(f"{raw!r} is neither on (1, yes, true) nor off (0, no, false)")


def _parse_int(setting: Setting, raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]+", raw):
        return int(raw)
    raise ValueError(f"{raw!r} is not a whole number")


def _parse_float(setting: Setting, raw: object) -> float:
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except ValueError:
            pass
        else:
            if math.isfinite(value):
                return value
    raise ValueError(f"{raw!r} is not a finite number")


def _parse_text(setting: Setting, raw: object) -> str:
    if isinstance(raw, str):
        return raw
    raise ValueError(f"{raw!r} is not text")


def _parse_path(setting: Setting, raw: object) -> Path | None:
    if not isinstance(raw, (str, Path)):
        raise ValueError(f"{raw!r} is not a path")
    return Path(raw).expanduser() if str(raw) else None


def _parse_size(setting: Setting, raw: object) -> int:
    """Whole multiple of the setting's unit: a plain number counts units, a suffix gives another unit."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    found = _SIZE.fullmatch(raw) if isinstance(raw, str) else None
    if found is None:
        raise ValueError(f"{raw!r} is not a size; write for example 512, 512MiB or 8GiB")
    units = {name.lower(): size for name, size in UNIT_BYTES.items()}
    unit = (found[2] or setting.unit).lower()
    if unit not in units:
        raise ValueError(f"{found[2]!r} in {raw!r} is not a unit; units are {', '.join(UNIT_BYTES)}")
    value = Fraction(found[1]) * units[unit] / UNIT_BYTES[setting.unit]
    if value.denominator != 1:
        raise ValueError(f"{raw!r} is not a whole number of {setting.unit}")
    return value.numerator


def _parse_list(setting: Setting, raw: object) -> tuple[str, ...]:
    """Comma-separated text, or a sequence of texts (TOML array, repeated flag) that are taken as they are."""
    if isinstance(raw, str):
        return tuple(item.strip() for item in raw.split(",") if item.strip())
    if isinstance(raw, (list, tuple)) and all(isinstance(item, str) for item in raw):
        return tuple(raw)
    raise ValueError(f"{raw!r} is not a list of texts")


def _parse_pairs(setting: Setting, raw: object) -> Any:
    """``name=number`` pairs (or a TOML table) that replace fields of the default."""
    known = [field.name for field in attrs.fields(type(setting.default))]
    given: dict[str, int] = {}
    if isinstance(raw, str):
        items = [tuple(part.split("=", 1)) for part in raw.split(",") if part.strip()]
    elif isinstance(raw, Mapping):
        items = list(raw.items())
    else:
        raise ValueError(f"{raw!r} is not a list of name=number")
    for item in items:
        if len(item) != 2:
            raise ValueError(f"{item[0].strip()!r} has no value; write name=number")
        name, number = str(item[0]).strip(), item[1].strip() if isinstance(item[1], str) else item[1]
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}{near(name, known)}")
        if name in given:
            raise ValueError(f"{name!r} is given twice")
        try:
            given[name] = _parse_int(setting, number)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return attrs.evolve(setting.default, **given)


_PARSERS = {
    Kind.BOOL: _parse_bool,
    Kind.INT: _parse_int,
    Kind.FLOAT: _parse_float,
    Kind.TEXT: _parse_text,
    Kind.PATH: _parse_path,
    Kind.SIZE: _parse_size,
    Kind.LIST: _parse_list,
    Kind.PAIRS: _parse_pairs,
}
# A whole number is a valid float in Python code (and in TOML); other kinds need their own type. PAIRS: the default's.
_TYPES: dict[Kind, Any] = {
    Kind.BOOL: bool,
    Kind.INT: int,
    Kind.FLOAT: (int, float),
    Kind.TEXT: str,
    Kind.PATH: Path,
    Kind.SIZE: int,
    Kind.LIST: tuple,
}
_WORDS = {
    Kind.BOOL: "true or false",
    Kind.INT: "a whole number",
    Kind.FLOAT: "a number",
    Kind.TEXT: "text",
    Kind.PATH: "a path",
    Kind.SIZE: "a whole number of units",
    Kind.LIST: "a tuple of texts",
    Kind.PAIRS: "a value of this setting's class",
}
