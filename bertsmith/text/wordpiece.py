"""The WordPiece tokenizer: text to token ids and back."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import InputError
from bertsmith.text.alphabet import has_surrogates
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

_SPECIAL_PATTERN: Final = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))


class Tokenizer:
    """A WordPiece tokenizer, which can be pickled. Tokenizers with equal specs give equal ids.

    Text that looks like a special token, such as "[SEP]" in a corpus, is plain text unless
    ``allow_special`` is set.

    Attributes:
        spec: Vocabulary and options.
        segmenter: Segmenter applied before tokenization, or None.
        vocab: All tokens in the order of their ids.
    """

    def __init__(self, spec: TokenizerSpec, segmenter: Segmenter | None = None) -> None:
        """Build the tokenizer.

        Args:
            spec: Vocabulary and options.
            segmenter: Segmenter to use; None loads the segmenter named in the spec, if any.
        """
        self.spec = spec
        if segmenter is None and spec.segmenter is not None:
            segmenter = load_segmenter(*spec.segmenter)
        self.segmenter = segmenter
        self.vocab = spec.tokens
        self._ids = index_vocabulary(self.vocab)
        # With ``encode_special_tokens``, special tokens in a text are plain text.
        self._plain_backend = build_backend(spec, keep_special_flags=False)
        self._plain_backend.encode_special_tokens = True
        # Backends by ``allow_special``, shared with the copies that ``with_counter`` makes.
        self._backends: dict[bool, Any] = {False: self._plain_backend}
        self._counters: tuple[TokenCounter, ...] = ()

    @classmethod
    def load(
        cls, path: Path | str, *, lowercase: bool | None = None, strip_accents: bool | None = None
    ) -> Self:
        """Load a tokenizer from a directory, a tokenizer.json or a vocab.txt.

        ``read_tokenizer_spec`` describes the arguments.
        """
        spec = read_tokenizer_spec(Path(path), lowercase=lowercase, strip_accents=strip_accents)
        return cls(spec)

    def save(self, directory: Path | str, max_length: int | None = None) -> None:
        """Write the files that ``load`` and ``transformers.AutoTokenizer`` read.

        Args:
            directory: Where to write the files.
            max_length: Maximum sequence length of the model, in tokens; None if unknown.
        """
        write_tokenizer_spec(self.spec, Path(directory), max_length)

    def with_counter(self, counter: TokenCounter) -> Self:
        """Return a copy that shares the backends and counts the tokens it encodes.

        Args:
            counter: Receives the token counts of every text that the copy encodes.
        """
        # ``copy.copy`` would build the backends again, because of ``__reduce__``.
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, _counters=(*self._counters, counter))
        return copy

    def __reduce__(self) -> tuple[type[Self], tuple[TokenizerSpec, Segmenter | None]]:
        return type(self), (self.spec, self.segmenter)

    @property
    def vocab_size(self) -> int:
        """The number of ids (V)."""
        return len(self.vocab)

    @property
    def lowercase(self) -> bool:
        """Whether text is lowercased."""
        return self.spec.lowercase

    @property
    def strip_accents(self) -> bool:
        """Whether accents are removed."""
        return self.spec.strip_accents

    @property
    def split_chinese(self) -> bool:
        """Whether each Chinese character is a word."""
        return self.spec.split_chinese

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the vocabulary and all options, in hexadecimal."""
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
        """Whether each token continues a word ("##"), bool [V]."""
        return np.array(
            [token.startswith(CONTINUATION_PREFIX) for token in self.vocab], dtype=np.bool_
        )

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""
        return self._ids.get(token)

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id."""
        return [self.vocab[index] for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text, without [PAD], [CLS] and [SEP]."""
        skipped = {self.pad_id, self.cls_id, self.sep_id}
        text_ids = [int(index) for index in ids if index not in skipped]
        return str(self._plain_backend.decode(text_ids, skip_special_tokens=False))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Return the ids of ``text``, without adding special tokens.

        Args:
            text: The text.
            allow_special: Whether "[MASK]", "[SEP]" etc. in the text become special tokens.
        """
        return self.encode_batch([text], allow_special)[0]

    def encode_batch(self, texts: Sequence[str], allow_special: bool = False) -> list[list[int]]:
        """Encode several texts in parallel; see ``encode``. Equal texts share a list.

        Each distinct text is encoded once. Otherwise, a long query that is compared with many
        documents would need as much memory as all of its copies.
        """
        frequencies = Counter(texts)
        distinct_texts = list(frequencies)
        if self.segmenter is not None:
            boundaries = self._find_boundaries(distinct_texts, allow_special)
            segmented_texts = [
                insert_spaces(text, text_boundaries)
                for text, text_boundaries in zip(distinct_texts, boundaries, strict=True)
            ]
        else:
            segmented_texts = distinct_texts
        backend = self._get_backend(allow_special)
        # encode_batch_fast does not compute offsets.
        encodings = _encode(backend.encode_batch_fast, segmented_texts)
        sequences = {
            text: encoding.ids for text, encoding in zip(distinct_texts, encodings, strict=True)
        }
        self._count_tokens(sequences.values(), frequencies.values(), allow_special=allow_special)
        return [sequences[text] for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text``, and the character range [start, end) of each id."""
        return self.encode_batch_with_offsets([text])[0]

    def encode_batch_with_offsets(
        self, texts: Sequence[str], allow_special: bool = False
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Encode several texts in parallel; see ``encode_with_offsets``."""
        if self.segmenter is not None:
            boundaries = self._find_boundaries(texts, allow_special)
        else:
            boundaries = [[]] * len(texts)
        segmented_texts = [
            insert_spaces(text, text_boundaries)
            for text, text_boundaries in zip(texts, boundaries, strict=True)
        ]
        backend = self._get_backend(allow_special)
        encodings = _encode(backend.encode_batch, segmented_texts)
        results = []
        for encoding, text_boundaries in zip(encodings, boundaries, strict=True):
            offsets = encoding.offsets
            if text_boundaries:
                offsets = _to_original_offsets(offsets, text_boundaries)
            results.append((encoding.ids, offsets))
        self._count_tokens(
            [ids for ids, _ in results], [1] * len(results), allow_special=allow_special
        )
        return results

    def _get_backend(self, allow_special: bool) -> Any:
        """Return the plain backend, or the backend that recognizes special tokens in a text."""
        if allow_special not in self._backends:
            self._backends[allow_special] = build_backend(self.spec)
        return self._backends[allow_special]

    def _count_tokens(
        self, sequences: Iterable[list[int]], frequencies: Iterable[int], *, allow_special: bool
    ) -> None:
        """Add the tokens of encoded texts, each with its frequency, to the counters, if any."""
        if not self._counters:
            return
        special_ids = (self.pad_id, self.cls_id, self.sep_id, self.mask_id) if allow_special else ()
        num_tokens = num_unknown = 0
        for ids, frequency in zip(sequences, frequencies, strict=True):
            num_tokens += frequency * (len(ids) - sum(map(ids.count, special_ids)))
            num_unknown += frequency * ids.count(self.unk_id)
        for counter in self._counters:
            counter.add(num_tokens, num_unknown)

    def _find_boundaries(self, texts: Sequence[str], allow_special: bool) -> list[list[int]]:
        """Return the segmenter's boundaries in each text, except inside special tokens."""
        assert self.segmenter is not None
        boundaries = self.segmenter.find_boundaries(texts)
        if not allow_special:
            return boundaries
        filtered = []
        for text, text_boundaries in zip(texts, boundaries, strict=True):
            inside_tokens: set[int] = set()
            for match in _SPECIAL_PATTERN.finditer(text):
                inside_tokens.update(range(match.start() + 1, match.end()))
            filtered.append([offset for offset in text_boundaries if offset not in inside_tokens])
        return filtered


def _encode(encode_batch: Callable[..., list[Any]], texts: list[str]) -> list[Any]:
    """Encode texts with a function of ``tokenizers``.

    Raises:
        InputError: A text has a lone surrogate, for which ``tokenizers`` raises a TypeError.
    """
    try:
        return encode_batch(texts, add_special_tokens=False)
    except TypeError:
        for text in map(str, texts):  # Other types of values also raise a TypeError.
            if has_surrogates(text):
                escaped = text.encode("utf-8", "backslashreplace").decode()
                raise InputError(
                    f"a text has a lone surrogate (half of a character): {escaped[:80]!r}; give "
                    "valid Unicode"
                ) from None
        raise


def _to_original_offsets(
    offsets: Sequence[tuple[int, int]], boundaries: Sequence[int]
) -> list[tuple[int, int]]:
    """Convert offsets in the segmented text to offsets in the original text."""
    # Inserted space number k is at offset boundaries[k] + k of the segmented text.
    space_offsets = [boundary + number for number, boundary in enumerate(boundaries)]
    return [
        (start - bisect_left(space_offsets, start), end - bisect_left(space_offsets, end))
        for start, end in offsets
    ]
