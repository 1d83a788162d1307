"""How far the logits of every family are from those of transformers, however the prompt came to be in the model.

    python bench/parity.py [--backend NAME] [--all] [--family NAME ...]

Each family is a tiny model with random weights, saved as a folder that both read, computed by transformers in float32
and by the backend with float32 K/V. Columns, each the largest difference of any logit:

* full: the prompt read at once; chunked: in chunks of 2, 7 and 19; stepwise: token by token;
* resumed: from the stored bytes of pages and state, at three positions; batched: beside others that read and decode;
* parked: a conversation parked to the cold level's files, the engine closed, the second turn resumed from
  them by another engine.

``--all`` takes further variants of the families (tied embeddings, rope scaling, routing ...). Needs the extra
``oracle``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

from parity import CASES, COLUMNS, TOLERANCE, Case, Pair

from strata_core.plugins import Plugins


def measure(case: Case, plugins: Plugins, backend: str) -> list[float]:
    """The columns of one model."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair.make(case, Path(folder), plugins, backend)
        return [column(pair) for column in COLUMNS.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy", help="which computes our side (default: numpy, the reference)")
    parser.add_argument("--all", action="store_true", help="also variants of families")
    parser.add_argument("--family", action="append", default=[], help="only these; may be repeated")
    args = parser.parse_args()
    known = {case.name for case in CASES}
    if not known.issuperset(args.family):
        parser.error(f"no family {sorted(set(args.family) - known)[0]!r}; there are {', '.join(sorted(known))}")

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plugins = Plugins.load()
    chosen = [case for case in CASES if case.name in args.family or (not args.family and (args.all or case.plain))]
    title = f"largest difference from transformers' logits, backend {args.backend}, bar {TOLERANCE:g}"
    table = Table("family", *COLUMNS, "", title=title, title_justify="left")
    for column in table.columns:
        column.no_wrap = True
    missed = False
    for case in track(chosen, "comparing", console=Console(stderr=True), transient=True):
        differences = measure(case, plugins, args.backend)
        met = max(differences) <= TOLERANCE
        missed |= not met
        table.add_row(case.name, *(f"{number:.1e}" for number in differences), "met" if met else "MISSED")
    # Without a terminal the width is a guess that would break the rows.
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
