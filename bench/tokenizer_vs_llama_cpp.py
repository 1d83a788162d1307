#!/usr/bin/env python3
"""Compares our token ids with llama.cpp's, on texts that this script makes.

    bench/tokenizer_vs_llama_cpp.py MODEL.gguf [--peer PATH] [--golden OUT.json]

The peer is a script that is run as ``PEER MODEL --tokenize TEXTS.json IDS.json [--parse-special]``: it reads a JSON
list of texts and writes a JSON list of id lists, no begin or end token added. Prints the number of texts and of
differences, with and without control tokens parsed; exit status 1 when there is a difference. ``--golden`` also writes
the peer's ids of some of the texts, for the tests to compare with where there is no peer.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from strata_core.tokens import Tokenizer
from strata_core.weights.gguf import GGUFFile

DEFAULT_PEER = Path(__file__).parents[2] / "shared" / "peers" / "llama_cpp_peer.py"

PROSE = (
    "The quick brown fox jumps over the lazy dog. It's what we'd say, isn't it? They'LL've known I'M right.",
    "Hello world! Café déjà vu — 123 😊",
    "naïve façade, coöperation; Ærøskøbing, Łódź, Čeština, Ελληνικά, Русский язык, ქართული, հայերեն",
    "“Quoted” ‘text’ … with – dashes — and «guillemets» § 12 ¶ ½ ⅔ ² № ™ © €100 £5 ¥7",
    "今天天气很好，我们去公园散步吧。日本語の文章も混ぜて、カタカナとひらがな。한국어 문장도 있어요.",
    "สวัสดีชาวโลก हिन्दी में एक वाक्य مرحبا بالعالم שלום עולם ভাষা தமிழ் తెలుగు",
    "mixed 中文 and English混在して、한글English 123中文456",
    "ALLCAPS camelCase PascalCase snake_case kebab-case SCREAMING_SNAKE x2y3z4 v1.2.3-rc.4+build.5",
)
CODE = (
    "def f(x: int) -> str:\n    if x > 0:\n        return f\"{x!r:>10}\"\n\treturn None  # tab\n",
    "#include <stdio.h>\r\nint main(void) {\r\n\tprintf(\"%d\\n\", 0x1F << 3);\r\n\treturn 0;\r\n}\r\n",
    "SELECT a.id, COUNT(*) FROM t1 a LEFT JOIN t2 b ON a.id=b.id WHERE a.x IS NOT NULL GROUP BY 1;",
    "{\"a\": [1, 2.5e-10, -3], \"b\": {\"c\": null, \"d\": \"\\u00e9\\n\"}}",
    "<div class=\"x\">&nbsp;<br/></div><!-- </s> <s> -->\n\n\n<p>\n",
    "for (let i=0;i<10;++i){a[i]??=b?.c[i]!==d;}//comment",
    "λx.x ∀ε>0 ∃δ: |x−a|<δ ⇒ |f(x)−f(a)|<ε; ∑_{i=1}^{n} i² ≠ √2·π",
    "0b1010 0o777 0xDEADBEEF 1_000_000 3.14159e+00 .5 5. 1/2 1,234,567.89",
    "\\begin{equation}\\frac{a}{b}\\end{equation} $x_1^2$ \\\\ % comment",
    "$ ls -la | grep '^d' && echo \"done\" > /dev/null 2>&1; rm -rf ./*~",
)
EMOJI = (
    "😀😃😄",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇩🇪🇫🇷 flags, 1️⃣ keycap, ❤️‍🔥",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 Z\u0351\u036b\u0343a\u0363lgo",
    "zero\u200bwidth\u200d joiner\u2060 bom\ufeff soft\u00adhyphen \u202eright-to-left\u202c",
    "\U0001f9d1\u200d\U0001f4bb \U00020000\U0002a6d6 \U0001d54f \U0010fffd \ue000",
)
CONTROL_WORDS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<|eot_id|>", "[INST]", "<think>",
    "</think>", "<tool_call>", "<repo_name>", "<file_sep>", "<|im_start", "im_end|>", "<|", "|>", "<0x0A>", "▁",
)  # fmt: skip
SPACES = (
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t\t", "\u00a0", "\u3000", "\u2003", "\u0085", "\x0b",
)  # fmt: skip


def texts() -> list[str]:
    """The texts of the comparison; the same ones every time."""
    rng = random.Random(20240229)
    made = ["", *PROSE, *CODE, *EMOJI, *CONTROL_WORDS]
    made += [f"{word}{tail}" for word in CONTROL_WORDS for tail in ("", " user\nhi", "<|im_end|>")]
    made += [f"a{space * n}b" for space in SPACES for n in (1, 2, 3, 7)] + [space * 5 for space in SPACES]
    made += [f"x{space}1{space}!{space}é" for space in SPACES]
    made += ["".join(rng.choices("0123456789", k=n)) for n in (1, 2, 3, 4, 5, 9, 17, 40)]
    made += [f"{word}{n}{word}" for word in ("a", " a", "中", "!", " ", "\n") for n in (7, 42, 123, 1234, 12345)]
    made += ["a" * n for n in (1, 2, 5, 33, 300)] + ["ab" * 40, "!?" * 20, "=" * 79, "-" * 80, "\n" * 12, " " * 40]
    pools: tuple[tuple[str, ...], ...] = (
        (*PROSE, *CODE, *EMOJI), tuple("abcXYZ 019.,'\"-_/\n\t"), (*CONTROL_WORDS, *SPACES, "user", "a", "1"),
        tuple("'sS'tT'rReE'vV'mM'lL'dD ſéß"), tuple("的一是在カタ한국어กขหมع🙂‍️́̈½²٣४"),
    )  # fmt: skip
    for pool in pools:
        made += ["".join(rng.choices(pool, k=rng.randint(1, 24))) for _ in range(36)]
    for first, last in ((0x20, 0x7E), (0x09, 0x2FF), (0x300, 0x2FFF), (0x3000, 0xD7FF), (0x1F000, 0x1FAFF)):
        made += ["".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 40))) for _ in range(16)]
    words = [word for text in (*PROSE, *CODE) for word in text.split(" ")]
    made += [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(40)]
    return made


def peer_ids(peer: Path, model: Path, wanted: list[str], *, parse_special: bool) -> list[list[int]]:
    """What the peer makes of the texts."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "texts.json", Path(folder) / "ids.json"
        source.write_text(json.dumps(wanted), encoding="utf-8")
        flags = ["--parse-special"] if parse_special else []
        command = [sys.executable, str(peer), str(model), "--tokenize", str(source), str(target), *flags]
        subprocess.run(command, check=True)
        ids: list[list[int]] = json.loads(target.read_text(encoding="utf-8"))
        return ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, default=DEFAULT_PEER)
    parser.add_argument("--golden", type=Path, help="write the peer's ids of every eighth text, both ways")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(args.model).metadata)
    wanted, differences, golden = texts(), 0, []
    for parse_special in (False, True):
        theirs = peer_ids(args.peer, args.model, wanted, parse_special=parse_special)
        ours = [tokenizer.encode(text, parse_special=parse_special).tolist() for text in wanted]
        wrong = [n for n in range(len(wanted)) if ours[n] != theirs[n]]
        for n in wrong:
            print(f"  {wanted[n]!r}\n    ours   {ours[n]}\n    theirs {theirs[n]}")
        print(f"parse_special={parse_special}: {len(wanted)} texts, {len(wrong)} differences")
        differences += len(wrong)
        golden += [
            {"text": wanted[n], "parse_special": parse_special, "ids": theirs[n]} for n in range(0, len(wanted), 8)
        ]
    if args.golden:
        lines = ",\n".join(json.dumps(entry) for entry in golden)
        args.golden.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
