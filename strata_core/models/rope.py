"""Rotary frequencies: what a file says about them, and the formulas of its scaling types.

Frequencies are worked out in float64 and rounded to float32 once. The metadata keys are those below
``<architecture>.rope.``; a key that asks for something not known here is refused, as a model whose rotation is only
nearly right answers plausibly and wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from strata_core.compute.base import Rotation
from strata_core.errors import ModelFileError, SettingsError, UnsupportedModel

if TYPE_CHECKING:
    from strata_core.models.base import ModelOptions
    from strata_core.weights.source import WeightSource

Frequencies = NDArray[np.float64]

SCALINGS = ("none", "linear", "yarn", "llama3")

#: Keys below ``rope.`` that :func:`read_rope` and its callers apply.
_APPLIED = {
    "dimension_count",
    "freq_base",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.attn_factor",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
    "scaling.low_freq_factor",
    "scaling.high_freq_factor",
}
#: Keys that say nothing with this value; ``finetuned`` says how the model came about, whatever its value.
_NEUTRAL: Mapping[str, float] = {"scaling.yarn_ext_factor": 1.0, "scaling.yarn_attn_factor": 1.0}
_INFORMATIVE = {"scaling.finetuned"}

#: Tensor of divisors of the frequencies, one per rotated pair (how files of Llama 3.1 hold its scaling).
FACTORS_TENSOR = "rope_freqs.weight"


@attrs.frozen
class RopeScaling:
    """How a model's positions are stretched.

    :ivar kind: one of :data:`SCALINGS`.
    :ivar factor: how much longer the context is than the original one.
    :ivar original_context: context the frequencies were trained for (yarn, llama3).
    :ivar attention_factor: further factor on rotated elements.
    :ivar beta_fast: yarn leaves pairs that turn at least this often in the original context as they are ...
    :ivar beta_slow: ... and stretches those that turn at most this often.
    :ivar truncate: the bounds of yarn's ramp between the two are rounded outwards to whole pairs.
    :ivar low_factor: llama3 stretches wavelengths above ``original_context / low_factor`` ...
    :ivar high_factor: ... and leaves those below ``original_context / high_factor``.
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    truncate: bool = True


@attrs.frozen
class Rope:
    """All that decides a model's rotation; ``factors`` are divisors of the frequencies, or None."""

    rotated: int
    base: float
    scaling: RopeScaling
    factors: NDArray[np.float32] | None = attrs.field(default=None, eq=False)

    def rotation(self, *, interleaved: bool) -> Rotation:
        frequencies = scaled(plain(self.rotated, self.base), self.base, self.scaling)
        if self.factors is not None:
            frequencies = frequencies / self.factors
        return Rotation(frequencies.astype(np.float32), interleaved, magnitude(self.scaling))


def plain(rotated: int, base: float) -> Frequencies:
    """``base ** (-2i / rotated)`` for pair i (Su et al. 2021): ``(rotated / 2,)``."""
    return base ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)


def plain_rotation(rotated: int, base: float, *, interleaved: bool) -> Rotation:
    """A rotation without scaling."""
    return Rotation(plain(rotated, base).astype(np.float32), interleaved)


def scaled(frequencies: Frequencies, base: float, scaling: RopeScaling) -> Frequencies:
    """The frequencies after scaling of any kind."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return yarn(frequencies, base, scaling)
    if scaling.kind == "llama3":
        return llama3(frequencies, scaling)
    return frequencies


def yarn(frequencies: Frequencies, base: float, scaling: RopeScaling) -> Frequencies:
    """"NTK by parts" (Peng et al. 2023, section 3.2): fast pairs stay, slow ones are stretched, a ramp between."""
    rotated = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0, 1)
    stretched: Frequencies = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    return stretched


def llama3(frequencies: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones stay, a linear blend between."""
    turns = frequencies * scaling.original_context / (2 * math.pi)  # in the original context
    blend = np.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0, 1)
    stretched: Frequencies = frequencies / scaling.factor * (1 - blend) + frequencies * blend
    return stretched


def magnitude(scaling: RopeScaling) -> float:
    """Factor on rotated elements; yarn's is ``0.1 ln(factor) + 1`` (Peng et al. 2023, section 3.4)."""
    grown = 0.1 * math.log(scaling.factor) + 1 if scaling.kind == "yarn" and scaling.factor > 1 else 1.0
    return scaling.attention_factor * grown


