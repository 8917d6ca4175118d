"""Cuts long sentences, such as text without punctuation, into pieces that pre-training can use.

Of a sentence that is longer than a training sequence, only a part fits. This part would be the
middle in every epoch, because tokens are removed at the front and at the back with equal
probability (see ``sentence_pairs``).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.counter_rng import IntArray

#: Maximum number of tokens of a sentence that is not cut: the default length of a sequence.
MAX_SENTENCE_TOKENS = 128
#: Maximum number of tokens of a piece, close to the mean length of an English sentence. Pieces of
#: this length fill sequences of 128, 256 and 512 tokens almost exactly.
MAX_PIECE_TOKENS = 32


@dataclass(frozen=True)
class CutSentences:
    """Sentences after cutting.

    Attributes:
        sizes: Tokens of each sentence or piece, int64 [pieces].
        num_pieces: Number of pieces of each original sentence, int64 [sentences]; 1 if it was not
            cut.
    """

    sizes: IntArray
    num_pieces: IntArray


def cut_long_sentences(
    ids: IntArray, sizes: IntArray, is_continuation: NDArray[np.bool_]
) -> CutSentences:
    """Cut sentences of more than ``MAX_SENTENCE_TOKENS`` into pieces.

    A piece has at most ``MAX_PIECE_TOKENS``, and ends at the end of a word, unless the word is
    longer than a piece.

    Args:
        ids: Token ids of all sentences, int64 [T].
        sizes: Tokens of each sentence, int64 [sentences].
        is_continuation: Whether each id continues a word, bool [V].
    """
    num_pieces = np.ones(len(sizes), np.int64)
    long_sentences = np.flatnonzero(sizes > MAX_SENTENCE_TOKENS).tolist()
    if not long_sentences:
        return CutSentences(sizes, num_pieces)
    ends = np.cumsum(sizes)
    parts: list[IntArray] = []
    previous = 0
    for number in long_sentences:
        sentence_ids = ids[ends[number] - sizes[number] : ends[number]]
        pieces = _cut_sentence(is_continuation[sentence_ids])
        parts += [sizes[previous:number], pieces]
        num_pieces[number] = len(pieces)
        previous = number + 1
    return CutSentences(np.concatenate([*parts, sizes[previous:]]), num_pieces)


def _cut_sentence(is_continuation: NDArray[np.bool_]) -> IntArray:
    """Return the sizes of the pieces of a sentence, int64 [pieces].

    Args:
        is_continuation: Whether each token of the sentence continues a word, bool [tokens].
    """
    size = len(is_continuation)
    word_starts = np.flatnonzero(~is_continuation)
    piece_starts = [0]
    while size - piece_starts[-1] > MAX_PIECE_TOKENS:
        limit = piece_starts[-1] + MAX_PIECE_TOKENS
        # The last word that starts in reach; the next piece starts with it.
        start = int(word_starts[np.searchsorted(word_starts, limit, "right") - 1])
        piece_starts.append(start if start > piece_starts[-1] else limit)
    return np.diff([*piece_starts, size])
