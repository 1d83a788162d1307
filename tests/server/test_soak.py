"""What a server holds after many clients came and went, through the same command that measures it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


def soak(*arguments: str) -> None:
    done = subprocess.run([sys.executable, str(SOAK), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_shots_hang_ups_and_cancels_leave_nothing_behind_and_disturb_no_one() -> None:
    soak("--one-shots", "20", "--hang-ups", "15", "--cancels", "8", "--reply", "120", "--budget", "4")


@pytest.mark.slow
def test_hundreds_of_one_shots_hang_ups_and_cancels_leave_nothing_behind_and_disturb_no_one() -> None:
    soak()


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_serves_on_through_one_shots_hang_ups_and_cancels(default_model_path: Path) -> None:
    soak("--model", str(default_model_path), "--one-shots", "40", "--hang-ups", "20", "--cancels", "10")
