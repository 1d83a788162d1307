from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from strata_core.errors import PluginError
from strata_core.events import LevelWarning
from strata_core.plugins import DEFAULT_PLUGINS, PluginInfo, Plugins

Write = Callable[[str, str], EntryPoint]
EVENT = LevelWarning(level="cold", message="slow")
BACKEND = """
    @hookimpl
    def strata_register_backends(register):
        from strata_core.compute.base import BackendFactory, Probe
        register(BackendFactory({name!r}, {priority}, lambda: {probe}, lambda options: None))
"""
BUILTIN = ("strata_core.memory.plugin",)


def load(*points: EntryPoint, **arguments: object) -> Plugins:
    return Plugins.load({}, builtin=BUILTIN, entry_points=points, **arguments)  # type: ignore[arg-type]


def info(plugins: Plugins, name: str) -> PluginInfo:
    return next(line for line in plugins.listing() if line.name == name)


def test_a_good_plugin_is_active_and_its_hooks_are_listed(plugin_module: Write) -> None:
    plugins = load(plugin_module("good", BACKEND.format(name="fast", priority=10, probe="Probe(True, 'here')")))
    assert info(plugins, "good") == PluginInfo("good", None, None, "active", None, ("strata_register_backends",))
    assert plugins.choose_backend().name == "fast"


def test_built_in_features_are_plugins_with_this_distribution() -> None:
    plugins = Plugins.load({}, entry_points=())
    assert len(plugins.listing()) == len(DEFAULT_PLUGINS)
    assert {(line.distribution, line.status) for line in plugins.listing()} == {("strata-engine", "active")}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_library_that_is_not_here", "ModuleNotFoundError"),
        ("raise SystemExit('no')", "SystemExit: no"),
        ("def broken(:", "SyntaxError"),
        ("@hookimpl\ndef strata_registr_levels(register): ...", "strata_registr_levels"),
        ("@hookimpl\ndef strata_observe(happening): ...", "happening"),
    ],
    ids=["import", "exit", "syntax", "unknown hook", "unknown parameter"],
)
def test_a_plugin_that_cannot_load_fails_alone(plugin_module: Write, source: str, reason: str) -> None:
    broken = plugin_module("broken", source)
    good = plugin_module("good", BACKEND.format(name="fast", priority=1, probe="Probe(True, '')"))
    plugins = load(broken, good)
    assert info(plugins, "broken").status == "failed"
    assert reason in (info(plugins, "broken").error or "")
    assert list(plugins.backends()) == ["fast"]
    plugins.observe(EVENT)


def test_a_plugin_that_was_asked_for_and_cannot_load_is_an_error_with_the_reason(plugin_module: Write) -> None:
    broken = plugin_module("broken", "import a_library_that_is_not_here")
    with pytest.raises(PluginError, match=r"'broken' failed: ModuleNotFoundError: .*a_library_that_is_not_here"):
        load(broken, requested=["broken"])


def test_a_plugin_that_was_asked_for_and_is_not_installed_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"'nowhere\.at_all' failed: there is no installed plugin and no module"):
        load(requested=["nowhere.at_all"])


def test_a_module_that_was_asked_for_is_loaded_without_an_entry_point(plugin_module: Write) -> None:
    plugin_module("extra", BACKEND.format(name="fast", priority=1, probe="Probe(True, '')"))
    plugins = Plugins.load({"STRATA_PLUGINS": "extra"}, builtin=(), entry_points=())
    assert list(plugins.backends()) == ["fast"]


def test_an_installed_plugin_may_be_asked_for_by_its_module(plugin_module: Write) -> None:
    plugin_module("extra", "")
    plugins = load(EntryPoint("short", "extra", "strata"), requested=["extra"])
    assert [line.name for line in plugins.listing()] == ["memory", "short"]


def test_a_blocked_plugin_is_not_even_imported(plugin_module: Write) -> None:
    broken = plugin_module("broken", "raise RuntimeError('imported')")
    plugins = Plugins.load({"STRATA_DISABLE_PLUGINS": "broken, ghost"}, builtin=BUILTIN, entry_points=[broken])
    assert info(plugins, "broken") == PluginInfo("broken", None, None, "blocked", None, ())
    assert info(plugins, "ghost").error == "no plugin of this name is installed"


