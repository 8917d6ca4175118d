"""Measure how much a head attends to the same token in the other text of a pair.

For each model, the table has the mean attention of one head, by default the match head of the
default initialization, over tokens that occur once in each of the two texts: to the same token in
the other text, to the token itself, and to [CLS].

    python benchmarks/match_head.py RUN ... --pairs STS-B/dev.tsv
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sts import read_pairs

import bertsmith
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS


def find_shared_tokens(tokens: Sequence[str], segments: Sequence[int]) -> list[tuple[int, int]]:
    """Return the positions (here, in the other text) of the tokens that occur once in each text."""
    positions: dict[str, list[int]] = {}
    for position, token in enumerate(tokens):
        if token not in SPECIAL_TOKENS:
            positions.setdefault(token, []).append(position)
    twice = (pair for pair in positions.values() if len(pair) == 2)
    shared = [(first, second) for first, second in twice if segments[first] != segments[second]]
    return shared + [(second, first) for first, second in shared]


def measure(
    model: str, pairs: Sequence[tuple[str, str]], layer: int, head: int
) -> NDArray[np.float32]:
    """Return the mean attention to the same token in the other text, to itself and to [CLS]."""
    bundle = bertsmith.load(model)
    config = bundle.model.config
    if not (0 <= layer < config.layers and 0 <= head < config.heads):
        sys.exit(
            f"{model}: no head {head} in layer {layer}; the model has {config.layers} layers with "
            f"{config.heads} heads, counted from 0"
        )
    attention = []
    for first_text, second_text in pairs:
        maps = bertsmith.attention(bundle, first_text, second_text, max_seqlen=128)
        probabilities = maps.probabilities[layer, head]
        for token, match in find_shared_tokens(maps.tokens, maps.segments):
            attention.append(probabilities[token, [match, token, 0]])
    if not attention:
        sys.exit("no token occurs once in each text of a pair; give more pairs")
    mean: NDArray[np.float32] = np.mean(attention, axis=0)
    return mean


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="runs, folders or names")
    parser.add_argument("--pairs", type=Path, required=True, help="table of pairs of texts")
    parser.add_argument("--max-pairs", type=int, default=200, help="number of pairs to read")
    parser.add_argument("--layer", type=int, default=0, help="index of the layer, from 0")
    parser.add_argument("--head", type=int, default=2, help="index of the head, from 0")
    args = parser.parse_args()
    table = read_pairs(args.pairs, args.max_pairs)
    pairs = list(zip(table["sentence1"], table["sentence2"], strict=True))
    print("| model | same token in the other text | itself | [CLS] |")
    print("| --- | ---: | ---: | ---: |")
    for model in args.models:
        values = " | ".join(f"{x:.2f}" for x in measure(model, pairs, args.layer, args.head))
        print(f"| {model} | {values} |", flush=True)


if __name__ == "__main__":
    main()
