"""Changes of a configuration as text: options of ``strata simulate``, and what ``--compare`` takes."""

from __future__ import annotations

from typing import Any

import attrs
import click

from strata_core.errors import SettingsError
from strata_core.simulate.config import Changes


@attrs.frozen
class Field:
    """One option: a field of :class:`Changes`."""

    name: str
    type: Any  # of click's parameter types, which older releases of click do not have as a generic
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return self.name.replace("_", "-")


_MIB = click.IntRange(min=0)
_RATE = click.FloatRange(min=0, min_open=True)

FIELDS = (
    Field("parallel", click.IntRange(1, 64), "N", "Slots."),
    Field("host_mib", _MIB, "MIB", "Memory for pages, beside weights and all else."),
    Field("ram_mib", _MIB, "MIB", "What parked conversations may hold in RAM; 0 for none."),
    Field("ram_slots", _MIB, "N", "Most conversations parked in RAM."),
    Field("warm_mib", _MIB, "MIB", "Size of the warm level; 0 for none."),
    Field("cold_mib", _MIB, "MIB", "Size of the cold level; 0 for none."),
    Field("min_free_mib", _MIB, "MIB", "Parking floor."),
    Field("park_min_free_mib", _MIB, "MIB", "Transient floor."),
    Field("park", click.Choice(["ram", "disk", "auto"]), "ram|disk|auto", "Where a conversation goes."),
    Field("spill_on", click.Choice(["park", "evict"]), "park|evict", "What is written to disk."),
    Field("throttle_s", click.FloatRange(min=0), "S", "Least seconds between two writes of a conversation in RAM."),
    Field("restore_when", click.Choice(["auto", "always"]), "auto|always", "Whether restores are weighed."),
    Field("read_rate", _RATE, "TOK/S", "How fast prompts are read."),
    Field("generate_rate", _RATE, "TOK/S", "How fast each slot generates."),
    Field("restore_rate", click.STRING, "LEVEL=MB/S,...", "How fast levels are read."),
    Field("write_rate", click.STRING, "LEVEL=MB/S,...", "How fast levels are written."),
    Field("arrivals", click.Choice(["think", "order", "recorded"]), "think|order|recorded",
          "Turns come as long after the reply before them as they did; or after all that had ended; or at their time."),
)  # fmt: skip

_BY_FLAG = {field.flag: field for field in FIELDS}


def parse_changes(text: str) -> Changes:
    """``NAME: key=value, key=value ...``; rates are ``restore-rate.LEVEL=MB/s``. Without a name, the text is the name.

    :raises SettingsError: a key is not known or a value no such value.
    """
    label, colon, rest = text.partition(":")
    if not colon:
        label, rest = text, text
    values: dict[str, Any] = {"label": label.strip()}
    rates: dict[str, list[str]] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, assigned, value = item.partition("=")
        flag, _, level = key.strip().partition(".")
        field = _BY_FLAG.get(flag)
        if field is None or not assigned:
            raise SettingsError(f"--compare {item!r}: write key=value with one of {', '.join(_BY_FLAG)}")
        if field.name in ("restore_rate", "write_rate"):
            rates.setdefault(field.name, []).append(f"{level}={value}")
            continue
        try:
            values[field.name] = field.type.convert(value.strip(), None, None)
        except click.BadParameter as error:
            raise SettingsError(f"--compare {item!r}: {error.message}") from None
    values |= {name: parse_rates(",".join(items)) for name, items in rates.items()}
    return Changes(**values)


def parse_rates(text: str) -> dict[str, float]:
    """``LEVEL=MB/s,...``.

    :raises SettingsError: it is not.
    """
    rates = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        level, _, value = item.partition("=")
        try:
            rates[level.strip()] = float(value)
        except ValueError:
            rates[level.strip()] = 0.0
        if not level or not 0 < rates[level.strip()] < float("inf"):
            raise SettingsError(f"{item!r} is no rate: write LEVEL=MB/s, for example cold=900")
    return rates