def read_rope(
    source: WeightSource,
    architecture: str,
    *,
    head_dim: int,
    context: int,
    options: ModelOptions,
    applied: Collection[str] = (),
    yarn_truncate: bool = True,
) -> Rope:
    """What the file and the user's overrides say.

    :param context: the file's context length, which is the original one where no other is given.
    :param applied: keys below ``rope.`` that the caller reads itself.
    :param yarn_truncate: see :attr:`RopeScaling.truncate`; it goes with the architecture.
    :raises UnsupportedModel: a scaling type or key that is not known here.
    :raises ModelFileError: values that make no sense, or a missing one.
    :raises SettingsError: overrides that contradict each other.
    """
    prefix = f"{architecture}.rope."
    _refuse_unknown(source, prefix, applied)
    rotated = source.key(prefix + "dimension_count", head_dim)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ModelFileError(
            f"{source.path}: {prefix}dimension_count is {rotated}; it must be even and at most {head_dim}",
            param=prefix + "dimension_count",
        )
    key = prefix + "freq_base"
    base = source.key(key, 10000.0)
    if not 1 < base < math.inf:
        raise ModelFileError(f"{source.path}: {key} is {base}; it must be above 1", param=key)
    if options.rope_freq_base is not None:
        base = options.rope_freq_base
        if not 1 < base < math.inf:
            raise SettingsError(f"the rotary base must be above 1, not {base}", param="rope_freq_base")
    factors = None
    if source.get(FACTORS_TENSOR) is not None:
        factors = source.require(FACTORS_TENSOR, (rotated // 2,)).dequantise()
        if not (factors > 0).all():
            raise ModelFileError(f"{source.path}: tensor {FACTORS_TENSOR} has divisors <= 0", param=FACTORS_TENSOR)
    return Rope(rotated, base, _read_scaling(source, prefix, context, options, yarn_truncate), factors)


def _read_scaling(
    source: WeightSource, prefix: str, context: int, options: ModelOptions, yarn_truncate: bool
) -> RopeScaling:
    kind = source.key(prefix + "scaling.type", None, str)
    factor = source.key(prefix + "scaling.factor", None, float) or source.key(prefix + "scale_linear", None, float)
    if kind is None:  # files from before there were types mean linear scaling
        kind = "linear" if factor not in (None, 1.0) else "none"
    if kind not in SCALINGS:
        raise UnsupportedModel(
            f"{source.path}: rope scaling type {kind!r} is not supported; known: {', '.join(SCALINGS)}",
            param=prefix + "scaling.type",
        )
    kind, factor = _overridden(kind, factor, options)
    if kind != "none" and factor is None:
        raise ModelFileError(
            f"{source.path}: rope scaling {kind!r} needs a factor; metadata key {prefix}scaling.factor is missing",
            param=prefix + "scaling.factor",
        )
    scaling = RopeScaling(
        kind=kind,
        factor=1.0 if factor is None or kind == "none" else factor,
        original_context=source.key(prefix + "scaling.original_context_length", context),
        attention_factor=source.key(prefix + "scaling.attn_factor", 1.0),
        beta_fast=source.key(prefix + "scaling.yarn_beta_fast", 32.0),
        beta_slow=source.key(prefix + "scaling.yarn_beta_slow", 1.0),
        low_factor=source.key(prefix + "scaling.low_freq_factor", 1.0),
        high_factor=source.key(prefix + "scaling.high_freq_factor", 4.0),
        truncate=yarn_truncate,
    )
    _check(source, prefix, scaling)
    return scaling


def _overridden(kind: str, factor: float | None, options: ModelOptions) -> tuple[str, float | None]:
    wanted, scale = options.rope_scaling, options.rope_scale
    if wanted is not None and wanted not in SCALINGS:
        raise SettingsError(f"unknown rope scaling {wanted!r}; known: {', '.join(SCALINGS)}", param="rope_scaling")
    if scale is not None and not 0 < scale < math.inf:
        raise SettingsError(f"the rope scale must be above 0, not {scale}", param="rope_scale")
    if wanted == "none" and scale not in (None, 1.0):
        raise SettingsError(f"rope scaling 'none' contradicts rope scale {scale}", param="rope_scale")
    if scale is not None and wanted is None and kind == "none":
        wanted = "linear"
    if wanted in ("linear", "yarn", "llama3") and scale is None and factor is None:
        raise SettingsError(f"rope scaling {wanted!r} needs a rope scale, as the file has none", param="rope_scale")
    return wanted or kind, factor if scale is None else scale


def _check(source: WeightSource, prefix: str, scaling: RopeScaling) -> None:
    wrong = None
    if not 0 < scaling.factor < math.inf:
        wrong = "factor", f"is {scaling.factor}; it must be above 0"
    elif scaling.kind in ("yarn", "llama3") and scaling.original_context < 1:
        wrong = "original_context_length", f"is {scaling.original_context}; it must be at least 1"
    elif scaling.kind == "yarn" and not 0 < scaling.beta_slow <= scaling.beta_fast:
        wrong = "yarn_beta_slow", f"is {scaling.beta_slow}; it must be above 0 and at most {scaling.beta_fast}"
    elif scaling.kind == "llama3" and not 0 < scaling.low_factor < scaling.high_factor:
        wrong = "low_freq_factor", f"is {scaling.low_factor}; it must be above 0 and below {scaling.high_factor}"
    if wrong is not None:
        key = f"{prefix}scaling.{wrong[0]}"
        raise ModelFileError(f"{source.path}: {key} {wrong[1]}", param=key)


def _refuse_unknown(source: WeightSource, prefix: str, applied: Collection[str]) -> None:
    for key, value in source.metadata.items():
        if not key.startswith(prefix):
            continue
        name = key[len(prefix) :]
        if name in _APPLIED or name in applied or name in _INFORMATIVE:
            continue
        if np.array_equal(np.asarray(value), _NEUTRAL.get(name, 0)):
            continue  # it asks for nothing
        raise UnsupportedModel(f"{source.path}: {key} = {value} is not supported", param=key)
