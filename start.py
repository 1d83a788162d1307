#!/usr/bin/env python3
"""Runs Strata from a checkout on a machine that has only Python 3.10 or newer.

    python3 start.py serve [options of strata serve]     serve a model (the default one unless --model names another)
    python3 start.py test [options of pytest]            run the tests
    python3 start.py COMMAND [options]                   any other command: chat, setup, models, inspect, plugins ...

The first run makes ``.venv`` beside this file and installs Strata there, with every plugin under ``plugins/`` that this
machine can use; later runs install again only when a ``pyproject.toml`` has changed. Deleting ``.venv`` starts afresh.
Packages come through pip with your own pip settings.

A plugin says in its ``pyproject.toml`` where it can be used; without the table it is used everywhere::

    [tool.strata]
    platforms = ["linux", "win32"]      # values of sys.platform
    machines = ["x86_64", "AMD64"]      # values of platform.machine()
    requires = ["/dev/nvidiactl"]       # files of which one must exist, or names of which one must be a program on PATH

This file needs nothing but the standard library.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = "strata-installed"


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - run by whatever Python a user has
        return complain(f"Strata needs Python 3.10 or newer; this is {platform.python_version()} ({sys.executable})")
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    command, *rest = arguments
    try:
        make_venv()
        install(testing=command == "test")
        if needs_default_model(command, rest):
            run([*program("strata"), "models", "pull", "default"])
    except Failed as failure:
        return complain(str(failure), failure.status)
    if command == "test":
        os.chdir(ROOT)
        return become([str(python()), "-m", "pytest", *rest])
    return become([*program("strata"), command, *rest])


class Failed(Exception):
    """A step did not work; the message says what to do. ``status`` is the exit code."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


def complain(message: str, status: int = 1) -> int:
    print(f"start.py: {message}", file=sys.stderr)
    return status


def say(message: str) -> None:
    print(f"start.py: {message}", file=sys.stderr, flush=True)


def python(venv: Path = VENV) -> Path:
    """The interpreter of the virtual environment."""
    return venv / "Scripts" / "python.exe" if os.name == "nt" else venv / "bin" / "python"


def program(name: str) -> list[str]:
    """How to run a command that is installed in the virtual environment."""
    return [str(python().with_name(f"{name}.exe" if os.name == "nt" else name))]


def make_venv() -> None:
    if python().exists() and (VENV / "pyvenv.cfg").exists():
        return
    say(f"making {VENV}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)  # a half-made one would be taken for a good one next time
        raise Failed(no_venv_message(made.stdout + made.stderr))


def no_venv_message(output: str) -> str:
    """What to tell a user whose Python cannot make virtual environments."""
    if "ensurepip" in output or "No module named venv" in output:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"this Python ({sys.executable}) lacks venv or ensurepip; on Debian and Ubuntu install them with:\n"
            f"    sudo apt install python{version}-venv\n"
            "then run this command again"
        )
    return f"could not make {VENV}:\n{output.strip()}"


def install(testing: bool) -> None:
    """Install core and plugins, editable, unless the stamp says that just that was done."""
    plugins = [folder for folder in plugin_folders() if fits((folder / "pyproject.toml").read_text("utf-8"))]
    stamp = VENV / STAMP
    done = stamp.read_text("utf-8").split() if stamp.exists() else []
    # What was installed for tests also serves; the reverse is not so.
    wanted = [fingerprint([ROOT, *plugins], testing=kind) for kind in ((True,) if testing else (True, False))]
    if any(mark in done for mark in wanted):
        return
    names = ", ".join(["core", *(folder.name for folder in plugins)])
    purpose = " and what its tests need" if testing else ""
    say(f"installing Strata ({names}){purpose}; this can take a few minutes: kernels are compiled for this machine")
    targets = [f"{ROOT}[test]" if testing else str(ROOT), *map(str, plugins)]
    editable = [argument for target in targets for argument in ("--editable", target)]
    stamp.unlink(missing_ok=True)  # until this has worked, nothing is known of what is installed
    run([str(python()), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *editable])
    stamp.write_text(wanted[0] if testing else wanted[-1], "utf-8")


