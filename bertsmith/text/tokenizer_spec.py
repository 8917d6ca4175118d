"""Definition of a tokenizer: its vocabulary and options, their hash, and the backend."""

import hashlib
import json
from dataclasses import dataclass
from typing import Final, NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bertsmith.compatibility import downgrade_tokenizer_spec
from bertsmith.errors import TokenizerError

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
#: The special tokens, in the order of their ids in a new vocabulary.
SPECIAL_TOKENS: Final = (PAD, UNK, CLS, SEP, MASK)
#: Prefix of a piece that continues a word.
CONTINUATION_PREFIX: Final = "##"
#: Maximum number of characters in a word that is split into pieces, as in Hugging Face's
#: BertTokenizer. It is 200 in the original code, but words of real languages are shorter than both.
DEFAULT_MAX_WORD_CHARS: Final = 100


class AddedTokenSpec(NamedTuple):
    """A token that is matched in a text before WordPiece, with the fields of Hugging Face.

    Attributes:
        content: Text of the token.
        special: Whether decoding can leave the token out.
        single_word: Whether the token is only matched as a whole word.
        lstrip: Whether a match includes the spaces before the token.
        rstrip: Whether a match includes the spaces after the token.
        normalized: Whether the token is matched in the normalized text.
    """

    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Everything that determines the ids of a text.

    Attributes:
        vocab: The tokens in the order of their ids. If a token is repeated, its last id is used,
            as in the original code.
        added: Added tokens. Those that are not in ``vocab`` have the ids after those of ``vocab``,
            in order.
        lowercase: Whether text is lowercased.
        strip_accents: Whether accents are removed.
        keep_hangul_syllables: Whether Hangul is recomposed after accents are removed. The
            original code leaves it decomposed into jamo.
        split_chinese: Whether each Chinese character is a word.
        max_word_chars: Maximum number of characters in a word; longer words become [UNK].
        segmenter: Name and version of the segmenter applied before tokenization, or None.
    """

    vocab: tuple[str, ...]
    added: tuple[AddedTokenSpec, ...] = ()
    lowercase: bool = True
    strip_accents: bool = False
    keep_hangul_syllables: bool = True
    split_chinese: bool = True
    max_word_chars: int = DEFAULT_MAX_WORD_CHARS
    segmenter: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        try:
            "".join(self.tokens).encode()
        except UnicodeEncodeError as error:
            # JSON can contain lone surrogates.
            raise TokenizerError(
                f"a word cannot be encoded as UTF-8: {error.reason}; remove it from the vocabulary"
            ) from None
        vocab = set(self.vocab)
        missing = [token for token in SPECIAL_TOKENS if token not in vocab]
        if missing:
            raise TokenizerError(
                f"this vocabulary of {len(self.vocab):,} words has no {', '.join(missing)}; "
                "expected a BERT vocabulary, which holds [PAD] [UNK] [CLS] [SEP] [MASK]"
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        """The vocabulary and the added tokens, in the order of their ids."""
        vocab = set(self.vocab)
        return self.vocab + tuple(
            token.content for token in self.added if token.content not in vocab
        )

    @property
    def is_plain_bert(self) -> bool:
        """Whether the plain BERT tokenizer of other libraries gives the same ids."""
        is_extended = self.segmenter is not None or bool(self.added)
        return not is_extended and not (self.strip_accents and self.keep_hangul_syllables)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary and all options, in hexadecimal."""
        values = downgrade_tokenizer_spec(vars(self))
        if not self.added:
            # Stores of versions without this field must keep their hash.
            del values["added"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def index_vocabulary(vocab: tuple[str, ...]) -> dict[str, int]:
    """Return the id of each token, which is its index. A repeated token gets its last index."""
    return {token: index for index, token in enumerate(vocab)}


def build_normalizer(spec: TokenizerSpec) -> normalizers.Normalizer:
    """Return the normalizer that cleans a text before it is split into words."""
    recomposes_hangul = spec.strip_accents and spec.keep_hangul_syllables
    bert = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=spec.split_chinese,
        strip_accents=spec.strip_accents and not recomposes_hangul,
        lowercase=spec.lowercase,
    )
    if not recomposes_hangul:
        return bert
    # NFD separates accents but also decomposes Hangul; NFC recomposes it.
    parts = [bert, normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence(parts)


def build_backend(spec: TokenizerSpec, *, keep_special_flags: bool = True) -> Backend:
    """Build the ``tokenizers`` backend, whose post-processor can add [CLS] and [SEP].

    Args:
        spec: Vocabulary and options.
        keep_special_flags: Whether an added token is special if its spec says so. If False, no
            added token is special, and a backend that treats special tokens as plain text still
            matches all added tokens.
    """
    ids = index_vocabulary(spec.vocab)
    backend = Backend(
        models.WordPiece(vocab=ids, unk_token=UNK, max_input_chars_per_word=spec.max_word_chars)
    )
    backend.normalizer = build_normalizer(spec)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(CLS, ids[CLS]), (SEP, ids[SEP])],
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    for token in spec.added:
        options = token._asdict()
        if not keep_special_flags:
            options["special"] = False
        backend.add_tokens([AddedToken(**options)])
    return backend