def test_asking_for_a_blocked_plugin_is_an_error(plugin_module: Write) -> None:
    with pytest.raises(PluginError, match="'good' is both asked for and disabled"):
        load(plugin_module("good", ""), requested=["good"], blocked=["good"])


def test_two_plugins_of_one_name_are_reported_with_both_and_the_first_stays(plugin_module: Write) -> None:
    plugins = load(plugin_module("memory", "@hookimpl\ndef strata_observe(event): ..."))
    first, second = plugins.listing()
    assert (first.status, second.status) == ("active", "failed")
    assert "'memory' (strata-engine" in (second.error or "")
    assert plugins.choose_memory().name


def test_one_module_under_two_names_fails_the_second_and_leaves_the_first(plugin_module: Write) -> None:
    plugin_module("good", BACKEND.format(name="fast", priority=1, probe="Probe(True, '')"))
    plugins = load(EntryPoint("one", "good", "strata"), EntryPoint("two", "good", "strata"))
    assert (info(plugins, "one").status, info(plugins, "two").status) == ("active", "failed")
    assert list(plugins.backends()) == ["fast"]


def test_a_registration_that_raises_registers_nothing_and_harms_nobody(plugin_module: Write) -> None:
    half = BACKEND.format(name="half", priority=5, probe="Probe(True, '')") + "        raise ValueError('then this')\n"
    good = plugin_module("good", BACKEND.format(name="fast", priority=1, probe="Probe(True, '')"))
    plugins = load(plugin_module("half", half), good)
    assert list(plugins.backends()) == ["fast"]
    assert info(plugins, "half").error == "ValueError: then this"


def test_a_registration_that_raises_is_an_error_when_the_plugin_was_asked_for(plugin_module: Write) -> None:
    half = plugin_module("half", "@hookimpl\ndef strata_register_levels(register): raise ValueError('no room')")
    plugins = load(half, requested=["half"])
    with pytest.raises(PluginError, match="'half' failed: ValueError: no room"):
        plugins.levels()


def test_a_failed_plugin_loses_what_it_had_registered_before(plugin_module: Write) -> None:
    source = BACKEND.format(name="fast", priority=9, probe="Probe(True, '')") + (
        "\n    @hookimpl\n    def strata_observe(event):\n        raise ValueError('observed')\n"
    )
    plugins = load(plugin_module("mixed", source))
    assert list(plugins.backends()) == ["fast"]
    plugins.observe(EVENT)
    assert plugins.backends() == {}
    assert info(plugins, "mixed").error == "ValueError: observed"


def test_two_backends_of_one_name_name_both_plugins(plugin_module: Write) -> None:
    source = BACKEND.format(name="fast", priority=1, probe="Probe(True, '')")
    plugins = load(plugin_module("one", source), plugin_module("two", source))
    assert plugins.backends()["fast"].priority == 1
    assert info(plugins, "two").error == "backend 'fast' of plugin 'two' is already registered by plugin 'one'"


def test_two_families_for_one_architecture_name_both_plugins(plugin_module: Write) -> None:
    source = """
        @hookimpl
        def strata_register_families(register):
            from strata_core.models.base import Family
            register(Family(__name__ + "-family", ("qwen9",), lambda source, backend, options: None))
    """
    plugins = load(plugin_module("one", source), plugin_module("two", source))
    assert list(plugins.families()) == ["one-family"]
    error = info(plugins, "two").error or ""
    assert "'architecture qwen9' of plugin 'two' is already registered by plugin 'one'" in error


def test_levels_come_in_the_order_of_their_rank(plugin_module: Write) -> None:
    source = """
        @hookimpl
        def strata_register_levels(register):
            from strata_core.store.base import LevelFactory
            register(LevelFactory("cold", 20, lambda context: None))
            register(LevelFactory("warm", 10, lambda context: None))
    """
    assert list(load(plugin_module("tiers", source)).levels()) == ["warm", "cold"]


