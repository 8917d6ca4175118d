"""Tokens added beside a vocabulary, as ``transformers`` users add them: read, used and written.

These tests never learn a vocabulary.
"""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, BertTokenizerFast

from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_files import write_tokenizer_spec
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.text.wordpiece import Tokenizer

PIECES = "new york covid ##19 ##s a city e1 e 1 [ ] ne ##w spot [unused0] unused0"
WORDS = (*SPECIAL_TOKENS, *PIECES.split())
#: What the release before added tokens computed of WORDS.
OLD_HASH = "6c6f0fa318d4bf3a7a4074c0a0553bfdb66529b387284d80884f35e29fd362a1"
TEXTS = [
    "New York",
    "new york",
    "a new  york city",
    "COVID19 covid19s covid19",
    "[E1] new [E1]york[E1]",
    "[unused0] spots spot a spot",
    "[MASK] new york [SEP]",
]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Return a directory of theirs with tokens of every sort added."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    made = BertTokenizerFast.from_pretrained(tmp_path)
    made.add_tokens(["new york", "covid19"])
    made.add_tokens([AddedToken("spot", single_word=True, normalized=False)])
    made.add_special_tokens({"additional_special_tokens": ["[E1]", "[unused0]"]})
    made.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_texts_become_the_ids_that_transformers_gives_them(theirs: Path) -> None:
    """Each sort of added token is found where theirs finds it, and has its id; so after a save."""
    peer = AutoTokenizer.from_pretrained(theirs)
    wanted = [peer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    own = Tokenizer.load(theirs)
    assert own.vocab_size == len(peer) == len(WORDS) + 3
    assert own.encode_batch(TEXTS, allow_special=True) == wanted
    assert own.ids_to_tokens(wanted[0]) == ["new york"]
    own.save(theirs.parent / "ours")
    again = Tokenizer.load(theirs.parent / "ours")
    assert again.spec == own.spec
    assert again.hash == own.hash
    back = AutoTokenizer.from_pretrained(theirs.parent / "ours")
    assert [back(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == wanted
    assert back.decode(wanted[4], skip_special_tokens=True) == peer.decode(
        wanted[4], skip_special_tokens=True
    )


def test_directories_without_a_tokenizer_json_say_it_too(theirs: Path) -> None:
    """The ids stand in tokenizer_config.json, or in added_tokens.json, as older releases wrote."""
    wanted = Tokenizer.load(theirs)
    shutil.copy(theirs.parent / "vocab.txt", theirs)
    (theirs / "tokenizer.json").unlink()
    config = json.loads((theirs / "tokenizer_config.json").read_text())
    first = len(WORDS)
    listed = {own.content: wanted.token_to_id(own.content) for own in wanted.spec.added}
    told = {str(wanted.token_to_id(own.content)): own._asdict() for own in wanted.spec.added}
    config |= {"strip_accents": False, "added_tokens_decoder": told}
    (theirs / "tokenizer_config.json").write_text(json.dumps(config))
    assert set(Tokenizer.load(theirs).spec.added) == set(wanted.spec.added)
    assert Tokenizer.load(theirs).encode_batch(TEXTS) == wanted.encode_batch(TEXTS)
    del config["added_tokens_decoder"]
    (theirs / "tokenizer_config.json").write_text(json.dumps(config))
    (theirs / "added_tokens.json").write_text(json.dumps(listed))
    older = Tokenizer.load(theirs)
    assert older.vocab == wanted.vocab
    assert older.token_to_id("covid19") == first + 1
    (theirs / "added_tokens.json").write_text(json.dumps({"new york": "x"}))
    with pytest.raises(TokenizerError, match=f"'new york' has the id 'x'; expected {first}"):
        Tokenizer.load(theirs)


def test_text_is_text_but_for_what_was_added(theirs: Path) -> None:
    """Read as plain text, "[MASK]" is no special token, while an added one is still found."""
    own = Tokenizer.load(theirs)
    assert own.mask_id not in own.encode("[MASK] [E1]")
    assert own.encode("[MASK] [E1]")[-1] == own.token_to_id("[E1]")


def test_the_store_holds_the_same_ids(theirs: Path) -> None:
    """What ``prepare`` remembers word by word gives way to added tokens, which may hold spaces."""
    own = Tokenizer.load(theirs)
    ids, sizes = CachedTokenizer(own).encode(TEXTS)
    wanted = own.encode_batch(TEXTS)
    assert ids.tolist() == [one for row in wanted for one in row]
    assert sizes.tolist() == [len(row) for row in wanted]


def test_a_hash_without_added_tokens_is_what_it_was() -> None:
    """With nothing added the hash is that of older releases, so that their stores still fit."""
    assert TokenizerSpec(vocab=WORDS).fingerprint() == OLD_HASH


def test_new_words_cannot_stand_behind_added_tokens(theirs: Path) -> None:
    """``vocab extend`` refuses: the added tokens have the ids that new words would get."""
    with pytest.raises(TokenizerError, match=r"new york, covid19, \[E1\]"):
        extend_vocabulary(Tokenizer.load(theirs), ["cities"])


def test_an_id_that_leaves_a_gap_is_refused(tmp_path: Path, theirs: Path) -> None:
    """An added token whose id is not the next one is named, with the id that was expected."""
    text = (theirs / "tokenizer.json").read_text()
    first = len(WORDS)
    (theirs / "tokenizer.json").write_text(text.replace(f'"id": {first},', '"id": 99999,'))
    with pytest.raises(TokenizerError, match=f"'covid19' has the id {first + 1}; expected {first}"):
        Tokenizer.load(theirs)


def test_only_the_plain_words_are_written_to_vocab_txt(theirs: Path) -> None:
    """vocab.txt holds the WordPiece vocabulary, as theirs does; the rest is in the other files."""
    write_tokenizer_spec(Tokenizer.load(theirs).spec, theirs.parent / "ours")
    assert (theirs.parent / "ours" / "vocab.txt").read_text().split("\n")[:-1] == list(WORDS)
