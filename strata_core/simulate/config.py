"""What a simulated server has: slots, budgets, floors, levels and rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from strata_core.conversations.checkpoints import CheckpointRules
from strata_core.conversations.matching import MatchRules
from strata_core.conversations.options import KeeperOptions, park_target
from strata_core.errors import SettingsError
from strata_core.settings.core import BatchAgenda
from strata_core.simulate.trace import Trace, TraceError

MIB = 1 << 20
#: Rates where neither the trace nor the command line says: prompt and generated tokens per second, and bytes per second
#: of a disk, which are those of an ordinary solid-state disk.
READ_RATE, GENERATE_RATE, DISK_RATE = 500.0, 20.0, 1e9
RANKS = {"warm": 10, "cold": 20}


@attrs.frozen
class Disk:
    """A level below RAM. Bounds are None where there are none; rates are bytes per second."""

    name: str
    rank: int
    max_bytes: int | None
    max_entries: int | None = None
    read_rate: float = DISK_RATE
    write_rate: float = DISK_RATE


@attrs.frozen
class SimConfig:
    """One configuration to replay a trace against.

    :ivar label: heads its column.
    :ivar host_bytes: memory for pages beside weights and all else, None for any amount.
    :ivar ram_bytes: most that parked conversations hold in RAM, 0 for no RAM level.
    :ivar disks: levels below RAM, best first.
    :ivar read_rate: prompt tokens per second; :ivar generate_rate: of each slot.
    :ivar arrivals: ``think``, ``order`` or ``recorded``, see :class:`~strata_core.simulate.arrivals.Arrivals`.
    """

    label: str
    page_tokens: int
    page_bytes: int
    parallel: int
    max_context: int
    host_bytes: int | None
    ram_bytes: int
    ram_entries: int | None
    disks: tuple[Disk, ...]
    options: KeeperOptions
    agenda: BatchAgenda
    read_rate: float
    generate_rate: float
    arrivals: str = "think"

    @property
    def slot_pages(self) -> int:
        """Pages of a slot with a full context."""
        return -(-self.max_context // self.page_tokens)

    @property
    def max_pages(self) -> int:
        """Pages that slots and RAM may hold, as :func:`strata_core.engine.plan.plan_memory` counts them."""
        return self.parallel * (self.slot_pages + 1) + self.ram_bytes // self.page_bytes

    @classmethod
    def of_trace(cls, trace: Trace) -> SimConfig:
        """The configuration that a trace was recorded under.

        :raises TraceError: its header lacks something.
        """
        header = trace.header
        try:
            options = dict(header["options"])
            options["rules"] = MatchRules(**options["rules"])
            if "checkpoints" in options:  # traces of before there were any have none
                options["checkpoints"] = CheckpointRules(**options["checkpoints"])
            levels = header["levels"]
            ram = next((level for level in levels if level["rank"] == 0), {"max_bytes": 0, "max_entries": None})
            return cls(
                label="as recorded",
                page_tokens=int(header["page_tokens"]),
                page_bytes=int(header["page_bytes"]),
                parallel=int(header["parallel"]),
                max_context=int(header["max_context"]),
                host_bytes=header["available"],
                ram_bytes=ram["max_bytes"] or 0,
                ram_entries=ram["max_entries"],
                disks=tuple(Disk(**level) for level in levels if level["rank"] > 0),
                options=KeeperOptions(**options),
                agenda=BatchAgenda(**header["agenda"]),
                read_rate=trace.rate("read", "read_s") or READ_RATE,
                generate_rate=trace.rate("generated", "generate_s") or GENERATE_RATE,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"the first line of the trace is not complete: {error!r}") from None


@attrs.frozen
class Changes:
    """What is different from the configuration of the trace; None: nothing. Names are those of the options.

    :ivar restore_rate: MB (10^6 bytes) per second by level; :ivar write_rate: the same of writing.
    """

    label: str | None = None
    parallel: int | None = None
    host_mib: int | None = None
    ram_mib: int | None = None
    ram_slots: int | None = None
    warm_mib: int | None = None
    cold_mib: int | None = None
    min_free_mib: int | None = None
    park_min_free_mib: int | None = None
    park: str | None = None
    spill_on: str | None = None
    throttle_s: float | None = None
    restore_when: str | None = None
    read_rate: float | None = None
    generate_rate: float | None = None
    restore_rate: Mapping[str, float] = attrs.field(factory=dict)
    write_rate: Mapping[str, float] = attrs.field(factory=dict)
    arrivals: str | None = None

    def apply(self, base: SimConfig) -> SimConfig:
        """The changed configuration.

        :raises SettingsError: a rate is for a level that there is not.
        """
        disks = self._disks(base)
        ram_bytes = base.ram_bytes if self.ram_mib is None else self.ram_mib * MIB
        config = attrs.evolve(
            base,
            label=_or(self.label, base.label),
            parallel=_or(self.parallel, base.parallel),
            host_bytes=base.host_bytes if self.host_mib is None else self.host_mib * MIB,
            ram_bytes=ram_bytes,
            ram_entries=_or(self.ram_slots, base.ram_entries),
            disks=disks,
            read_rate=_or(self.read_rate, base.read_rate),
            generate_rate=_or(self.generate_rate, base.generate_rate),
            arrivals=_or(self.arrivals, base.arrivals),
        )
        return attrs.evolve(config, options=self._options(config))

    def _disks(self, base: SimConfig) -> tuple[Disk, ...]:
        disks = {disk.name: disk for disk in base.disks}
        for name, mib in (("warm", self.warm_mib), ("cold", self.cold_mib)):
            if mib == 0:
                disks.pop(name, None)
            elif mib is not None:
                known = disks.get(name) or Disk(name, RANKS[name], None)
                disks[name] = attrs.evolve(known, max_bytes=mib * MIB)
        unknown = sorted({*self.restore_rate, *self.write_rate} - disks.keys())
        if unknown:
            there = ", ".join(disks) or "none"
            raise SettingsError(f"there is no level {unknown[0]!r} below RAM to have a rate; there are: {there}")
        for name, rate in self.restore_rate.items():
            disks[name] = attrs.evolve(disks[name], read_rate=rate * 1e6)
        for name, rate in self.write_rate.items():
            disks[name] = attrs.evolve(disks[name], write_rate=rate * 1e6)
        return tuple(sorted(disks.values(), key=lambda disk: disk.rank))

    def _options(self, config: SimConfig) -> KeeperOptions:
        old = config.options
        mirror = old.mirror if self.spill_on is None else self.spill_on == "park"
        floor = old.parking_floor if self.min_free_mib is None else self.min_free_mib * MIB
        live = config.parallel * config.slot_pages * config.page_bytes
        host = config.host_bytes
        target = park_target(
            _or(self.park, old.target),
            below=bool(config.disks),
            mirrors=mirror or not config.ram_bytes,
            snapshots_fit=host is None or 2 * live + floor <= host,
        )
        return attrs.evolve(
            old,
            target=target,
            mirror=mirror,
            parking_floor=floor,
            transient_floor=old.transient_floor if self.park_min_free_mib is None else self.park_min_free_mib * MIB,
            throttle_s=_or(self.throttle_s, old.throttle_s),
            weigh_restores=old.weigh_restores if self.restore_when is None else self.restore_when == "auto",
        )


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value
