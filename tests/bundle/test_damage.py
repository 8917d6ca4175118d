"""Damaged and incomplete model directories, and saving that fails."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bertsmith import bundle
from bertsmith.errors import ModelError, TokenizerError
from bertsmith.model.bert import BertForPreTraining
from tests.bundle.conftest import edit_config, save_random_model
from tests.model.examples import make_prime_size_config, make_tokenizer, randomize_weights


def remove_tensor(name: str) -> Callable[[Path], None]:
    """Return a function that removes a tensor from a model directory."""

    def remove(directory: Path) -> None:
        state = load_file(directory / "model.safetensors")
        del state[name]
        save_file(state, directory / "model.safetensors")

    return remove


def shrink_vocabulary(directory: Path) -> None:
    """Replace the config and the weights by those of a model with 97 instead of 101 tokens."""
    other_directory = directory.parent / "other"
    model = BertForPreTraining(make_prime_size_config(vocab_size=97))
    bundle.save(other_directory, model, make_tokenizer(97), {})
    for name in ("config.json", "model.safetensors"):
        shutil.copy(other_directory / name, directory / name)


def truncate(path: Path) -> None:
    """Remove the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_config(directory: Path, text: str) -> None:
    """Replace config.json."""
    (directory / "config.json").write_text(text)


#: Name of the damage, function that causes it, and pattern of the expected error message. The
#: numbers in the patterns are sizes from ``PRIME_SIZES``.
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("no weights", lambda d: (d / "model.safetensors").unlink(), r"no config\.json with model\.sa"),
    ("no config", lambda d: (d / "config.json").unlink(), r"not a model directory"),
    ("no directory", shutil.rmtree, r"no such file or directory"),
    ("cut weights", lambda d: truncate(d / "model.safetensors"), r"not a readable safetensors"),
    ("cut config", lambda d: truncate(d / "config.json"), r"config\.json: not readable as JSON"),
    ("list", lambda d: write_config(d, "[1]"), r"expected a JSON object, found a list"),
    ("cut info", lambda d: truncate(d / "bertsmith.json"), r"bertsmith\.json: not readable as JS"),
    ("shape", lambda d: edit_config(d, intermediate_size=41), r"shape \(37, 21\); .* \(41, 21\)"),
    (
        "positions",
        lambda d: edit_config(d, max_position_embeddings=47),
        r"position_embeddings.*\(47, 21",
    ),
    (
        "layers",
        lambda d: edit_config(d, num_hidden_layers=3),
        r"tensor 'bert\.encoder\.layer\.2\.",
    ),
    ("tensor", remove_tensor("bert.pooler.dense.bias"), r"'bert\.pooler\.dense\.bias' is missing"),
    (
        "key",
        remove_tensor("bert.encoder.layer.1.attention.self.key.weight"),
        r"layer\.1\.attention\.self\.key\.weight' is missing",
    ),
    ("tokens", shrink_vocabulary, r"the tokenizer has 101 tokens, but the model only 97"),
    (
        "activation",
        lambda d: edit_config(d, hidden_act="swish"),
        r"hidden_act is 'swish'; supported: gelu",
    ),
    (
        "architecture",
        lambda d: edit_config(d, model_type="roberta"),
        r"model_type is 'roberta' \(RoBERTa\); expected 'bert'",
    ),
    ("type", lambda d: edit_config(d, hidden_size="21"), r"config\.json: width: .*found '21'"),
    (
        "heads",
        lambda d: edit_config(d, num_attention_heads=4),
        r"width 21 is not a multiple of heads 4",
    ),
    ("decoder", lambda d: edit_config(d, is_decoder=True), r"is_decoder is True, but only False"),
    (
        "relative",
        lambda d: edit_config(d, position_embedding_type="relative_key"),
        r"position_embedding_type is 'relative_key', but only 'absolute'",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [damage[1:] for damage in DAMAGES], ids=[damage[0] for damage in DAMAGES]
)
def test_damaged_directory_raises_model_error(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """Loading a damaged directory raises a ModelError that contains the path and the damage."""
    save_random_model(tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ModelError, match=message) as caught:
        bundle.load(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)


def test_only_a_different_decoder_is_untied(tmp_path: Path) -> None:
    """tie_word_embeddings only matters if a decoder with other weights is stored and needed."""
    save_random_model(tmp_path / "m")
    edit_config(tmp_path / "m", tie_word_embeddings=False)
    weights_file = tmp_path / "m" / "model.safetensors"
    state = load_file(weights_file)
    decoder = state["bert.embeddings.word_embeddings.weight"].clone()
    for stored in ({}, {"cls.predictions.decoder.weight": decoder}):
        save_file(state | stored, weights_file)
        assert not bundle.load(tmp_path / "m").unused_weights
    save_file(state | {"cls.predictions.decoder.weight": decoder + 1}, weights_file)
    with pytest.raises(ModelError, match=r"decoder\.weight differs from"):
        bundle.load(tmp_path / "m")
    bundle.load_encoder(tmp_path / "m")


def test_config_without_hidden_size_is_rejected(tmp_path: Path) -> None:
    """The error message for a config without ``hidden_size`` contains the missing key."""
    save_random_model(tmp_path / "model")
    write_config(tmp_path / "model", '{"model_type": "bert", "vocab_size": 101}')
    with pytest.raises(ModelError, match="keys are missing: hidden_size"):
        bundle.load(tmp_path / "model")


def test_missing_tokenizer_raises_tokenizer_error(tmp_path: Path) -> None:
    """A model directory without tokenizer.json and vocab.txt is rejected."""
    save_random_model(tmp_path / "model")
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(TokenizerError, match="no tokenizer"):
        bundle.load(tmp_path / "model")


@pytest.mark.parametrize("failing_step", ["save_tensors", "write_json", "tokenizer", "rename"])
def test_failed_save_keeps_the_old_directory(
    failing_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any step of saving fails, the old files are unchanged and no temporary files remain."""
    model = save_random_model(tmp_path / "model")
    old_files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    tokenizer = make_tokenizer()
    rename = Path.replace

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    def fail_to_rename(self: Path, target: Path) -> Path:
        if target == tmp_path / "model" and self.suffix == ".tmp":
            raise OSError("no space left on device")
        return rename(self, target)

    if failing_step == "tokenizer":
        monkeypatch.setattr(tokenizer, "save", fail)
    elif failing_step == "rename":
        monkeypatch.setattr(Path, "replace", fail_to_rename)
    else:
        monkeypatch.setattr(bundle.pretrained, failing_step, fail)
    with pytest.raises(OSError, match="no space left"):
        bundle.save(tmp_path / "model", randomize_weights(model, seed=1), tokenizer, {})
    files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert files == old_files
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
