"""The options of the disk levels."""

from __future__ import annotations

from pathlib import Path

import attrs

from strata_core.settings import Kind, setting

SECTION = "Conversations on disk"


@attrs.frozen(kw_only=True)
class DiskSettings:
    """Flags, ``strata.toml`` keys and variables of these names."""

    conversation_cache_warm_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        section=SECTION,
        help="Folder of the warm level, on a fast disk; it is on when its size is given too.",
    )
    conversation_cache_warm_mib: int = setting(
        0, kind=Kind.SIZE, minimum=0, section=SECTION, help="Most that the warm level may hold; 0 turns it off."
    )
    conversation_cache_cold_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        section=SECTION,
        aliases=("conversation_cache_spill_dir",),
        help="Folder of the cold level; without it, `conversations` in the user's cache folder.",
    )
    conversation_cache_cold_mib: int = setting(
        8192,
        kind=Kind.SIZE,
        minimum=0,
        section=SECTION,
        aliases=("conversation_cache_disk_mib",),
        help="Most that the cold level may hold; 0 turns it off.",
    )
    conversation_cache_spill_when_full: str = setting(
        "evict-oldest",
        section=SECTION,
        choices=("evict-oldest", "reject"),
        help="A full level lets its oldest conversations go, or refuses new ones.",
    )
    conversation_cache_spill_max_age_days: float = setting(
        0.0, section=SECTION, minimum=0, help="Days after which an unused conversation leaves a disk level; 0 is never."
    )
    conversation_cache_archive_mode: str = setting(
        "off",
        section=SECTION,
        choices=("off", "ids", "state"),
        help="Archive what is superseded or rewritten by its client instead of deleting it: token ids, or all of it.",
    )
    conversation_cache_archive_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        section=SECTION,
        help="Folder of the archive; without it, `archive` in the cold level's folder.",
    )
    conversation_cache_archive_mib: int = setting(
        2048, kind=Kind.SIZE, minimum=1, section=SECTION, help="Most that the archive may hold; the oldest copies go."
    )
    conversation_cache_archive_keep: int = setting(
        4, section=SECTION, minimum=0, help="Most archived copies of one conversation; 0 is no limit."
    )
    conversation_cache_archive_max_age_days: float = setting(
        0.0, section=SECTION, minimum=0, help="Days after which an archived copy is deleted; 0 is never."
    )
    conversation_cache_segment_tokens: int = setting(
        2048,
        section=SECTION,
        minimum=256,
        maximum=1 << 20,
        help="Most positions in one file; shorter files share more, longer ones are fewer.",
    )
