"""A Hugging Face model folder as a source of weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType

from strata_core.errors import ModelFileError, NotFound, UnsupportedModel
from strata_core.weights.hf.config import Config, read_json
from strata_core.weights.hf.mapping import ModelMapping, Scope, rename
from strata_core.weights.hf.table import MAPPINGS
from strata_core.weights.hf.tokenizer import tokenizer_metadata
from strata_core.weights.safetensors import SafetensorsFile
from strata_core.weights.source import Lookups, fingerprint
from strata_core.weights.tensor import StoredTensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: ``layers.N.REST`` after what composite models put before it.
_LAYER = re.compile(r"layers\.(?P<number>\d+)\.(?P<name>.+)")
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


def is_model_folder(path: Path) -> bool:
    """Whether a folder has a configuration and weights."""
    return (path / CONFIG).is_file() and ((path / WEIGHTS).is_file() or (path / INDEX).is_file())


class HFFolder(Lookups):
    """An opened folder: a :class:`~strata_core.weights.source.WeightSource` with the names of GGUF files.

    Opening reads the JSON files and the headers of the weights; tensor data are not touched until they are used.
    """

    def __init__(self, path: Path, config: Config, files: list[SafetensorsFile]):
        self.path = path
        self._files = files
        self._stored = _all(files)
        mapping = _mapping(config)
        keys = mapping.metadata(config)
        tensors, more = _tensors(config, mapping, self._stored)
        keys = {f"{mapping.architecture}.{key}": value for key, value in {**keys, **more}.items()}
        self.metadata: Mapping[str, object] = MappingProxyType(
            {
                "general.architecture": mapping.architecture,
                "general.name": path.resolve().name,
                **keys,
                **tokenizer_metadata(path, config),
            }
        )
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: Path) -> HFFolder:
        """
        :raises NotFound: there is no such folder, or no model in it.
        :raises ModelFileError: a file is damaged, a key or a file of a set is missing; ``param`` names key or tensor.
        :raises UnsupportedModel: a type of model, of weights or of tokenizer that cannot be read.
        """
        if not (path / CONFIG).is_file():
            raise NotFound(f"{path}: no model there: the folder has no {CONFIG}")
        config = Config(path / CONFIG, read_json(path / CONFIG))
        if "text_config" in config:
            config = config.merged("text_config")
        with ExitStack() as undo:
            files = []
            for name, expected in _files(path).items():
                files.append(undo.enter_context(closing(_open(path / name))))
                for tensor in expected:
                    if tensor not in files[-1].tensors:
                        problem = f"the index says that tensor {tensor} is in {name}, but it is not"
                        raise ModelFileError(f"{path / INDEX}: {problem}", param=tensor)
            folder = cls(path, config, files)
            undo.pop_all()
            return folder

    def fingerprint(self) -> bytes:
        """As of a GGUF file, over the tensors as they are stored; in which files they lie does not count."""
        return fingerprint(self._stored)

    def close(self) -> None:
        self.tensors = MappingProxyType({})
        self._stored = {}
        for file in self._files:
            file.close()


def _files(path: Path) -> dict[str, list[str]]:
    """The files of weights, each with the tensors that the index says are in it (none without an index)."""
    if not (path / INDEX).is_file():
        if not (path / WEIGHTS).is_file():
            raise NotFound(f"{path}: no weights there: the folder has neither {WEIGHTS} nor {INDEX}")
        return {WEIGHTS: []}
    places = Config(path / INDEX, read_json(path / INDEX)).require("weight_map", dict)
    files: dict[str, list[str]] = {}
    for tensor, name in places.items():
        # A name with a folder in it could lead anywhere.
        if not isinstance(name, str) or Path(name).name != name:
            problem = f"tensor {tensor} is said to be in {name!r}, which is no name of a file"
            raise ModelFileError(f"{path / INDEX}: {problem}", param=tensor)
        files.setdefault(name, []).append(tensor)
    return dict(sorted(files.items()))


def _open(path: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(path)
    except NotFound as error:
        raise ModelFileError(f"{path}: this file of the model is missing", param="weight_map") from error


def _all(files: Iterable[SafetensorsFile]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{file.path}: tensor {name} is in an earlier file of the model too", param=name)
            tensors[name] = tensor
    return tensors


def _mapping(config: Config) -> ModelMapping:
    kind = config.require("model_type", str)
    mapping = MAPPINGS.get(kind)
    if mapping is None:
        known = ", ".join(sorted(MAPPINGS))
        problem = f"model_type {kind!r} is not supported; known: {known}"
        raise UnsupportedModel(f"{config.path}: {problem}", param="model_type")
    method = config.part("quantization_config").get("quant_method", "")
    if method and method != mapping.quantisation:
        raise UnsupportedModel(
            f"{config.path}: quantization_config: weights quantised by {method!r} cannot be read; take an unquantised "
            "folder or a GGUF file",
            param="quantization_config",
        )
    return mapping


def _tensors(
    config: Config, mapping: ModelMapping, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, object]]:
    """The tensors under GGUF names, and metadata that are tensors in the folder."""
    ignored = re.compile(mapping.ignored)
    scopes: dict[int | None, dict[str, StoredTensor]] = {None: {}}
    for name, tensor in stored.items():
        if ignored.fullmatch(name):
            continue
        short = next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name)
        short = mapping.place(config, short)
        match = _LAYER.fullmatch(short)
        if match:
            scopes.setdefault(int(match["number"]), {})[match["name"]] = tensor
        else:
            scopes[None][short] = tensor
    if config.get("tie_word_embeddings", False):
        scopes[None].pop("lm_head.weight", None)
    tensors: dict[str, StoredTensor] = {}
    keys: dict[str, object] = {}
    for number in sorted(scopes, key=lambda number: -1 if number is None else number):
        scope = Scope(config, number, scopes[number])
        change, names = (mapping.change_outer, mapping.outer) if number is None else (mapping.change, mapping.layer)
        for tensor in (*change(scope), *rename(scope, names)):
            if tensor.name in tensors:
                raise ModelFileError(f"{config.path.parent}: tensor {tensor.name} is there twice", param=tensor.name)
            tensors[tensor.name] = tensor
        keys.update(scope.keys)
    return tensors, keys
