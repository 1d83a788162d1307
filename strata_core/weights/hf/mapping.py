"""What a mapping from a Hugging Face ``model_type`` to an architecture of GGUF files consists of.

A folder is read as if it were a GGUF file, so that a model family is written against one set of names: those that
llama.cpp's converter gives keys and tensors. A mapping names them, and says what the converter does to the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import attrs

from strata_core.errors import ModelFileError
from strata_core.weights.derived import computed, renamed, stacked
from strata_core.weights.hf.config import Config
from strata_core.weights.tensor import StoredTensor

#: Tensors outside the layers, the same in nearly all models.
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
#: Parts of a layer that nearly all models have.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_EXPERT = re.compile(r"(?P<before>.+)\.experts\.(?P<number>\d+)\.(?P<part>.+)")


class Scope:
    """The tensors of one layer, or those outside all layers, that have not been given a GGUF name yet.

    :ivar config: of the model.
    :ivar prefix: of the GGUF names, ``blk.N.`` or nothing.
    :ivar layer: N, or None.
    :ivar keys: what tensors say that are metadata in GGUF files, below the architecture's name.
    """

    def __init__(self, config: Config, layer: int | None, tensors: dict[str, StoredTensor]):
        self.config = config
        self.layer = layer
        self.prefix = "" if layer is None else f"blk.{layer}."
        self.keys: dict[str, object] = {}
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """What is left."""
        return list(self._tensors)

    def take(self, name: str) -> StoredTensor:
        """Remove and return a tensor by its name within the layer.

        :raises ModelFileError: it is missing.
        """
        if name not in self._tensors:
            where = "" if self.layer is None else f" of layer {self.layer}"
            raise ModelFileError(f"{self.config.path.parent}: tensor {name}{where} is missing", param=name)
        return self._tensors.pop(name)

    def optional(self, name: str, dimensions: int | None = None) -> StoredTensor | None:
        """Remove and return a tensor, or None.

        :raises ModelFileError: it has not as many dimensions.
        """
        tensor = self._tensors.pop(name, None)
        if tensor is not None and dimensions not in (None, len(tensor.shape)):
            raise self.wrong(tensor, f"should have {dimensions} dimensions")
        return tensor

    def wrong(self, tensor: StoredTensor, problem: str) -> ModelFileError:
        """An error that names a tensor and its shape."""
        where = self.config.path.parent
        return ModelFileError(f"{where}: tensor {tensor.name} of shape {tensor.shape} {problem}", param=tensor.name)


#: Takes what needs more than another name from a scope, and gives the tensors made of it.
Change = Callable[[Scope], Iterable[StoredTensor]]


def unchanged(scope: Scope) -> Iterable[StoredTensor]:
    """Nothing needs more than another name."""
    return ()


def as_it_is(config: Config, name: str) -> str:
    """Names say themselves where tensors belong."""
    return name


@attrs.frozen
class ModelMapping:
    """How models of some types are read.

    :ivar model_types: values of ``model_type`` in ``config.json``.
    :ivar architecture: value of ``general.architecture``.
    :ivar metadata: the architecture's keys, without its name, from the configuration.
    :ivar layer: names within a layer without ``.weight`` or ``.bias``, there and here.
    :ivar outer: the same outside the layers.
    :ivar change: what is done beside renaming, in a layer.
    :ivar change_outer: the same outside the layers.
    :ivar ignored: matches names of tensors that are no part of the text model.
    :ivar place: where a tensor of this name (without what composite models put before it) belongs: its name as of a
        layer, ``layers.N.REST``, or as it is.
    :ivar quantisation: the ``quant_method`` whose tensors ``change`` reads.
    """

    model_types: tuple[str, ...]
    architecture: str
    metadata: Callable[[Config], Mapping[str, object]]
    layer: Mapping[str, str] = LAYER
    outer: Mapping[str, str] = OUTER
    change: Change = unchanged
    change_outer: Change = unchanged
    ignored: str = r"(?!)"
    place: Callable[[Config, str], str] = as_it_is
    quantisation: str | None = None


def one_added(
    scope: Scope, names: Mapping[str, str], *, but: Iterable[str] = (), always: bool = False
) -> Iterable[StoredTensor]:
    """Weights of norms that are stored as their difference from one.

    :param names: there and here; those count that end with ``norm`` there, or all if ``always``.
    """
    for there, here in names.items():
        if (always or there.endswith("norm")) and there not in but and f"{there}.weight" in scope:
            tensor = scope.take(f"{there}.weight")
            yield computed(f"{scope.prefix}{here}.weight", tensor, lambda weight: weight + 1)


def count_further(scope: Scope) -> None:
    """Count a layer that is behind those of the configuration, as one that predicts further tokens. GGUF files count
    such layers among the others."""
    layers = scope.config.require("num_hidden_layers", int)
    if scope.layer is not None and scope.layer >= layers:
        scope.keys |= {"block_count": scope.layer + 1, "nextn_predict_layers": scope.layer + 1 - layers}


def stack_experts(scope: Scope, parts: Mapping[str, str], block: str = "mlp") -> Iterable[StoredTensor]:
    """The matrices of numbered experts, one stack for each part.

    :param parts: name of a part without ``.weight``, there and here.
    :raises ModelFileError: an expert is missing, or another shape or type than the first.
    """
    found: dict[str, dict[int, str]] = {}
    for name in scope.names():
        match = _EXPERT.fullmatch(name)
        if match and match["before"] == block:
            found.setdefault(match["part"], {})[int(match["number"])] = name
    for there, here in parts.items():
        numbered = found.get(f"{there}.weight", {})
        experts = []
        for number in range(max(numbered, default=-1) + 1):
            experts.append(scope.take(numbered.get(number, f"{block}.experts.{number}.{there}.weight")))
            if (experts[-1].shape, experts[-1].type) != (experts[0].shape, experts[0].type):
                raise scope.wrong(experts[-1], f"differs from that of expert 0, {experts[0].shape}")
        if experts:
            yield stacked(f"{scope.prefix}{here}.weight", experts)


def rename(scope: Scope, names: Mapping[str, str]) -> Iterable[StoredTensor]:
    """What is left in a scope, under GGUF names; a name that is not known stays, for the family to refuse it."""
    for name in scope.names():
        tensor = scope.take(name)
        stem, dot, suffix = name.rpartition(".")
        if suffix in ("weight", "bias") and stem in names:
            yield renamed(tensor, f"{scope.prefix}{names[stem]}{dot}{suffix}")
        elif name in names:
            yield renamed(tensor, f"{scope.prefix}{names[name]}")
        else:
            yield tensor
