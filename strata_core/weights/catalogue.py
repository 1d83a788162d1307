"""The installed models: what lies in the models folder, and what a ``--model`` argument means."""

from __future__ import annotations

from pathlib import Path

import attrs

from strata_core.errors import NotFound
from strata_core.paths import models_dir
from strata_core.weights.shards import SHARD_NAME

#: The name of the model that is served when none is named.
DEFAULT = "default"
#: Its file in the models folder.
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@attrs.frozen
class InstalledModel:
    """A model in the models folder.

    :ivar name: what ``--model`` takes: the file's name without ``.gguf`` (and without the numbering of a set of files).
    :ivar path: the file; the first file of a set.
    :ivar size: bytes, of all files of a set.
    """

    name: str
    path: Path
    size: int


def installed(folder: Path | None = None) -> list[InstalledModel]:
    """The models in ``folder`` (None: the user's models folder), by name; empty when the folder does not exist."""
    folder = folder or models_dir()
    models: dict[str, InstalledModel] = {}
    for path in sorted(folder.glob("*.gguf")):
        if path.name.startswith(".") or not path.is_file():
            continue
        match = SHARD_NAME.fullmatch(path.name)
        name = match["stem"] if match else path.stem
        first = models.get(name)
        size = path.stat().st_size
        # Files of a set sort by number, so the first one that is met is the one to open.
        models[name] = attrs.evolve(first, size=first.size + size) if first else InstalledModel(name, path, size)
    return list(models.values())


def resolve(model: str, folder: Path | None = None) -> Path:
    """The file that a ``--model`` argument means.

    :param model: ``default``; or a path to a file; or the name of an installed model, with or without ``.gguf``. An
        installed model wins over a file of that name in the working directory; write ``./name`` for the latter.
    :raises NotFound: nothing of that name; the message says where was looked and how to get the default model.
    """
    folder = folder or models_dir()
    if model == DEFAULT:
        path = folder / DEFAULT_FILE
        if path.is_file():
            return path
        raise NotFound(f"the default model is not installed ({path}); get it with: strata models pull {DEFAULT}")
    for entry in installed(folder):
        if model in (entry.name, entry.path.name):
            return entry.path
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise NotFound(f"{path} is a folder; name a .gguf file in it")
    names = ", ".join(entry.name for entry in installed(folder)) or "none"
    raise NotFound(
        f"no model {model!r}: there is no such file, and {folder} has no model of that name (installed: {names}); "
        f"the default model comes with: strata models pull {DEFAULT}"
    )
