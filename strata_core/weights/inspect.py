"""What ``strata inspect`` tells about a model file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strata_core.weights.quant import TYPES
from strata_core.weights.shards import open_model
from strata_core.weights.source import WeightSource

_TEMPLATE_LINES = 4
_SPECIALS = ("bos", "eos", "eot", "eom", "unknown", "padding")


@attrs.frozen
class TypeShare:
    """The tensors of one type. ``readable``: whether Strata can compute with them."""

    type: str
    tensors: int
    parameters: int
    nbytes: int
    readable: bool


@attrs.frozen
class Inspection:
    """What a model file holds. None (or an empty value) is what the file does not say.

    :ivar parameters: elements of all tensors; a tied embedding lies in the file once and counts once.
    :ivar nbytes: bytes of all tensors.
    :ivar geometry: the architecture's numbers by the last parts of their keys, such as ``block_count``; a list when it
        differs by layer.
    :ivar rope: entries below ``ARCH.rope.``, and ``rope_freqs`` when the file has that tensor.
    :ivar specials: special tokens by role: ``(id, text)``.
    :ivar tied: no ``output.weight``: the output uses the embedding.
    :ivar template: the chat template.
    :ivar unsupported: what nothing installed can run, one sentence each.
    """

    path: Path
    name: str | None
    architecture: str | None
    parameters: int
    nbytes: int
    types: tuple[TypeShare, ...]
    geometry: Mapping[str, object]
    rope: Mapping[str, object]
    tokenizer: str | None
    pre_tokenizer: str | None
    vocab: int | None
    specials: Mapping[str, tuple[int, str | None]]
    tied: bool
    template: str | None
    unsupported: tuple[str, ...]


#: Looks for something that cannot be used; a sentence for each.
Check = Callable[[WeightSource], Iterable[str]]


def describe(path: str | Path, architectures: Collection[str], checks: Sequence[Check] = ()) -> Inspection:
    """Read what a model file (or a set of files, or a folder) says about itself.

    :param architectures: those for which a model family is registered.
    :param checks: what else may be unsupported, beside architecture and types of tensors.
    :raises NotFound: there is no such file.
    :raises ModelFileError: the file is damaged.
    """
    with open_model(path) as model:
        architecture = model.key("general.architecture", None, str)
        types = _types(model)
        tokens = model.key("tokenizer.ggml.tokens", None, list)
        return Inspection(
            path=model.path,
            name=model.key("general.name", None, str),
            architecture=architecture,
            parameters=sum(share.parameters for share in types),
            nbytes=sum(share.nbytes for share in types),
            types=types,
            geometry=_below(model, f"{architecture}.", without="rope."),
            rope=_rope(model, architecture),
            tokenizer=model.key("tokenizer.ggml.model", None, str),
            pre_tokenizer=model.key("tokenizer.ggml.pre", None, str),
            vocab=None if tokens is None else len(tokens),
            specials=_specials(model, tokens or []),
            tied="token_embd.weight" in model.tensors and "output.weight" not in model.tensors,
            template=model.key("tokenizer.chat_template", None, str),
            unsupported=(
                *_unsupported(architecture, types, architectures), *(text for check in checks for text in check(model))
            ),
        )


def _types(model: WeightSource) -> tuple[TypeShare, ...]:
    shares: dict[str, TypeShare] = {}
    for tensor in model.tensors.values():
        readable = TYPES[tensor.type].decode is not None
        share = shares.get(tensor.type, TypeShare(tensor.type, 0, 0, 0, readable))
        shares[tensor.type] = attrs.evolve(
            share,
            tensors=share.tensors + 1,
            parameters=share.parameters + tensor.size,
            nbytes=share.nbytes + tensor.nbytes,
        )
    return tuple(sorted(shares.values(), key=lambda share: -share.nbytes))


def _below(model: WeightSource, prefix: str, without: str) -> dict[str, object]:
    found = {}
    for key, value in model.metadata.items():
        short = key.removeprefix(prefix)
        if short != key and not short.startswith(without):
            found[short] = value.tolist() if isinstance(value, np.ndarray) else value
    return found


def _rope(model: WeightSource, architecture: str | None) -> dict[str, object]:
    rope = _below(model, f"{architecture}.rope.", without="\0")
    factors = [name for name in model.tensors if name.startswith("rope_f")]
    return rope | ({"rope_freqs": ", ".join(factors)} if factors else {})


def _specials(model: WeightSource, tokens: list[str]) -> dict[str, tuple[int, str | None]]:
    specials: dict[str, tuple[int, str | None]] = {}
    for role in _SPECIALS:
        number = model.key(f"tokenizer.ggml.{role}_token_id", None, int)
        if number is not None:
            specials[role] = (number, tokens[number] if 0 <= number < len(tokens) else None)
    return specials


def _unsupported(
    architecture: str | None, types: tuple[TypeShare, ...], architectures: Collection[str]
) -> list[str]:
    problems = []
    if architecture is None:
        problems.append("the file does not say its architecture (general.architecture)")
    elif architecture not in architectures:
        known = ", ".join(sorted(architectures)) or "none"
        problems.append(f"no model family for architecture {architecture} is installed (there is: {known})")
    for share in types:
        if not share.readable:
            problems.append(f"type {share.type} cannot be read (tensors of it: {share.tensors})")
    return problems


def render(inspection: Inspection, console: Console) -> None:
    """Print an inspection for people."""
    console.print(Group(_facts(inspection), "", _type_table(inspection), *_remarks(inspection)))


def printable(text: str) -> str:
    """Text from a file, with what could steer a terminal made visible instead."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _shown(text: str, *, style: str = "", no_wrap: bool = False) -> Text:
    return Text(printable(text), style=style, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")


def _facts(inspection: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def add(label: str, value: object) -> None:
        table.add_row(label, "-" if value is None else _shown(str(value)))

    add("file", inspection.path)
    add("name", inspection.name)
    add("architecture", inspection.architecture)
    add("parameters", f"{inspection.parameters:,} ({'tied' if inspection.tied else 'untied'} output)")
    add("weights", f"{inspection.nbytes / 2**20:,.1f} MiB")
    for label, key in (
        ("context", "context_length"),
        ("layers", "block_count"),
        ("width", "embedding_length"),
        ("feed forward", "feed_forward_length"),
        ("heads", "attention.head_count"),
        ("K/V heads", "attention.head_count_kv"),
        ("experts", "expert_count"),
    ):
        if key in inspection.geometry:
            add(label, inspection.geometry[key])
    if inspection.rope:
        add("rope", ", ".join(f"{key} {value}" for key, value in inspection.rope.items()))
    rule = f", pre-tokenizer {inspection.pre_tokenizer}" if inspection.pre_tokenizer else ""
    add("tokenizer", inspection.tokenizer and inspection.tokenizer + rule)
    add("vocabulary", inspection.vocab)
    for role, (number, text) in inspection.specials.items():
        add(f"{role} token", f"{number} {text if text is not None else '(not in the vocabulary)'}")
    return table


def _type_table(inspection: Inspection) -> Table:
    table = Table("type", "tensors", "parameters", "MiB", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for share in inspection.types:
        table.add_row(share.type, str(share.tensors), f"{share.parameters:,}", f"{share.nbytes / 2**20:,.1f}")
    return table


def _remarks(inspection: Inspection) -> list[RenderableType]:
    remarks: list[RenderableType] = [""]
    if inspection.template is None:
        remarks.append("no chat template: chat needs one to be given")
    else:
        lines = inspection.template.splitlines() or [""]
        more = len(lines) - _TEMPLATE_LINES
        remarks.append(f"chat template, {len(inspection.template)} characters:")
        remarks += [_shown("  " + line, no_wrap=True) for line in lines[:_TEMPLATE_LINES]]
        if more > 0:
            remarks.append(f"  ... {more} more lines")
    remarks.append("")
    if inspection.unsupported:
        remarks += [_shown(f"unsupported: {problem}", style="red") for problem in inspection.unsupported]
    else:
        remarks.append(Text("nothing unsupported", style="green"))
    return remarks
