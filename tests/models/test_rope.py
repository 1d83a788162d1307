"""Rotary frequencies: formulas, what files may say, and what users may override."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_core.errors import ModelFileError, SettingsError, StrataError, UnsupportedModel
from strata_core.models.base import ModelOptions
from strata_core.models.rope import Rope, RopeScaling, llama3, magnitude, plain, read_rope, yarn
from strata_core.testing.tiny import tiny_llama
from strata_core.weights.gguf import GGUFFile

HEAD, CONTEXT = 16, 512
PLAIN = ModelOptions()
YARN = {"scaling.type": "yarn", "scaling.factor": 2.0}


@pytest.fixture
def rope_of(tmp_path: Path) -> Any:
    """Reads the rope of a tiny model whose file has these scaling keys, under these overrides."""

    def read(scaling: dict[str, object] | None = None, options: ModelOptions = PLAIN, **more: Any) -> Rope:
        path = tiny_llama(tmp_path / "tiny.gguf", rope_scaling=scaling, context=CONTEXT, **more)
        return read_rope(GGUFFile.open(path), "llama", head_dim=HEAD, context=CONTEXT, options=options)

    return read


def test_plain_frequencies_fall_from_one_by_equal_ratios() -> None:
    frequencies = plain(8, 10_000.0)
    assert np.allclose(frequencies, [1, 0.1, 0.01, 0.001])


def test_linear_scaling_slows_all_pairs_alike(rope_of: Any) -> None:
    rotation = rope_of({"type": "linear", "factor": 4.0}).rotation(interleaved=True)
    assert np.allclose(rotation.inverse_frequencies, plain(HEAD, 10_000.0) / 4)
    assert rotation.magnitude == 1.0


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    frequencies = plain(64, 10_000.0)
    scaling = RopeScaling("yarn", factor=8.0, original_context=4096)
    ratio = yarn(frequencies, 10_000.0, scaling) / frequencies
    assert ratio[0] == 1 and ratio[-1] == 1 / 8
    assert (np.diff(ratio) <= 0).all() and ((ratio > 1 / 8) & (ratio < 1)).any()
    assert magnitude(scaling) == pytest.approx(0.1 * math.log(8) + 1)


def test_yarn_survives_a_ramp_without_width() -> None:
    scaling = RopeScaling("yarn", factor=2.0, original_context=16, beta_fast=1.0, beta_slow=1.0)
    assert np.isfinite(yarn(plain(4, 10_000.0), 10_000.0, scaling)).all()


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    frequencies = plain(128, 500_000.0)
    scaling = RopeScaling("llama3", factor=8.0, original_context=8192)
    ratio, wavelengths = llama3(frequencies, scaling) / frequencies, 2 * math.pi / frequencies
    assert np.allclose(ratio[wavelengths < 8192 / 4], 1)
    assert np.allclose(ratio[wavelengths > 8192], 1 / 8)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert between.any() and ((ratio[between] > 1 / 8) & (ratio[between] < 1)).all()


def test_the_divisors_of_a_rope_freqs_tensor_are_applied(rope_of: Any) -> None:
    factors = np.linspace(1, 8, HEAD // 2, dtype=np.float32)
    rotation = rope_of(rope_freqs=factors).rotation(interleaved=True)
    assert np.allclose(rotation.inverse_frequencies, plain(HEAD, 10_000.0) / factors)


def test_a_factor_without_a_type_means_linear(rope_of: Any) -> None:
    assert rope_of({"factor": 2.0}).scaling == RopeScaling("linear", 2.0, CONTEXT)
    assert rope_of(metadata={"llama.rope.scale_linear": 2.0}).scaling.kind == "linear"
    assert rope_of({"factor": 1.0}).scaling.kind == "none"


def test_yarn_takes_its_constants_from_the_file(rope_of: Any) -> None:
    scaling = rope_of(
        {
            "type": "yarn",
            "factor": 4.0,
            "original_context_length": 128,
            "attn_factor": 0.5,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
        }
    ).scaling
    assert scaling == RopeScaling("yarn", 4.0, 128, 0.5, 16.0, 2.0)
    assert magnitude(scaling) == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    "options, expected",
    [
        (ModelOptions(rope_scale=3.0), RopeScaling("linear", 3.0, CONTEXT)),
        (ModelOptions(rope_scaling="yarn", rope_scale=3.0), RopeScaling("yarn", 3.0, CONTEXT)),
        (ModelOptions(rope_scaling="none"), RopeScaling("none", 1.0, CONTEXT)),
        (ModelOptions(), RopeScaling("none", 1.0, CONTEXT)),
    ],
)
def test_overrides_on_a_file_without_scaling(rope_of: Any, options: ModelOptions, expected: RopeScaling) -> None:
    assert rope_of(options=options).scaling == expected


def test_overrides_replace_what_the_file_says(rope_of: Any) -> None:
    file = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    assert rope_of(file, ModelOptions(rope_scaling="none")).scaling.factor == 1.0
    assert rope_of(file, ModelOptions(rope_scale=2.0)).scaling == RopeScaling("yarn", 2.0, 128)
    assert rope_of(file, ModelOptions(rope_scaling="linear")).scaling == RopeScaling("linear", 4.0, 128)
    assert rope_of(file, ModelOptions(rope_freq_base=5e5)).base == 5e5


@pytest.mark.parametrize(
    "options, param",
    [
        (ModelOptions(rope_scaling="ntk"), "rope_scaling"),
        (ModelOptions(rope_scaling="none", rope_scale=2.0), "rope_scale"),
        (ModelOptions(rope_scaling="linear"), "rope_scale"),
        (ModelOptions(rope_scale=0.0), "rope_scale"),
        (ModelOptions(rope_scale=math.nan), "rope_scale"),
        (ModelOptions(rope_freq_base=1.0), "rope_freq_base"),
    ],
)
def test_overrides_that_make_no_sense_are_errors(rope_of: Any, options: ModelOptions, param: str) -> None:
    with pytest.raises(SettingsError) as caught:
        rope_of(options=options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "name, value",
    [
        ("scaling.type", "longrope"),
        ("scaling.type", "su"),
        ("scaling.yarn_log_multiplier", 0.1),
        ("scaling.yarn_ext_factor", 0.5),
        ("scaling.alpha", 1000.0),
        ("dimension_sections", np.array([8, 4, 4], np.int32)),
        ("something.new", 7),
    ],
)
def test_what_is_not_known_is_refused_by_name(rope_of: Any, name: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match="not supported") as caught:
        rope_of(metadata={f"llama.rope.{name}": value})
    assert caught.value.param == f"llama.rope.{name}"


def test_keys_that_ask_for_nothing_are_accepted(rope_of: Any) -> None:
    keys = {"scaling.finetuned": True, "scaling.yarn_log_multiplier": 0.0, "scaling.yarn_ext_factor": 1.0}
    assert rope_of(metadata={f"llama.rope.{name}": value for name, value in keys.items()}).scaling.kind == "none"


@pytest.mark.parametrize(
    "metadata, param",
    [
        ({"scaling.type": "yarn"}, "scaling.factor"),
        ({"scaling.type": "linear", "scaling.factor": -1.0}, "scaling.factor"),
        ({**YARN, "scaling.original_context_length": 0}, "scaling.original_context_length"),
        ({**YARN, "scaling.yarn_beta_slow": 64.0}, "scaling.yarn_beta_slow"),
        ({"scaling.type": "llama3", "scaling.factor": 2.0, "scaling.low_freq_factor": 4.0}, "scaling.low_freq_factor"),
        ({"scaling.type": 3}, "scaling.type"),
        ({"dimension_count": 15}, "dimension_count"),
        ({"dimension_count": 18}, "dimension_count"),
        ({"freq_base": 0.0}, "freq_base"),
    ],
)  # fmt: skip
def test_impossible_values_are_named(rope_of: Any, metadata: dict[str, object], param: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        rope_of(metadata={f"llama.rope.{name}": value for name, value in metadata.items()})
    assert caught.value.param == f"llama.rope.{param}"


@pytest.mark.parametrize("factors", [np.ones(5, np.float32), np.zeros(HEAD // 2, np.float32)])
def test_a_wrong_rope_freqs_tensor_is_named(rope_of: Any, factors: np.ndarray) -> None:
    with pytest.raises(StrataError) as caught:
        rope_of(rope_freqs=factors)
    assert caught.value.param == "rope_freqs.weight"
