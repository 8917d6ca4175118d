"""What a tokenizer is made of: its words and its choices, their hash, and the engine built of them.

It never knows where these came from, nor the texts that the engine will read.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from bertsmith.errors import TokenizerError

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
#: The special tokens, in the order of the ids that a new vocabulary gives them.
SPECIAL_TOKENS: Final = (PAD, UNK, CLS, SEP, MASK)
#: What a piece begins with that continues a word.
CONTINUATION_PREFIX: Final = "##"


class AddedTokenSpec(NamedTuple):
    """A token beside WordPiece, found in a text before it is cut into words.

    special: for a decoder, which leaves it out. single_word: only where it stands by itself.
    lstrip, rstrip: with the spaces before or after it. normalized: looked for in the cleaned text.
    """

    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """All that decides which ids a text becomes.

    ``vocab``: the words in the order of their ids; where one is repeated, the last id holds, as in
    the original. ``added``: tokens beside them; those that are no words of ``vocab`` have the ids
    behind it, in their order. ``strip_accents`` takes accents off; then ``whole_hangul`` puts
    Hangul together again, while the original leaves it in jamo. ``split_chinese`` makes each
    Chinese character a word. Words of more than ``longest_word`` characters are [UNK].
    ``segmenter``: name and version of what parts the words of a text beforehand, None for nothing.
    """

    vocab: tuple[str, ...]
    added: tuple[AddedTokenSpec, ...] = ()
    lowercase: bool = True
    strip_accents: bool = False
    whole_hangul: bool = True
    split_chinese: bool = True
    # `max_input_chars_per_word` of Hugging Face's BertTokenizer; the original code says 200, and
    # no word of a language is as long as either.
    longest_word: int = 100
    segmenter: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        try:
            "".join(self.words).encode()
        except UnicodeEncodeError as error:
            # JSON may hold half a character.
            raise TokenizerError(f"a word is no text that UTF-8 can hold: {error.reason}") from None
        known = set(self.vocab)
        missing = [token for token in SPECIAL_TOKENS if token not in known]
        if missing:
            raise TokenizerError(
                f"this vocabulary of {len(self.vocab):,} words has no {', '.join(missing)}; "
                "expected a BERT vocabulary, which holds [PAD] [UNK] [CLS] [SEP] [MASK]"
            )

    @property
    def words(self) -> tuple[str, ...]:
        """All that has an id, in the order of the ids: the vocabulary, and what was added to it."""
        known = set(self.vocab)
        return self.vocab + tuple(own.content for own in self.added if own.content not in known)

    @property
    def is_plain_bert(self) -> bool:
        """Whether a plain BERT tokenizer of other libraries can do the same."""
        plain = self.segmenter is None and not self.added
        return plain and not (self.strip_accents and self.whole_hangul)

    def fingerprint(self) -> str:
        """Return the SHA-256 over the words in the order of their ids and over every choice."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.added:
            # As it was before there was such a thing.
            del values["added"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def index_vocabulary(vocab: tuple[str, ...]) -> dict[str, int]:
    """Return each word's id. A repeated word keeps its last one; no other id moves."""
    return {word: index for index, word in enumerate(vocab)}


def build_normalizer(recipe: TokenizerSpec) -> normalizers.Normalizer:
    """Return what cleans a text before it is cut into words."""
    plain = not (recipe.strip_accents and recipe.whole_hangul)
    bert = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=recipe.split_chinese,
        strip_accents=recipe.strip_accents and plain,
        lowercase=recipe.lowercase,
    )
    if plain:
        return bert
    # NFD takes Hangul apart with the accents; NFC puts it together after they have gone.
    parts = [bert, normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence(parts)


def build_backend(recipe: TokenizerSpec, *, no_special: bool = False) -> Engine:
    """Build the ``tokenizers`` engine; [CLS] and [SEP] are put around when it is asked to.

    no_special: no added token is special, so that an engine that reads special tokens as plain text
    still finds them.
    """
    ids = index_vocabulary(recipe.vocab)
    built = Engine(
        models.WordPiece(vocab=ids, unk_token=UNK, max_input_chars_per_word=recipe.longest_word)
    )
    built.normalizer = build_normalizer(recipe)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    built.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(CLS, ids[CLS]), (SEP, ids[SEP])],
    )
    built.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    for own in recipe.added:
        flags = own._asdict() | ({"special": False} if no_special else {})
        built.add_tokens([AddedToken(**flags)])
    return built
