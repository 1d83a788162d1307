r"""How a text is cut into words before byte-level BPE, by the name in ``tokenizer.ggml.pre``.

Each rule is a list of regular expressions that are applied one after the other; a match is a piece of its own, and so
is what lies between matches. The expressions are those of the models' own tokenizers, as their files name them; the
names and their groups are llama.cpp's, which gave the key its meaning. A name that is not in the table is refused: with
the wrong cuts a model answers, but worse, and nobody would know why.
"""

from __future__ import annotations

import attrs
from tokenizers import Regex, pre_tokenizers

from strata_core.errors import UnsupportedModel
from strata_core.tokens.vocabulary import PREFIX


@attrs.frozen
class PreTokenizer:
    """A rule.

    :ivar expressions: Oniguruma regular expressions, in order.
    :ivar ignore_merges: a word that is a token is that token, without asking the merges.
    :ivar adds_bos: whether a prompt begins with the begin token where the file does not say.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule as a pre-tokeniser that also maps bytes to the letters of byte-level BPE."""
        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CONTRACTION = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, *, contraction: str = _CONTRACTION + "|") -> str:
    """The family of cl100k: contractions, words with one leading sign, digits, runs of signs, spaces."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contraction: str) -> str:
    """The family of o200k: words are also cut where a lower-case letter is followed by an upper-case one."""
    sign = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{sign}{_UPPER}*{_LOWER}+{contraction}|{sign}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)
_LLAMA3 = (_words(r"\p{N}{1,3}"),)

_RULES: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum"): (
        PreTokenizer((_GPT2,))
    ),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): PreTokenizer((_DIGIT, _GPT2)),
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"): PreTokenizer((_words(_DIGIT),)),
    ("qwen35",): PreTokenizer((_QWEN35,)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (
        PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer(_LLAMA3),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): PreTokenizer((_cased_words(r"\p{N}{1,3}", f"(?:{_CONTRACTION})?"),)),
    ("tekken",): PreTokenizer((_cased_words(_DIGIT, ""),), ignore_merges=True, adds_bos=True),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): PreTokenizer(_DEEPSEEK_V3),
    ("deepseek-coder",): PreTokenizer(_DEEPSEEK_CODER),
    ("seed-coder",): PreTokenizer(
        (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((_words(_DIGIT).replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
}

#: Rule of each known name.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for names, rule in _RULES.items() for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule of ``tokenizer.ggml.pre``.

    :raises UnsupportedModel: no such rule, or none is named.
    """
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        what = f"{PREFIX}pre is {name!r}" if name else f"{PREFIX}pre is missing"
        raise UnsupportedModel(
            f"{what}, so it is not known how to cut text for this model; known: {', '.join(sorted(PRE_TOKENIZERS))}",
            param=PREFIX + "pre",
        )
    return rule
