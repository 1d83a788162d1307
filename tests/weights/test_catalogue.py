"""Finding installed models, and the folders they are looked for in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strata_core import paths
from strata_core.errors import NotFound
from strata_core.weights.catalogue import DEFAULT_FILE, installed, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("b.Q4_1.gguf", "a.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", ".x.gguf", "c.txt"):
        (models / name).write_bytes(b"x" * 10)
    return models


def test_models_are_listed_by_name_and_sets_of_files_once(folder: Path) -> None:
    found = [(model.name, model.path.name, model.size) for model in installed(folder)]
    assert found == [
        ("a", "a.gguf", 10), ("b.Q4_1", "b.Q4_1.gguf", 10), ("big", "big-00001-of-00002.gguf", 20),
    ]  # fmt: skip
    assert installed(folder / "none") == []


@pytest.mark.parametrize("name", ["b.Q4_1", "b.Q4_1.gguf"])
def test_installed_models_are_found_by_name(folder: Path, name: str) -> None:
    assert resolve(name, folder) == folder / "b.Q4_1.gguf"


def test_sets_and_paths_are_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("big", folder) == folder / "big-00001-of-00002.gguf"
    (tmp_path / "mine.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("./mine.gguf", folder) == Path("mine.gguf")
    assert resolve(str(tmp_path / "mine.gguf"), folder) == tmp_path / "mine.gguf"


def test_what_is_not_found_says_where_was_looked_and_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="strata models pull default") as caught:
        resolve("llama-9", folder)
    for part in ("'llama-9'", str(folder), "a, b.Q4_1, big"):
        assert part in caught.value.message
    with pytest.raises(NotFound, match=r"default model is not installed .*strata models pull default"):
        resolve("default", folder)
    with pytest.raises(NotFound, match="is a folder without a model"):
        resolve(str(tmp_path), folder)


def test_folders_are_models_where_they_have_a_configuration_and_weights(folder: Path) -> None:
    for name in "plain", "maker/inner", "no-weights", ".hidden":
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        if name != "no-weights":
            (folder / name / "model.safetensors").write_bytes(b"x" * 7)
    found = {model.name: model for model in installed(folder)}
    assert found.keys() == {"a", "b.Q4_1", "big", "plain", "maker/inner"}
    assert (found["maker/inner"].path, found["maker/inner"].size) == (folder / "maker/inner", 7)
    assert resolve("maker/inner", folder) == resolve(str(folder / "maker/inner"), folder) == folder / "maker/inner"
    assert resolve("plain", folder) == folder / "plain"


def test_default_means_the_default_file(folder: Path) -> None:
    (folder / DEFAULT_FILE).touch()
    assert resolve("default", folder) == folder / DEFAULT_FILE


FOLDERS = ("data_home", "cache_home", "config_home", "models_dir")


def folders() -> list[str]:
    return [getattr(paths, name)().as_posix() for name in FOLDERS]


def test_strata_home_holds_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    home = tmp_path.as_posix()
    assert folders() == [home, f"{home}/cache", home, f"{home}/models"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATA_HOME", "here")
    assert paths.data_home() == tmp_path / "here"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX places")
def test_each_platform_has_its_own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("STRATA_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path.as_posix()
    monkeypatch.setattr(sys, "platform", "linux")
    data = f"{home}/.local/share/strata"
    assert folders() == [data, f"{home}/.cache/strata", f"{home}/.config/strata", f"{data}/models"]
    monkeypatch.setattr(sys, "platform", "darwin")
    data = f"{home}/Library/Application Support/strata"
    assert folders() == [data, f"{home}/Library/Caches/strata", data, f"{data}/models"]
    monkeypatch.setattr(sys, "platform", "win32")
    data = f"{home}/AppData/Local/strata"
    assert folders() == [data, f"{data}/cache", data, f"{data}/models"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX places")
def test_xdg_variables_are_followed_when_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STRATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "/srv/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert paths.data_home() == Path("/srv/data/strata")
    assert paths.cache_home() == tmp_path / ".cache/strata"
