"""The installed models: what lies in the models folder, and what a ``--model`` argument means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from strata_core.errors import NotFound
from strata_core.paths import models_dir
from strata_core.weights.hf import is_model_folder
from strata_core.weights.shards import SHARD_NAME

#: The name of the model that is served when none is named.
DEFAULT = "default"
#: Its file in the models folder.
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@attrs.frozen
class InstalledModel:
    """A model in the models folder.

    :ivar name: what ``--model`` takes: the file's name without ``.gguf`` (and without the numbering of a set of files),
        or a folder's path below the models folder, such as ``Qwen3-0.6B`` or ``Qwen/Qwen3-0.6B``.
    :ivar path: the file, the first file of a set, or the folder.
    :ivar size: bytes, of all files of a set; of a folder, of its weights.
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
    for path in _folders(folder):
        name = path.relative_to(folder).as_posix()
        models.setdefault(name, model_at(name, path))
    return sorted(models.values(), key=lambda model: model.name)


def model_at(name: str, path: Path) -> InstalledModel:
    """A model by its path, wherever it lies; its size is 0 where there is nothing."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return InstalledModel(name, path, sum(file.stat().st_size for file in files if file.is_file()))


def _folders(folder: Path) -> Iterator[Path]:
    """Folders with a model: directly in the models folder, or in one named for its maker."""
    for path in sorted(folder.glob("*/")):
        if path.name.startswith("."):
            continue
        if is_model_folder(path):
            yield path
        else:
            yield from (inner for inner in sorted(path.glob("*/")) if is_model_folder(inner))


def resolve(model: str, folder: Path | None = None) -> Path:
    """The file or folder that a ``--model`` argument means.

    :param model: ``default``; or a path to a file or folder; or the name of an installed model, with or without
        ``.gguf``. An installed model wins over a file of that name in the working directory; write ``./name`` for the
        latter.
    :raises NotFound: nothing of that name; the message says where was looked and how to get the default model.
    """
    folder = folder or models_dir()
    if model == DEFAULT:
        path = folder / DEFAULT_FILE
        if path.is_file():
            return path
        raise NotFound(f"the default model is not installed ({path}); get it with: strata models pull {DEFAULT}")
    found = installed(folder)
    for entry in found:
        if model in (entry.name, entry.path.name):
            return entry.path
    path = Path(model).expanduser()
    if path.is_file() or is_model_folder(path):
        return path
    if path.is_dir():
        raise NotFound(f"{path} is a folder without a model; name one with config.json and weights, or a .gguf file")
    names = ", ".join(entry.name for entry in found) or "none"
    raise NotFound(
        f"no model {model!r}: there is no such file, and {folder} has no model of that name (installed: {names}); "
        f"the default model comes with: strata models pull {DEFAULT}"
    )
