"""Models that come in several GGUF files, and the one way to open a model whatever its form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from strata_core.errors import ModelFileError, NotFound
from strata_core.weights.gguf import GGUFFile
from strata_core.weights.hf import HFFolder
from strata_core.weights.source import Lookups, WeightSource
from strata_core.weights.tensor import StoredTensor

#: ``NAME-00001-of-00003.gguf``: how the tools of the field name the files of one model.
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_model(path: str | Path) -> WeightSource:
    """Open a GGUF file (of several, the whole set: its other files must lie beside it) or a Hugging Face folder.

    :raises NotFound: there is no such file, or no model in the folder.
    :raises ModelFileError: a file is damaged, or one of the set is missing or belongs to another model.
    :raises UnsupportedModel: the folder holds a type of model that cannot be read.
    """
    if Path(path).is_dir():
        return HFFolder.open(Path(path))
    with ExitStack() as undo:
        opened = undo.enter_context(GGUFFile.open(path))
        count = opened.key("split.count", 1)
        if count <= 1:
            undo.pop_all()
            return opened
        shards = [opened if file == opened.path else undo.enter_context(_open(file)) for file in _files(opened, count)]
        whole = ShardSet(shards)
        undo.pop_all()
        return whole


class ShardSet(Lookups):
    """A model in several files: the metadata of the first, the tensors of all.

    :raises ModelFileError: the files do not form one complete model.
    """

    def __init__(self, shards: list[GGUFFile]):
        self.path = shards[0].path
        self.metadata: Mapping[str, object] = shards[0].metadata
        self._shards = shards
        for number, shard in enumerate(shards):
            if (shard.require_key("split.no", int), shard.require_key("split.count", int)) != (number, len(shards)):
                problem = f"{shard.path}: says that it is another part than file {number + 1} of {len(shards)}"
                raise ModelFileError(problem, param="split.no")
        tensors = _merged(shards)
        expected = shards[0].key("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            problem = f"{self.path}: the {len(shards)} files hold {len(tensors)} tensors instead of {expected}"
            raise ModelFileError(problem, param="split.tensors.count")
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)

    def close(self) -> None:
        self.tensors = MappingProxyType({})
        for shard in self._shards:
            shard.close()


def _files(opened: GGUFFile, count: int) -> Iterable[Path]:
    match = SHARD_NAME.fullmatch(opened.path.name)
    if match is None or int(match["count"]) != count:
        problem = f"is one of {count} files of a model, but its name does not end in -00001-of-{count:05d}.gguf"
        raise ModelFileError(f"{opened.path}: {problem}, so the others cannot be found", param="split.count")
    names = (f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))
    return [opened.path.with_name(name) for name in names]


def _open(path: Path) -> GGUFFile:
    try:
        return GGUFFile.open(path)
    except NotFound as error:
        raise ModelFileError(f"{path}: this file of the model is missing", param="split.count") from error


def _merged(shards: list[GGUFFile]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{shard.path}: tensor {name} is in an earlier file of the model too", param=name)
            tensors[name] = tensor
    return tensors
