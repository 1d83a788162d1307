"""From an opened file to a model on a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from strata_core.errors import UnsupportedModel
from strata_core.models.base import Family, Model, ModelOptions
from strata_core.weights.source import Lookups

if TYPE_CHECKING:
    from strata_core.compute.base import Backend
    from strata_core.weights.source import WeightSource
    from strata_core.weights.tensor import StoredTensor

#: Told the share of the weights' bytes, 0.0 to 1.0, that were taken in.
Progress = Callable[[float], None]

_NAMED = 5


def load_model(
    source: WeightSource,
    backend: Backend,
    families: Iterable[Family],
    options: ModelOptions,
    progress: Progress | None = None,
) -> Model:
    """Build the model that a file holds with the family that knows its architecture.

    A tensor that the family does not ask for is an error: the model would compute something else than it was made for.

    :param progress: called from this thread while weights are taken in, and with 1.0 at the end.
    :raises UnsupportedModel: no family for the architecture, or the file has tensors that its family does not use.
    :raises ModelFileError: the file is not a complete model; ``param`` names the key or tensor.
    :raises OutOfMemory: the weights do not fit.
    """
    architecture = source.require_key("general.architecture", str)
    by_architecture = {name: family for family in families for name in family.architectures}
    family = by_architecture.get(architecture)
    if family is None:
        known = ", ".join(sorted(by_architecture)) or "none"
        raise UnsupportedModel(
            f"{source.path}: no installed family runs architecture {architecture!r}; known: {known}",
            param="general.architecture",
        )
    watched = _Watched(source, progress)
    model = family.load(watched, backend, options)
    left = [name for name in source.tensors if name not in watched.taken]
    if left:
        model.close()
        names = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
        raise UnsupportedModel(
            f"{source.path}: the {family.name} family does not use the tensors {names}", param=left[0]
        )
    if progress is not None:
        progress(1.0)
    return model


class _Watched(Lookups):
    """Another source's weights; notes which tensors were asked for and reports how far loading is."""

    def __init__(self, source: WeightSource, progress: Progress | None):
        self.path = source.path
        self.metadata = source.metadata
        self.tensors = source.tensors
        self.taken: set[str] = set()
        self._progress = progress
        self._total = sum(tensor.nbytes for tensor in source.tensors.values())
        self._done = 0

    def get(self, name: str) -> StoredTensor | None:
        tensor = super().get(name)
        return None if tensor is None else self._take(tensor)

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        return self._take(super().require(name, shape))

    def _take(self, tensor: StoredTensor) -> StoredTensor:
        if tensor.name not in self.taken:
            if self._progress is not None:  # what was asked for before is taken in by now
                self._progress(self._done / self._total)
            self.taken.add(tensor.name)
            self._done += tensor.nbytes
        return tensor