def plugin_folders() -> list[Path]:
    return sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


def fingerprint(folders: Sequence[Path], testing: bool) -> str:
    """Changes with what would be installed: the pyproject files, the place, the Python version, the test extra."""
    digest = hashlib.sha256(f"{testing} {sys.version_info[:2]}".encode())
    for folder in folders:
        digest.update(f"\0{folder}\0".encode() + (folder / "pyproject.toml").read_bytes())
    return digest.hexdigest()


def fits(
    pyproject: str,
    *,
    system: str = sys.platform,
    machine: str = platform.machine(),
    present: Callable[[str], bool] = lambda name: Path(name).exists() if os.sep in name else bool(shutil.which(name)),
) -> bool:
    """Whether this machine can use the plugin of which this is the ``pyproject.toml``; see the text on top.

    :param present: whether a file exists, or a program is on PATH.
    :raises Failed: the table has an entry that this version of Strata does not know, or one that is no list of strings.
    """
    table = strata_table(pyproject)
    unknown = table.keys() - {"platforms", "machines", "requires"}
    if unknown:
        raise Failed(f"a plugin's [tool.strata] table has unknown entries: {', '.join(sorted(unknown))}")
    return (
        system in table.get("platforms", [system])
        and machine in table.get("machines", [machine])
        and ("requires" not in table or any(present(name) for name in table["requires"]))
    )


def strata_table(pyproject: str) -> dict[str, list[str]]:
    """The ``[tool.strata]`` table. Python 3.10 has no TOML parser: this one reads lists of strings, nothing more."""
    match = re.search(r"^\[tool\.strata\][ \t]*(?:#[^\n]*)?$(.*?)(?=^\[|\Z)", pyproject, re.MULTILINE | re.DOTALL)
    if match is None:
        return {}
    body = "\n".join(line for line in match[1].splitlines() if not line.lstrip().startswith("#"))
    entry = re.compile(r"\s*([\w-]+)\s*=\s*(\[[^\]]*\])[ \t]*(?:#[^\n]*)?")
    table: dict[str, list[str]] = {}
    at = 0
    while body[at:].strip():
        found = entry.match(body, at)
        try:
            value = ast.literal_eval(found[2]) if found else None
        except (SyntaxError, ValueError):
            value = None
        if found is None or not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            rest = body[at:].strip()
            raise Failed(f"a plugin's [tool.strata] table has an entry that is no list of strings: {rest!r}")
        table[found[1]] = value
        at = found.end()
    return table


def needs_default_model(command: str, rest: Sequence[str]) -> bool:
    """Whether the command uses the default model: the tests do, and serving without another one."""
    if any(argument in ("-h", "--help") for argument in rest):
        return False
    if command == "serve":
        named = any(re.match(r"--model(=|$)", argument) for argument in rest)
        return not (named or os.environ.get("STRATA_MODEL"))
    return command == "test"


def run(command: Sequence[str]) -> None:
    """Run a step. Its errors and progress bars (standard error) are shown; standard output is the final program's."""
    try:
        nothing = subprocess.DEVNULL
        status = subprocess.run(command, check=False, stdin=nothing, stdout=nothing).returncode
    except OSError as error:
        raise Failed(f"{command[0]} could not be started: {error}") from error
    if status:
        message = f"this failed with exit code {status}: {' '.join(command)}"
        raise Failed(message, status if status > 0 else 128 - status)


def become(command: Sequence[str]) -> int:
    """Run the final program in place of this one, so that signals and the exit code are its own."""
    if os.name != "nt":
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execv(command[0], list(command))
        except OSError as error:
            return complain(f"{command[0]} could not be started: {error}")
    # Windows has no exec that keeps the console: wait instead. Ctrl+C reaches the child too, so let it decide.
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
