"""What users and plugin authors can rely on is documented, and what is documented exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import attrs
import pytest

from strata_core import events, hookspecs
from strata_core.settings import CORE
from strata_core.settings.docs import options_page

ROOT = Path(__file__).parents[2]
HOOKS = {
    name: function
    for name, function in vars(hookspecs).items()
    if inspect.isfunction(function) and name.startswith("strata_")
}
HOOKS_PAGE = (ROOT / "docs/hooks.md").read_text(encoding="utf-8")


def test_the_options_page_is_what_the_settings_table_gives() -> None:
    written = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert written == options_page(), "run: python -m strata_core.settings.docs docs/options.md"


def test_the_options_page_has_every_name_of_every_setting() -> None:
    words = set(re.findall(r"[\w-]+", options_page()))
    for spec in CORE:
        assert {spec.flag, spec.env, spec.name, *spec.env_switches} <= words


def test_every_hook_has_a_section_with_its_parameters_and_no_other_hook_is_described() -> None:
    sections = dict(re.findall(r"^## `(strata_\w+)\((\w+)\)`$", HOOKS_PAGE, re.MULTILINE))
    assert sections == {name: ", ".join(inspect.signature(function).parameters) for name, function in HOOKS.items()}


def test_every_hook_is_in_the_table_of_calls() -> None:
    assert set(re.findall(r"^\| `(strata_\w+)` \|", HOOKS_PAGE, re.MULTILINE)) == set(HOOKS)


def test_there_are_at_most_a_dozen_hooks_and_each_says_when_it_is_called_and_what_it_takes() -> None:
    assert len(HOOKS) <= 12
    for name, function in HOOKS.items():
        text = inspect.getdoc(function) or ""
        assert "Called " in text, name
        assert "Plugins may implement this" in " ".join(text.split()), name
        for parameter in inspect.signature(function).parameters:
            assert f":param {parameter}:" in text, name


def test_every_event_is_named_on_the_hooks_page() -> None:
    for name, value in vars(events).items():
        if inspect.isclass(value) and attrs.has(value):
            assert f"`{name}`" in HOOKS_PAGE


@pytest.mark.parametrize("page", ["hooks.md", "contributing.md"])
def test_python_examples_in_the_documentation_are_python(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)
