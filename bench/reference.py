"""Speed of a backend on one model, called at the level of the model: no server, no scheduler, no sampling.

    python bench/reference.py [--backend numpy] [--model FILE] [--kv TYPE] [--threads N] [--repeat N]

Prints tokens per second of reading a prompt (512 and 2048 tokens in chunks of 512) and of decoding one token at a time
behind 16, 512 and 2048 tokens, the time to load, and the time from start to the first logits.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from strata_core.compute.base import BackendOptions, Batch, PageStore, Span
from strata_core.memory.arena import PortableArena
from strata_core.models.base import Model, ModelOptions
from strata_core.models.load import load_model
from strata_core.plugins import Plugins
from strata_core.weights.catalogue import DEFAULT, resolve
from strata_core.weights.gguf import GGUFFile

PAGE, CHUNK, DECODED = 32, 512, 16


def step(model: Model, stores: list[PageStore], tokens: np.ndarray, start: int, table: np.ndarray) -> np.ndarray:
    """One sequence's next rows, with logits of the last."""
    outputs = np.array([len(tokens) - 1], np.int32)
    return model.forward(Batch(tokens, (Span(start, len(tokens), (table,)),), outputs), stores)


def read(model: Model, stores: list[PageStore], tokens: np.ndarray, table: np.ndarray) -> float:
    """Seconds to read the tokens from position 0 on."""
    began = time.perf_counter()
    for start in range(0, len(tokens), CHUNK):
        step(model, stores, tokens[start : start + CHUNK], start, table)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--model", default=DEFAULT, help="a GGUF file or the name of an installed model")
    parser.add_argument("--kv", help="K/V type; the backend's default if not given")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the machine has cores")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    began = time.perf_counter()
    source = GGUFFile.open(resolve(args.model))
    plugins = Plugins.load()
    backend = plugins.choose_backend(args.backend).create(BackendOptions(threads=args.threads))
    model = load_model(source, backend, plugins.families().values(), ModelOptions())
    loaded = time.perf_counter()
    layout = model.layouts(args.kv or backend.kv_types[0], PAGE)[0]
    pages = layout.pages_for(2048 + DECODED + 1)
    stores = [backend.page_store(layout, pages, PortableArena("off"))]
    stores[0].add_chunk(0)
    table = np.arange(pages, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, model.geometry.vocab, 2048).astype(np.int32)
    step(model, stores, tokens[:16], 0, table)
    print(f"load {loaded - began:.2f} s; first logits {time.perf_counter() - began:.2f} s from start")
    print(f"weights {backend.weight_bytes() / 2**20:.0f} MiB; page {layout.nbytes} bytes ({layout.kv_type})")

    for length in (512, 2048):
        rates = [length / read(model, stores, tokens[:length], table) for _ in range(args.repeat)]
        print(f"prefill {length:5}: {statistics.median(rates):8.1f} tok/s median, {max(rates):8.1f} best")
    for length in (16, 512, 2048):
        read(model, stores, tokens[:length], table)
        rates = []
        for _ in range(args.repeat):
            began = time.perf_counter()
            for i in range(DECODED):
                step(model, stores, tokens[i : i + 1], length + i, table)
            rates.append(DECODED / (time.perf_counter() - began))
        print(f"decode @{length:5}: {statistics.median(rates):8.1f} tok/s median, {max(rates):8.1f} best")


if __name__ == "__main__":
    main()
