from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from strata_core.cli.app import Application, early_options
from strata_core.cli.client import server_address, server_key
from strata_core.cli.lazy import LazyGroup
from strata_core.cli.options import resolve, settings_options
from strata_core.errors import PluginError
from strata_core.settings import CORE, Kind, Settings
from strata_core.settings.schema import flag_of

Run = Callable[..., Result]
Write = Callable[[str, str], EntryPoint]


def run_dummy(*arguments: str, only: tuple[str, ...] | None = None, **environ: str) -> tuple[Result, Settings | None]:
    found: list[Settings] = []

    @click.command()
    @click.argument("prompt", default="")
    @click.pass_context
    def dummy(ctx: click.Context, prompt: str) -> None:
        found.append(resolve(ctx))

    app = Application(arguments, environ)
    result = CliRunner().invoke(settings_options(dummy, only=only), list(arguments), obj=app)
    return result, found[0] if found else None


def test_help_of_a_command_with_settings_lists_every_setting_in_its_section() -> None:
    result, _ = run_dummy("--help")
    words = result.output.replace("/", " ").split()
    for section, specs in CORE.sections().items():
        assert f"{section}:" in result.output
        for spec in specs:
            assert spec.flag in words
            if spec.kind is Kind.BOOL:
                assert flag_of("no_" + spec.name) in words


def test_options_become_settings() -> None:
    arguments = ["--port", "0", "--no-conversation-cache", "--api-key", "a,b", "--api-key", "c", "hello", "--seed=5"]
    result, settings = run_dummy(*arguments)
    assert (result.exit_code, result.output) == (0, "")
    assert settings is not None
    assert (settings.port, settings.conversation_cache, settings.api_key, settings.seed) == (
        0,
        False,
        ("a", "b", "c"),
        5,
    )
    assert set(settings.sources) == {"port", "conversation_cache", "api_key", "seed"}


def test_settings_that_a_command_ignores_give_no_options() -> None:
    result, settings = run_dummy("--port", "1", only=("port",))
    assert settings is not None
    assert (result.exit_code, settings.port) == (0, 1)
    result, _ = run_dummy("--queue", "1", only=("port",))
    assert result.exit_code == 2
    assert "--queue" in result.output


@pytest.mark.parametrize(
    ("url", "host", "address"),
    [
        ("http://example:9/v1/", "10.0.0.1", "http://example:9"),
        (None, "127.0.0.1", "http://127.0.0.1:8080"),
        (None, "0.0.0.0", "http://127.0.0.1:8080"),
        (None, "::", "http://[::1]:8080"),
        (None, "10.0.0.1", "http://10.0.0.1:8080"),
    ],
)
def test_clients_look_for_the_server_where_the_settings_have_it_listen(
    url: str | None, host: str, address: str
) -> None:
    assert server_address(url, Settings(host=host)) == address


def test_clients_take_their_key_from_the_key_file_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the house\nsesame\n")
    assert server_key(Settings(api_key_file=tmp_path / "keys")) == "sesame"
    assert server_key(Settings()) is None


def test_early_options_are_found_anywhere_before_the_double_dash() -> None:
    arguments = ["--config=a", "serve", "--plugins", "b", "--plugins=c", "--", "--config", "d"]
    assert early_options(arguments) == {"config": ["a"], "plugins": ["b", "c"]}
    assert early_options(["serve", "--config"]) == {}


