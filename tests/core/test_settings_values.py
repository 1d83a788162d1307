from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.errors import PluginError, SettingsError
from strata_core.settings import CORE, BatchAgenda, Kind, Setting, Settings, SettingsTable, setting, settings_of
from strata_core.settings.kinds import format_value, parse

CORE_SETTINGS = {spec.name: spec for spec in CORE}


@pytest.mark.parametrize(
    ("text", "mib"),
    [("0", 0), ("512", 512), ("512MiB", 512), ("8GiB", 8192), ("8 gib", 8192), ("1.5GiB", 1536), ("1TiB", 1 << 20)],
)
def test_sizes_are_read_in_the_unit_of_their_name_or_their_own(text: str, mib: int) -> None:
    assert parse(CORE_SETTINGS["conversation_cache_mib"], text) == mib


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("512KiB", "not a whole number of MiB"),
        ("1.5", "not a whole number of MiB"),
        ("8GB", "'GB' in '8GB' is not a unit"),
        ("lots", "not a size"),
        ("-1", "not a size"),
        ("", "not a size"),
        ("0x10", "not a size"),
        (1.5, "not a size"),
        (True, "not a size"),
        (-1, "-1 is less than 0"),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason(text: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(CORE_SETTINGS["conversation_cache_mib"], text)


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("parallel", "four", "not a whole number"),
        ("parallel", "4.0", "not a whole number"),
        ("parallel", "1_0", "not a whole number"),
        ("parallel", True, "not a whole number"),
        ("parallel", "0", "0 is less than 1"),
        ("parallel", "65", "65 is more than 64"),
        ("temperature", "nan", "not a finite number"),
        ("temperature", "inf", "not a finite number"),
        ("temperature", False, "not a finite number"),
        ("conversation_cache", "maybe", "neither on"),
        ("conversation_cache", 1, "neither on"),
        ("kv", "f61", "not one of auto, f32, f16, bf16, int8; did you mean f16"),
        ("page_tokens", "48", "not one of 8, 16, 32"),
        ("host", 3, "not text"),
        ("api_key", [1], "not a list of texts"),
        ("chat_template_file", 3, "not a path"),
        ("batch_agenda", "chunk", "'chunk' has no value"),
        ("batch_agenda", "chunks=1", "not one of chunk, budget, age; did you mean chunk"),
        ("batch_agenda", "chunk=1,chunk=2", "given twice"),
        ("batch_agenda", "chunk=x", "chunk: 'x' is not a whole number"),
        ("batch_agenda", "age=0", "age: 0 is less than 1"),
        ("batch_agenda", 5, "not a list of name=number"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_the_reason(name: str, raw: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(CORE_SETTINGS[name], raw)


def test_pairs_replace_only_what_they_name() -> None:
    spec = CORE_SETTINGS["batch_agenda"]
    assert parse(spec, "chunk=256, age=2") == BatchAgenda(chunk=256, age=2)
    assert parse(spec, {"budget": 600}) == BatchAgenda(budget=600)


def test_paths_expand_the_home_folder_and_an_empty_one_is_none() -> None:
    spec = CORE_SETTINGS["api_key_file"]
    assert parse(spec, "~/keys") == Path.home() / "keys"
    assert parse(spec, "") is None


_words = st.text(st.characters(codec="utf-8", exclude_characters=",", exclude_categories=("Cc", "Cs")), min_size=1)


def _values(spec: Setting) -> st.SearchStrategy[Any]:
    low, high = (None if bound is None else int(bound) for bound in (spec.minimum, spec.maximum))
    found: st.SearchStrategy[Any]
    if spec.choices:
        found = st.sampled_from(spec.choices)
    elif spec.kind in (Kind.INT, Kind.SIZE):
        found = st.integers(low, high)
    elif spec.kind is Kind.FLOAT:
        found = st.floats(spec.minimum, spec.maximum, allow_nan=False, allow_infinity=False)
    elif spec.kind is Kind.BOOL:
        found = st.booleans()
    elif spec.kind is Kind.LIST:
        found = st.lists(_words.map(str.strip).filter(bool)).map(tuple)
    elif spec.kind is Kind.PATH:
        found = st.none() | _words.filter(lambda text: text == text.strip() and text[0] not in "~.").map(Path)
    elif spec.kind is Kind.PAIRS:
        found = st.builds(BatchAgenda, *[st.integers(1, 1 << 40)] * 3)
    else:
        found = _words.map(str.strip)
    return st.none() | found if spec.auto else found


@given(st.sampled_from(list(CORE)).flatmap(lambda spec: st.tuples(st.just(spec), _values(spec))))
def test_every_value_survives_being_written_as_text_and_read_again(pair: tuple[Setting, Any]) -> None:
    spec, value = pair
    assert parse(spec, format_value(spec, value)) == value


@given(st.sampled_from(list(CORE)), st.text() | st.integers() | st.floats() | st.booleans() | st.lists(st.text()))
def test_any_value_is_either_read_or_refused_with_a_reason(spec: Setting, raw: object) -> None:
    try:
        value = parse(spec, raw)
    except ValueError as error:
        assert str(error)
    else:
        Settings(**{spec.name: value})


def test_settings_made_in_python_are_checked_too() -> None:
    assert Settings(parallel=2).parallel == 2
    with pytest.raises(SettingsError, match="parallel: 65 is more than 64") as caught:
        Settings(parallel=65)
    assert (caught.value.param, caught.value.exit_code) == ("parallel", 2)
    with pytest.raises(SettingsError, match="port: '80' is not a whole number"):
        Settings(port="80")  # type: ignore[arg-type]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_defaults_fit_their_own_rules_and_have_help() -> None:
    Settings()
    for spec in CORE:
        assert spec.help.endswith("."), spec.name


def test_secrets_are_not_in_the_text_of_the_settings() -> None:
    assert "hunter2" not in repr(Settings(api_key=("hunter2",)))


@attrs.frozen(kw_only=True)
class TierSettings:
    warm_mib: int = setting(0, kind=Kind.SIZE, section="Levels", help="Size.", minimum=0, aliases=("hot_mib",))


@attrs.frozen(kw_only=True)
class Clashing:
    tepid: int = setting(0, section="Levels", help="Size.", aliases=("warm_mib",))


@attrs.frozen(kw_only=True)
class ClashingWithCore:
    port: int = setting(0, section="Levels", help="Size.")


def test_a_plugins_settings_join_the_table() -> None:
    table = CORE.extend("tiers", TierSettings)
    assert table.names()["hot_mib"].name == "warm_mib"
    assert "Levels" in table.sections()
    assert [spec.flag for spec in settings_of(TierSettings)] == ["--warm-mib"]


def test_a_name_that_is_taken_is_an_error_that_names_both_owners() -> None:
    table = CORE.extend("tiers", TierSettings)
    with pytest.raises(PluginError, match="'warm_mib' of plugin 'other' is already declared by 'tiers'"):
        table.extend("other", Clashing)
    with pytest.raises(PluginError, match="'port' of plugin 'other' is already declared by 'strata'"):
        table.extend("other", ClashingWithCore)


@pytest.mark.parametrize("cls", [int, BatchAgenda])
def test_a_class_without_settings_is_an_error(cls: type) -> None:
    with pytest.raises(PluginError, match="declares no settings"):
        SettingsTable(CORE.classes).extend("other", cls)


def test_settings_of_a_plugin_that_is_not_active_are_an_error() -> None:
    with pytest.raises(SettingsError, match="TierSettings is not registered"):
        Settings().plugin(TierSettings)
