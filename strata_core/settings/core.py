"""The core's settings: the one table that command line, environment, ``strata.toml`` and documentation derive from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from strata_core.errors import SettingsError
from strata_core.settings.kinds import Kind
from strata_core.settings.schema import SettingsTable, setting

T = TypeVar("T")
MODEL, CACHE, SERVING, SERVER, SAMPLING, GENERAL = (
    "Model",
    "Conversation cache",
    "Serving",
    "Server",
    "Sampling defaults",
    "General",
)


def _positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name}: {value} is less than 1")


@attrs.frozen
class BatchAgenda:
    """How a step's rows are shared between decoding and prompt reading.

    :ivar chunk: most prompt rows in a step.
    :ivar budget: most rows in a step, decode rows first.
    :ivar age: steps without progress after which a prompt gets a full chunk whatever the budget.
    """

    chunk: int = attrs.field(default=512, validator=_positive)
    budget: int = attrs.field(default=520, validator=_positive)
    age: int = attrs.field(default=4, validator=_positive)


@attrs.frozen(kw_only=True)
class Settings:
    """Effective settings of a run, or of a library user (``Settings(parallel=2)``); validated, immutable.

    :ivar sources: where each value came from, by name; names that are absent have their default.
    """

    model: str = setting(
        "default",
        section=MODEL,
        metavar="NAME|PATH",
        help="Model to serve: a name from `strata models`, a GGUF file or a Hugging Face folder.",
    )
    alias: tuple[str, ...] = setting(
        (), section=MODEL, metavar="NAME", help="Name under which clients see the model, instead of its own."
    )
    backend: str = setting(
        "auto", section=MODEL, metavar="auto|NAME", help="Compute backend; auto takes the best that is usable here."
    )
    threads: int = setting(
        0, section=MODEL, minimum=0, maximum=1024, help="CPU threads that compute; 0 takes the physical cores."
    )
    kv: str = setting(
        "auto",
        section=MODEL,
        choices=("auto", "f32", "f16", "bf16", "int8"),
        help="Type in which keys and values are kept; auto takes the backend's default.",
    )
    page_tokens: int = setting(
        32, section=MODEL, choices=(8, 16, 32, 64, 128, 256), help="Positions per page of keys and values."
    )
    max_context: int = setting(
        0,
        section=MODEL,
        minimum=0,
        help="Most tokens of a conversation; 0 takes the model's limit, or what fits if less.",
    )
    chat_template_file: Path | None = setting(
        None, kind=Kind.PATH, section=MODEL, help="Jinja chat template to use instead of the model's own."
    )
    rope_scaling: str = setting(
        "model",
        section=MODEL,
        choices=("model", "none", "linear", "yarn"),
        help="Method that stretches positions beyond the trained context; model takes what the file says.",
    )
    rope_scale: float = setting(
        0.0, section=MODEL, minimum=0, help="Factor by which the context is stretched; 0 takes what the file says."
    )
    rope_freq_base: float = setting(
        0.0, section=MODEL, minimum=0, help="Base of the rotary frequencies; 0 takes what the file says."
    )
    ple_io: str = setting(
        "mmap",
        section=MODEL,
        choices=("mmap", "direct", "ram"),
        help="How rows of a table of n-gram embeddings are read: through the mapped file, past the system's cache with "
        "one of our own, or from RAM that holds all of it.",
    )
    ple_cache_mib: int = setting(
        256, kind=Kind.SIZE, section=MODEL, minimum=0, help="RAM for rows read with --ple-io direct; 0 keeps none."
    )
    large_pages: str = setting(
        "auto",
        section=MODEL,
        choices=("off", "auto", "require"),
        env_switches={"STRATA_NO_LARGEPAGES": "off"},
        help="Large memory pages for the page pool; auto falls back to normal ones, require refuses to start.",
    )

    conversation_cache: bool = setting(
        True, section=CACHE, help="Reuse of what was computed before; off recomputes every prompt from its start."
    )
    conversation_cache_mib: int | None = setting(
        None,
        kind=Kind.SIZE,
        auto=True,
        minimum=0,
        section=CACHE,
        help="RAM that parked conversations may hold: a hard limit; 0 parks nothing in RAM.",
    )
    conversation_cache_slots: int = setting(64, section=CACHE, minimum=0, help="Most conversations parked in RAM.")
    conversation_cache_min_free_mib: int = setting(
        2560,
        kind=Kind.SIZE,
        minimum=0,
        section=CACHE,
        help="Parking floor: available RAM that a conversation which stays in RAM must leave.",
    )
    conversation_cache_park_min_free_mib: int = setting(
        512,
        kind=Kind.SIZE,
        minimum=0,
        section=CACHE,
        help="Transient floor: available RAM that a copy freed right after must leave.",
    )
    conversation_cache_park: str = setting(
        "ram",
        section=CACHE,
        choices=("ram", "disk", "auto"),
        help="Where a conversation goes when it leaves its slot; auto takes disk where RAM cannot hold one per slot.",
    )
    conversation_cache_disk_only: bool = setting(
        False, section=CACHE, help="Keep no conversation in RAM: every one that leaves its slot is written to disk."
    )
    conversation_cache_spill_on: str = setting(
        "park",
        section=CACHE,
        choices=("park", "evict"),
        help="What is written to disk: every parked conversation (park), or only what RAM evicts (evict).",
    )
    conversation_cache_spill_park_throttle_s: float = setting(
        0.0,
        section=CACHE,
        minimum=0,
        help="Least seconds between two writes of one conversation that stays in RAM; the newest state is written.",
    )
    conversation_cache_spill_divergence_tokens: int = setting(
        4096,
        section=CACHE,
        minimum=0,
        help="A stored conversation that a newer one leaves before this position counts as rewritten by its client.",
    )
    restore_when: str = setting(
        "auto",
        section=CACHE,
        choices=("auto", "always"),
        help="Restore from disk only where that is expected to be faster than reading the prompt again, or always.",
    )
    prompt_cache: int = setting(
        6,
        section=CACHE,
        minimum=0,
        help="States kept per conversation beside its end, for models that can be resumed only where one was kept.",
    )
    prompt_cache_every: int = setting(
        16384, section=CACHE, minimum=0, help="Tokens of a long prompt from one kept state to the next; 0 keeps none."
    )
    prompt_cache_root: int = setting(
        2048, section=CACHE, minimum=0, help="Least length of a beginning (a system prompt) whose state is always kept."
    )
    system_prompt_cache: bool = setting(
        True, section=CACHE, help="Keep system prompts on disk beyond the conversations that began with them."
    )
    system_prompt_cache_mib: int = setting(
        2048, kind=Kind.SIZE, minimum=0, section=CACHE, help="Disk space that system prompts alone may hold."
    )
    system_prompt_cache_slots: int = setting(
        0, section=CACHE, minimum=0, help="Most system prompts kept; 0 is no limit."
    )
    system_prompt_cache_dir: Path | None = setting(
        None,
        kind=Kind.PATH,
        section=CACHE,
        help="Folder of their own for system prompts; without it they are kept among the conversations.",
    )
    system_prompt_cache_max_age_days: float = setting(
        0.0, section=CACHE, minimum=0, help="Days after which an unused system prompt is deleted; 0 is never."
    )
    system_prompt_cache_key: str = setting(
        "",
        section=CACHE,
        metavar="TEXT",
        help="Kept system prompts are reused only by servers with the same key; a new key starts afresh.",
    )
    conversation_cache_similarity: float = setting(
        0.0,
        section=CACHE,
        minimum=0,
        maximum=1,
        help="Reuse only where the common prefix is more than this share of the prompt.",
    )
    conversation_cache_n_min: int = setting(
        0, section=CACHE, minimum=0, help="Reuse only a common prefix of at least this many tokens."
    )

    session_save_path: Path | None = setting(
        None,
        kind=Kind.PATH,
        section=CACHE,
        help="Folder of the session files that clients save and restore (`POST /slots/{id}`); without it they cannot.",
    )
    session_min_free_mib: int = setting(
        4096,
        kind=Kind.SIZE,
        minimum=0,
        section=CACHE,
        help="Free disk space that saving a session must leave.",
    )

    parallel: int = setting(
        4, section=SERVING, minimum=1, maximum=64, help="Slots: requests that are computed at the same time."
    )
    queue: int = setting(
        64, section=SERVING, minimum=0, help="Requests that may wait for a slot; more are refused with 503."
    )
    batch_agenda: BatchAgenda = setting(
        BatchAgenda(),
        kind=Kind.PAIRS,
        section=SERVING,
        help="Rows of a step: most prompt rows, most rows in all, steps after which a starved prompt goes first.",
    )
    lookup: int = setting(
        0,
        section=SERVING,
        minimum=0,
        maximum=64,
        help="Most tokens guessed ahead per step: what followed the last ones earlier in the text; 0 guesses none.",
    )
    mtp: int = setting(
        0,
        section=SERVING,
        minimum=0,
        maximum=8,
        help="Most tokens guessed ahead per step by the model's own layer for that, where `lookup` finds none; 0 does "
        "not load it. Pages hold its K/V too: what is kept with it is not resumed without it, nor the reverse.",
    )
    reasoning_parser: str = setting(
        "auto",
        section=SERVING,
        choices=("auto", "off"),
        help="Whether thinking is reported apart from the reply (`reasoning_content`); auto when the template has it.",
    )
    tool_parser: str = setting(
        "auto",
        section=SERVING,
        choices=("auto", "off"),
        help="Whether tool calls are read from replies; auto recognises the template's format.",
    )

    host: str = setting("127.0.0.1", section=SERVER, metavar="ADDRESS", help="Address to listen on.")
    port: int = setting(
        8080, section=SERVER, minimum=0, maximum=65535, help="Port to listen on; 0 takes a free one and prints it."
    )
    api_key: tuple[str, ...] = setting(
        (), section=SERVER, secret=True, metavar="KEY", help="Key that clients must send; several may be given."
    )
    api_key_file: Path | None = setting(
        None, kind=Kind.PATH, section=SERVER, help="File with one key per line, in addition to those given."
    )
    share_cache: bool = setting(
        False, section=SERVER, help="Reuse between different API keys; off keeps their conversations apart."
    )
    allowed_host: tuple[str, ...] = setting(
        (), section=SERVER, metavar="NAME", help="Further Host names to accept from clients that send no key."
    )
    allowed_origin: tuple[str, ...] = setting(
        (),
        section=SERVER,
        metavar="ORIGIN",
        help="Further browser origins to accept, for example https://chat.example.",
    )
    max_body_mib: int = setting(
        64, kind=Kind.SIZE, section=SERVER, minimum=1, help="Largest request body; larger ones get 413."
    )
    keep_alive_s: float = setting(
        10.0, section=SERVER, minimum=0.1, help="Seconds between comments on a stream that has nothing else to send."
    )
    drain_s: float = setting(
        30.0,
        section=SERVER,
        minimum=0,
        maximum=86400,
        help="Seconds that running requests get to end when the server stops.",
    )
    server: str = setting(
        "auto",
        section=SERVER,
        choices=("auto", "gunicorn", "waitress"),
        help="HTTP server; auto takes waitress on Windows and gunicorn elsewhere.",
    )
    access_log: bool = setting(False, section=SERVER, help="Log every HTTP request.")

    temperature: float = setting(
        1.0,
        section=SAMPLING,
        minimum=0,
        maximum=100,
        help="Temperature of requests that name none; 0 always takes the likeliest.",
    )
    top_k: int = setting(
        0, section=SAMPLING, minimum=0, maximum=2**31, help="Likeliest tokens to sample from; 0 is no limit."
    )
    top_p: float = setting(
        1.0, section=SAMPLING, minimum=0, maximum=1, help="Least probability mass to sample from; 1 is all."
    )
    min_p: float = setting(
        0.0, section=SAMPLING, minimum=0, maximum=1, help="Least probability of a token relative to the likeliest one."
    )
    max_tokens: int = setting(
        0,
        section=SAMPLING,
        minimum=0,
        help="Most generated tokens of requests that name none, fewer where the context is full; 0 is no limit.",
    )
    seed: int = setting(
        -1,
        section=SAMPLING,
        minimum=-1,
        maximum=2**63 - 1,
        help="Seed of requests that name none; -1 draws a new one for each.",
    )

    record_trace: Path | None = setting(
        None,
        kind=Kind.PATH,
        section=GENERAL,
        help="File to which a line per request is appended, without tokens or text, for `strata simulate`.",
    )
    log_level: str = setting(
        "info", section=GENERAL, choices=("debug", "info", "warning", "error"), help="Least severity that is logged."
    )
    plugins: tuple[str, ...] = setting(
        (),
        section=GENERAL,
        metavar="NAME",
        help="Plugin (entry-point name or module) that must load; without it, a plugin that fails is only reported.",
    )
    disable_plugins: tuple[str, ...] = setting(
        (), section=GENERAL, metavar="NAME", help="Plugin not to load, also a built-in one."
    )

    sources: Mapping[str, str] = attrs.field(factory=dict, repr=False, eq=False)
    _extensions: Mapping[type[Any], Any] = attrs.field(factory=dict, repr=False)

    def plugin(self, cls: type[T]) -> T:
        """The settings of a class that a plugin registered, resolved; all defaults when nothing was given.

        :raises SettingsError: ``cls`` was not registered in this run.
        """
        try:
            found: T = self._extensions[cls]
        except KeyError:
            raise SettingsError(f"{cls.__name__} is not registered: its plugin is not active") from None
        return found


CORE = SettingsTable((("strata", Settings),))
"""The table without plugins."""
