"""Prompts after which drafters guess little or are slow: what speculation must not lose on."""

from __future__ import annotations

import base64
import random
import string

from coppice.lab.bench.prompts import Prompt, held_out_prompts

RANDOM, BASE64, RARE, LONG = "random", "base64", "rare-languages", "long"
KINDS = (RANDOM, BASE64, RARE, LONG)
_WORDS, _LONGEST_WORD = 120, 9
_BYTES = 450
# About 4,096 tokens of Python.
_LONG_CHARS = 14_000
# Article 1 of the Universal Declaration of Human Rights, in Basque and Welsh.
_ARTICLES = (
    "Gizon-emakume guztiak aske jaiotzen dira, duintasun eta eskubide berberak dituztela; eta ezaguera eta "
    "kontzientzia dutenez gero, elkarren artean senide legez jokatu beharra dute.",
    "Genir pawb yn rhydd ac yn gydradd \u00e2'i gilydd mewn urddas a hawliau. Fe'u cynysgaeddir \u00e2 rheswm a "
    "chydwybod, a dylai pawb ymddwyn y naill at y llall mewn ysbryd cymodlon.",
)


def hard_prompts(seed: int) -> list[Prompt]:
    """One prompt of each kind, two of rare languages, the same for a seed.

    Words of random letters, random bytes in base64, rare languages, and a long context of code. Raises PromptsError if
    there is no code to cut from.
    """
    rng = random.Random(seed)
    words = ("".join(rng.choices(string.ascii_letters, k=rng.randint(1, _LONGEST_WORD))) for _ in range(_WORDS))
    (code,) = held_out_prompts(1, seed, max_chars=_LONG_CHARS)
    return [
        Prompt(" ".join(words), RANDOM, category=RANDOM),
        Prompt(base64.b64encode(rng.randbytes(_BYTES)).decode(), BASE64, category=BASE64),
        *(Prompt(text, RARE, category=RARE) for text in _ARTICLES),
        Prompt(code.text, code.origin, category=LONG),
    ]
