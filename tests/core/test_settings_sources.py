from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from strata_core.errors import SettingsError
from strata_core.settings import CORE, ConfigFile, Settings, find_config, peek, resolve, setting


@attrs.frozen(kw_only=True)
class CacheSettings:
    cold_mib: int = setting(1, section="Levels", help="Size.", aliases=("disk_mib", "spill_mib"))


TABLE = CORE.extend("tiers", CacheSettings)


def effective(
    command_line: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    file: dict[str, object] | None = None,
) -> Settings:
    config = None if file is None else ConfigFile(Path("/etc/strata.toml"), file)
    return resolve(TABLE, command_line=command_line or {}, environ=environ or {}, config=config)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file() -> None:
    file: dict[str, object] = {"parallel": 1, "queue": 1, "port": 1}
    environ = {"STRATA_PARALLEL": "2", "STRATA_QUEUE": "2"}
    settings = effective({"parallel": "3"}, environ, file)
    assert (settings.parallel, settings.queue, settings.port, settings.seed) == (3, 2, 1, -1)
    assert settings.sources == {
        "parallel": "command line --parallel",
        "queue": "environment STRATA_QUEUE",
        "port": "/etc/strata.toml port",
    }


def test_a_plugins_settings_come_from_the_same_sources() -> None:
    assert effective(environ={"STRATA_COLD_MIB": "7"}).plugin(CacheSettings) == CacheSettings(cold_mib=7)
    assert effective().plugin(CacheSettings) == CacheSettings(cold_mib=1)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"command_line": {"paralel": "2"}}, "command line --paralel: there is no setting 'paralel'; did you mean par"),
        ({"environ": {"STRATA_PARALEL": "2"}}, "environment STRATA_PARALEL: .*did you mean parallel"),
        ({"file": {"paralel": 2}}, "/etc/strata.toml paralel: .*did you mean parallel"),
        ({"file": {"tables": {"port": 1}}}, "/etc/strata.toml tables: there is no setting 'tables'"),
    ],
)
def test_unknown_names_are_errors_that_name_the_source_and_suggest(sources: dict[str, dict], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        effective(**sources)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"command_line": {"port": "x"}}, "command line --port: 'x' is not a whole number"),
        ({"environ": {"STRATA_PORT": "70000"}}, "environment STRATA_PORT: 70000 is more than 65535"),
        ({"file": {"port": "x"}}, "/etc/strata.toml port: 'x' is not a whole number"),
        ({"file": {"port": [80]}}, "/etc/strata.toml port: "),
    ],
)
def test_unreadable_values_are_errors_that_name_source_and_key(sources: dict[str, dict], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        effective(**sources)


def test_a_value_that_another_source_overrides_is_checked_nevertheless() -> None:
    with pytest.raises(SettingsError, match="STRATA_PORT"):
        effective({"port": "1"}, {"STRATA_PORT": "x"})


@pytest.mark.parametrize(
    "sources",
    [
        {"command_line": {"disk_mib": "5", "spill_mib": "6"}},
        {"environ": {"STRATA_COLD_MIB": "5", "STRATA_DISK_MIB": "6"}},
        {"file": {"cold_mib": 5, "spill_mib": 6}},
        {"file": {"cold-mib": 5, "cold_mib": 6}},
    ],
)
def test_two_names_of_one_setting_with_different_values_are_an_error(sources: dict[str, dict]) -> None:
    with pytest.raises(SettingsError, match=r"different values: (5 and 6|6 and 5)"):
        effective(**sources)


def test_two_names_of_one_setting_with_the_same_value_are_fine() -> None:
    assert effective({"disk_mib": "5", "spill_mib": "5"}).plugin(CacheSettings).cold_mib == 5


def test_names_in_different_sources_follow_precedence() -> None:
    assert effective({"disk_mib": "5"}, {"STRATA_SPILL_MIB": "6"}).plugin(CacheSettings).cold_mib == 5


def test_an_empty_variable_counts_as_not_set() -> None:
    assert effective(environ={"STRATA_PORT": ""}, file={"port": 7}).port == 7


def test_variables_that_are_no_settings_are_left_alone() -> None:
    assert effective(environ={"STRATA_HOME": "/x", "STRATA_CONFIG": "/y", "PATH": "/z"}) == effective()


def test_a_switch_variable_sets_its_word_and_contradicts_another_value() -> None:
    assert effective(environ={"STRATA_NO_LARGEPAGES": "1"}).large_pages == "off"
    assert effective(environ={"STRATA_NO_LARGEPAGES": "0"}).large_pages == "auto"
    with pytest.raises(SettingsError, match="STRATA_LARGE_PAGES and environment STRATA_NO_LARGEPAGES"):
        effective(environ={"STRATA_NO_LARGEPAGES": "1", "STRATA_LARGE_PAGES": "require"})


def test_a_secret_never_appears_in_an_error() -> None:
    for file in ({"api_key": 12345}, {"api_key": ["12345"], "api-key": ["54321"]}):
        with pytest.raises(SettingsError) as caught:
            effective(file=file)
        assert "12345" not in str(caught.value)


def test_lists_come_as_array_or_comma_separated_and_array_items_are_taken_whole() -> None:
    assert effective(file={"api_key": ["a,b", "c"]}).api_key == ("a,b", "c")
    assert effective(environ={"STRATA_API_KEY": "a, b"}).api_key == ("a", "b")


def test_relative_paths_in_the_file_are_relative_to_it() -> None:
    assert effective(file={"api_key_file": "keys"}).api_key_file == Path("/etc/keys")
    assert effective(file={"api_key_file": "/keys"}).api_key_file == Path("/keys")
    assert effective(environ={"STRATA_API_KEY_FILE": "keys"}).api_key_file == Path("keys")


def test_peeking_reads_the_wanted_settings_and_leaves_the_rest_unjudged() -> None:
    found = peek(
        ["plugins", "disable_plugins"],
        CORE,
        command_line={},
        environ={"STRATA_PLUGINS": "a,b", "STRATA_UNKNOWN": "1", "STRATA_PORT": "x"},
        config=ConfigFile(Path("/etc/strata.toml"), {"plugins": ["c"], "disable-plugins": ["d"], "whatever": 1}),
    )
    assert found == {"plugins": ("a", "b"), "disable_plugins": ("d",)}


def test_the_file_is_the_named_one_else_the_first_that_exists(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "user")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "strata.toml").write_text(f"port = {number}")
    named = tmp_path / "named.toml"
    named.write_text("port = 9")

    def port(explicit: Path | None, environ: dict[str, str], places: list[Path]) -> object:
        found = find_config(explicit, environ, places)
        return found and found.values["port"]

    assert port(named, {"STRATA_CONFIG": str(folders[0] / "strata.toml")}, folders) == 9
    assert port(None, {"STRATA_CONFIG": str(named)}, folders) == 9
    assert port(None, {}, folders) == 0
    (folders[0] / "strata.toml").unlink()
    assert port(None, {}, folders) == 1
    assert port(None, {}, folders[:1]) is None