@pytest.mark.parametrize(("probe", "reason"), [("1 / 0", "ZeroDivisionError"), ("None", "returned None")])
def test_a_broken_probe_fails_its_plugin_and_the_next_backend_is_taken(
    plugin_module: Write, probe: str, reason: str
) -> None:
    broken = plugin_module("broken", BACKEND.format(name="gpu", priority=20, probe=probe))
    good = plugin_module("good", BACKEND.format(name="fast", priority=1, probe="Probe(True, '')"))
    plugins = load(broken, good)
    assert plugins.choose_backend("auto").name == "fast"
    assert reason in (info(plugins, "broken").error or "")
    with pytest.raises(PluginError, match=f"no backend 'gpu'.*broken .*{reason}"):
        plugins.choose_backend("gpu")


def test_a_backend_that_is_not_usable_is_skipped_and_is_an_error_only_by_name(plugin_module: Write) -> None:
    absent = plugin_module("absent", BACKEND.format(name="gpu", priority=20, probe="Probe(False, 'no device')"))
    good = plugin_module("good", BACKEND.format(name="fast", priority=1, probe="Probe(True, '')"))
    plugins = load(absent, good)
    assert plugins.choose_backend("auto").name == "fast"
    assert info(plugins, "absent").status == "active"
    with pytest.raises(PluginError, match="backend 'gpu' cannot be used here: no device"):
        plugins.choose_backend("gpu")


def test_without_a_usable_backend_every_reason_is_given(plugin_module: Write) -> None:
    plugins = load(plugin_module("absent", BACKEND.format(name="gpu", priority=20, probe="Probe(False, 'no device')")))
    with pytest.raises(PluginError, match=r"no backend can be used here \(gpu: no device\)"):
        plugins.choose_backend("auto")


def test_an_observer_that_raises_is_left_out_and_the_others_still_see_everything(plugin_module: Write) -> None:
    bad = plugin_module(
        "bad", "calls = []\n@hookimpl\ndef strata_observe(event):\n    calls.append(event)\n    raise KeyError('x')"
    )
    good = plugin_module("good", "calls = []\n@hookimpl\ndef strata_observe(event): calls.append(event)")
    plugins = load(bad, good)
    plugins.observe(EVENT)
    plugins.observe(EVENT)
    assert len(bad.load().calls) == 1
    assert good.load().calls == [EVENT, EVENT]
    assert info(plugins, "bad").error == "KeyError: 'x'"


ADMIT = """
    import strata_core.conversations.placement as rules
    from strata_core.hookspecs import hookimpl
    @hookimpl{options}
    def strata_admit(placement): return {answer}
"""


def test_admission_takes_the_first_answer_and_asks_trylast_rules_last(plugin_module: Write) -> None:
    placement = object()
    refuse = "rules.Verdict(rules.Action.REFUSE, __name__)"
    last = plugin_module("last", ADMIT.format(options="(trylast=True)", answer=refuse))
    silent = plugin_module("silent", ADMIT.format(options="", answer="None"))
    broken = plugin_module("broken", ADMIT.format(options="(tryfirst=True)", answer="1 / 0"))
    # Loaded last, the trylast rule would be asked first if order of loading decided.
    plugins = load(silent, broken, last)
    assert plugins.admit(placement).reason == "last"  # type: ignore[arg-type]
    assert info(plugins, "broken").status == "failed"
    eager = plugin_module("eager", ADMIT.format(options="", answer=refuse))
    assert load(last, silent, eager).admit(placement).reason == "eager"  # type: ignore[arg-type]


def test_placements_that_nobody_decides_are_an_error() -> None:
    with pytest.raises(PluginError, match="'conversations'"):
        Plugins.load({}, builtin=(), entry_points=()).admit(object())  # type: ignore[arg-type]


def test_hook_calls_are_traced_on_request(plugin_module: Write, capsys: pytest.CaptureFixture[str]) -> None:
    good = plugin_module("good", "@hookimpl\ndef strata_observe(event): ...")
    Plugins.load({"STRATA_TRACE_HOOKS": "1"}, builtin=(), entry_points=[good]).observe(EVENT)
    assert "strata_observe" in capsys.readouterr().err
    Plugins.load({"STRATA_TRACE_HOOKS": "0"}, builtin=(), entry_points=[good]).observe(EVENT)
    assert capsys.readouterr().err == ""
