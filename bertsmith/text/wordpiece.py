"""The WordPiece tokenizer: text to ids and back.

It never knows what the ids are for, nor how its vocabulary was learnt.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from bertsmith.text.segmenter import Segmenter, insert_spaces, load_segmenter
from bertsmith.text.tokenizer_files import read_tokenizer_spec, write_tokenizer_spec
from bertsmith.text.tokenizer_spec import (
    CLS,
    CONTINUATION_PREFIX,
    MASK,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    UNK,
    TokenizerSpec,
    build_backend,
    index_vocabulary,
)
from bertsmith.text.unknown import TokenCounter

__all__ = ["SPECIAL_TOKENS", "Tokenizer"]

_MARKS: Final = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))


class Tokenizer:
    """A WordPiece tokenizer; equal recipes give equal ids. It can be pickled.

    ``vocab``: all that has an id, in the order of the ids.

    Text that only looks like a special token, such as "[SEP]" in a corpus, is read as plain text,
    unless ``special`` is asked for.
    """

    def __init__(self, recipe: TokenizerSpec, segmenter: Segmenter | None = None) -> None:
        """Build from a recipe; ``segmenter`` stands in for loading the one that it names."""
        self.spec = recipe
        if segmenter is None and recipe.segmenter is not None:
            segmenter = load_segmenter(*recipe.segmenter)
        self.segmenter = segmenter
        self.vocab = recipe.words
        self._ids = index_vocabulary(self.vocab)
        self._plain = build_backend(recipe, no_special=True)
        self._plain.encode_special_tokens = True
        # By whether special tokens are read out of a text; shared by the copies of ``counting``.
        self._engines: dict[bool, Any] = {False: self._plain}
        self._counters: tuple[TokenCounter, ...] = ()

    @classmethod
    def load(
        cls, path: Path, *, lowercase: bool | None = None, strip_accents: bool | None = None
    ) -> Self:
        """Load a directory, a tokenizer.json or a vocab.txt; see ``read_tokenizer_spec``."""
        return cls(
            read_tokenizer_spec(Path(path), lowercase=lowercase, strip_accents=strip_accents)
        )

    def save(self, directory: Path, max_length: int | None = None) -> None:
        """Write the files that ``load`` and ``transformers.AutoTokenizer`` read.

        ``max_length``: the longest sequence, in tokens, that the model beside them takes.
        """
        write_tokenizer_spec(self.spec, Path(directory), max_length)

    def with_counter(self, counter: TokenCounter) -> Self:
        """Return a tokenizer that shares this one's engines and counts what it encodes.

        Args:
            counter: Every text that the copy encodes is added to it.
        """
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, _counters=(*self._counters, counter))
        return copy

    def __reduce__(self) -> tuple[type[Self], tuple[TokenizerSpec, Segmenter | None]]:
        return type(self), (self.spec, self.segmenter)

    @property
    def vocab_size(self) -> int:
        """How many ids there are (V)."""
        return len(self.vocab)

    @property
    def lowercase(self) -> bool:
        """Whether text is lowered."""
        return self.spec.lowercase

    @property
    def strip_accents(self) -> bool:
        """Whether accents are taken off."""
        return self.spec.strip_accents

    @property
    def split_chinese(self) -> bool:
        """Whether each Chinese character is a word."""
        return self.spec.split_chinese

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the words in the order of their ids and over every choice."""
        return self.spec.fingerprint()

    @property
    def pad_id(self) -> int:
        """The id of [PAD]."""
        return self._ids[PAD]

    @property
    def unk_id(self) -> int:
        """The id of [UNK]."""
        return self._ids[UNK]

    @property
    def cls_id(self) -> int:
        """The id of [CLS]."""
        return self._ids[CLS]

    @property
    def sep_id(self) -> int:
        """The id of [SEP]."""
        return self._ids[SEP]

    @property
    def mask_id(self) -> int:
        """The id of [MASK]."""
        return self._ids[MASK]

    @cached_property
    def is_continuation(self) -> NDArray[np.bool_]:
        """Whether a piece continues a word ("##"): bool [V]."""
        return np.array(
            [word.startswith(CONTINUATION_PREFIX) for word in self.vocab], dtype=np.bool_
        )

    def token_to_id(self, token: str) -> int | None:
        """Return a token's id, None if it is no token."""
        return self._ids.get(token)

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens of ``ids``."""
        return [self.vocab[index] for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text; [PAD], [CLS] and [SEP] are left out."""
        silent = {self.pad_id, self.cls_id, self.sep_id}
        shown = [int(index) for index in ids if index not in silent]
        return str(self._plain.decode(shown, skip_special_tokens=False))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Return the ids of ``text``, no special token added.

        ``allow_special``: "[MASK]" and the like in the text become the special tokens that they name.
        """
        return self.encode_batch([text], allow_special)[0]

    def encode_batch(self, texts: Sequence[str], allow_special: bool = False) -> list[list[int]]:
        """Return the ids of each text, on all cores that ``tokenizers`` is given."""
        if self.segmenter is not None:
            cuts = self._cuts(texts, allow_special)
            texts = [insert_spaces(text, own) for text, own in zip(texts, cuts, strict=True)]
        # The fast form leaves out the offsets.
        found = self._engine(allow_special).encode_batch_fast(list(texts), add_special_tokens=False)
        sequences = [encoding.ids for encoding in found]
        self._add_counts(sequences, special=allow_special)
        return sequences

    def encode_with_offsets(
        self, text: str, allow_special: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids, and the characters [start, end) of ``text`` that each stands for."""
        return self.encode_batch_with_offsets([text], allow_special)[0]

    def encode_batch_with_offsets(
        self, texts: Sequence[str], allow_special: bool = False
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return what ``encode_with_offsets`` does of each text, on all cores."""
        cuts = self._cuts(texts, allow_special) if self.segmenter is not None else [[]] * len(texts)
        found = self._engine(allow_special).encode_batch(
            [insert_spaces(text, own) for text, own in zip(texts, cuts, strict=True)],
            add_special_tokens=False,
        )
        encoded = [
            (encoding.ids, _unspaced(encoding.offsets, own) if own else encoding.offsets)
            for encoding, own in zip(found, cuts, strict=True)
        ]
        self._add_counts([ids for ids, _ in encoded], special=allow_special)
        return encoded

    def _engine(self, special: bool) -> Any:
        """Return the engine that reads special tokens out of a text, or the plain one."""
        if special not in self._engines:
            self._engines[special] = build_backend(self.spec)
        return self._engines[special]

    def _add_counts(self, sequences: Sequence[list[int]], *, special: bool) -> None:
        """Add the tokens of encoded texts to the counts of ``counting``, if there are any."""
        if not self._counters:
            return
        num_tokens = sum(map(len, sequences))
        if special:
            marks = (self.pad_id, self.cls_id, self.sep_id, self.mask_id)
            num_tokens -= sum(ids.count(mark) for ids in sequences for mark in marks)
        num_unknown = sum(ids.count(self.unk_id) for ids in sequences)
        for counter in self._counters:
            counter.add(num_tokens, num_unknown)

    def _cuts(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Return where the segmenter parts each text, never inside a special token."""
        assert self.segmenter is not None
        found = self.segmenter.find_boundaries(texts)
        if not special:
            return found
        kept = []
        for text, cuts in zip(texts, found, strict=True):
            inside = {place for mark in _MARKS.finditer(text) for place in range(*mark.span())} - {
                mark.start() for mark in _MARKS.finditer(text)
            }
            kept.append([cut for cut in cuts if cut not in inside])
        return kept


def _unspaced(offsets: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return places of a segmented text as those of the text itself."""
    # The k-th space put in stands in the segmented text at its cut + k.
    spaces = [cut + index for index, cut in enumerate(cuts)]
    return [
        (start - bisect_left(spaces, start), end - bisect_left(spaces, end))
        for start, end in offsets
    ]