def test_a_named_file_that_is_missing_is_an_error_that_says_who_named_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--config: there is no file"):
        find_config(tmp_path / "x", {}, [])
    with pytest.raises(SettingsError, match="STRATA_CONFIG: there is no file"):
        find_config(None, {"STRATA_CONFIG": str(tmp_path / "x")}, [])


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"port = 1\nport = 2", b"a = " + b"[" * 5000])
def test_a_file_that_is_not_toml_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "strata.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"strata\.toml: "):
        find_config(path, {}, [])


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "strata.toml"
    path.write_bytes(b"\xef\xbb\xbfport = 7\n")
    config = find_config(path, {}, [])
    assert config is not None and config.values == {"port": 7}


def test_a_name_of_the_models_table_stands_for_its_path() -> None:
    file: dict[str, object] = {"models": {"mine": "sub/m.gguf", "far": "/far/folder"}, "model": "mine"}
    settings = effective(file=file)
    assert (settings.model, settings.sources["model"]) == ("/etc/sub/m.gguf", "/etc/strata.toml model")
    assert effective({"model": "far"}, file=file).model == "/far/folder"
    assert effective({"model": "other"}, file=file).model == "other"
    named_default = effective(file={"models": {"default": "d.gguf"}})
    assert (named_default.model, named_default.sources["model"]) == ("/etc/d.gguf", "/etc/strata.toml models.default")
    assert effective(file={"models": {}}).model == "default"


@pytest.mark.parametrize("table", ["x.gguf", {"mine": 3}, {"mine": ""}])
def test_a_models_table_that_is_none_is_an_error(table: object) -> None:
    with pytest.raises(SettingsError, match=r"/etc/strata\.toml models"):
        effective(file={"models": table})