def test_a_reported_error_is_one_line_and_its_own_status(strata: Run) -> None:
    result = strata("settings", "--port", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "strata: error: command line --port: 'x' is not a whole number\n"


@pytest.mark.parametrize(
    "arguments", [("--plugins", "no_such_module", "settings"), ("settings", "--plugins=no_such_module")]
)
def test_a_plugin_asked_for_anywhere_on_the_command_line_must_load(strata: Run, arguments: tuple[str, ...]) -> None:
    result = strata(*arguments)
    assert result.exit_code == 6
    assert "'no_such_module' failed" in result.stderr


def test_settings_shows_values_and_where_they_come_from(strata: Run, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text('queue = 5\napi_key = "hunter2"\n')
    shown = json.loads(strata("settings", "--json", "--config", str(config), "--port", "1", STRATA_SEED="3").stdout)
    assert set(shown) >= {spec.name for spec in CORE}  # and those of plugins that happen to be installed
    assert shown["queue"] == {"value": "5", "source": f"{config} queue"}
    assert shown["port"] == {"value": "1", "source": "command line --port"}
    assert shown["seed"] == {"value": "3", "source": "environment STRATA_SEED"}
    assert shown["parallel"] == {"value": "4", "source": "default"}
    assert shown["api_key"]["value"] == "(hidden)"
    table = strata("settings", "--config", str(config)).stdout
    assert "hunter2" not in table
    assert any(line.split() == ["queue", "5", str(config), "queue"] for line in table.splitlines())


def test_a_file_in_the_working_folder_is_used(strata: Run) -> None:
    Path("strata.toml").write_text("queue = 9")
    assert json.loads(strata("settings", "--json").stdout)["queue"]["value"] == "9"


PLUGIN = """
    import attrs, click
    from strata_core.settings import setting
    @attrs.frozen(kw_only=True)
    class Own:
        brew: int = setting(3, section="Tea", help="Minutes.")
    @hookimpl
    def strata_register_settings(register): register(Own)
    @hookimpl
    def strata_register_commands(cli):
        @cli.command()
        def kettle():
            "Boil water."
            click.echo("whistle")
"""


def test_a_plugin_brings_commands_options_and_keys(strata: Run, plugin_module: Write) -> None:
    plugin_module("tea", PLUGIN)
    assert strata("--plugins", "tea", "kettle").stdout == "whistle\n"
    assert "Boil water." in strata("--help", STRATA_PLUGINS="tea").stdout
    assert "--brew N" in strata("settings", "--help", "--plugins", "tea").stdout
    Path("strata.toml").write_text('plugins = ["tea"]\nbrew = 4\n')
    assert json.loads(strata("settings", "--json").stdout)["brew"] == {"value": "4", "source": "strata.toml brew"}
    assert json.loads(strata("settings", "--json", "--brew", "5").stdout)["brew"]["value"] == "5"
    refused = strata("settings", "--disable-plugins", "tea", "--plugins", "")
    assert (refused.exit_code, "there is no setting 'brew'" in refused.stderr) == (2, True)


def test_a_plugin_cannot_take_the_name_of_a_command(strata: Run, plugin_module: Write) -> None:
    plugin_module("thief", "@hookimpl\ndef strata_register_commands(cli): cli.add_lazy('serve', 'thief:x', 'Mine.')")
    result = strata("--help", STRATA_PLUGINS="thief")
    assert result.exit_code == 6
    assert "'thief' failed: command 'serve' is already there: strata_core.cli.serve:serve" in result.stderr


def test_a_command_cannot_replace_another_one_in_a_group() -> None:
    group = LazyGroup("x")
    group.add_command(click.Command("a", callback=lambda: None))
    with pytest.raises(PluginError, match=r"command 'a' is already there: .*test_command_line"):
        group.add_command(click.Command("a"))


def test_plugins_lists_status_hooks_and_backends(strata: Run, plugin_module: Write) -> None:
    plugin_module("tea", PLUGIN)
    shown = json.loads(strata("--plugins", "tea", "--disable-plugins=ghost", "plugins", "--json").stdout)
    lines = {line["name"]: line for line in shown["plugins"]}
    assert lines["tea"]["hooks"] == ["strata_register_commands", "strata_register_settings"]
    assert lines["memory"]["distribution"] == "strata-engine"
    assert lines["ghost"]["status"] == "blocked"
    table = strata("plugins", STRATA_PLUGINS="tea").stdout
    assert any(line.split()[:2] == ["tea", "active"] for line in table.splitlines())
    for backend in shown["backends"]:
        assert backend["name"] in table


def test_help_imports_none_of_the_heavy_libraries() -> None:
    code = """
import sys
from strata_core.cli import main
try:
    main(["--help"])
except SystemExit as error:
    assert error.code == 0
heavy = ("numpy", "flask", "tokenizers", "jinja2", "gunicorn", "psutil", "rich")
print([name for name in heavy if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert "serve" in run.stdout
