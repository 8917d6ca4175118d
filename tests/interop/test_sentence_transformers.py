"""Directories of sentence-transformers give the same vectors in both libraries."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as models

from bertsmith.bundle import (
    HeadConfig,
    hash_model_files,
    load,
    load_encoder,
    load_fine_tuned,
    load_for_fine_tuning,
    save,
    save_fine_tuned,
)
from bertsmith.errors import InputError, ModelError
from bertsmith.files import compute_file_sha256
from bertsmith.interop.sentence_transformers import (
    PoolingConfig,
    read_pooling,
    write_sentence_transformers,
)
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings, ModelConfig, PoolingMode
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.train.embedding.start_model import load_start_model, save_embedder
from bertsmith.use.embed import embed
from tests.model.examples import randomize_weights

TEXTS = [
    "The forge stood where the two roads met.",
    "Every hammer on the wall had its own name, its own weight and its own sound; " * 9,
    "iron",
    "",
    "  Some questions had answers.  ",
    "DIE SCHÖNE Straße, naïve café Ζεύς",
    "The smith struck, and struck, and struck again until dark.",
]
#: D of the models in these tests.
WIDTH = 26
MODES: list[PoolingMode] = [
    "cls",
    "max",
    "mean",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "lasttoken",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a lowercase tokenizer whose vocabulary is learned from the texts."""
    return train_wordpiece(iter(TEXTS * 3), 200)


def make_config(tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    """Return a small config for the vocabulary of a tokenizer."""
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "layers": 2,
        "width": WIDTH,
        "heads": 2,
        "feed_forward": 37,
        "max_positions": 61,
        "activation": "gelu",
    }
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def pretrained_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Return the model directory of a random pre-trained model."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    save(folder, randomize_weights(BertForPreTraining(make_config(tokenizer))), tokenizer, {})
    return folder


def encode_with_sentence_transformers(
    folder: Path, texts: Sequence[str] = TEXTS
) -> NDArray[np.float32]:
    """Return the vectors that sentence-transformers computes."""
    vectors: NDArray[np.float32] = SentenceTransformer(str(folder), device="cpu").encode(
        list(texts)
    )
    return vectors


def assert_close(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Assert that vectors agree within 1e-5."""
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_exported_directory_gives_the_same_vectors(
    tmp_path: Path, pretrained_dir: Path, mode: PoolingMode
) -> None:
    """In every mode, for short and truncated texts, both libraries agree within 1e-5."""
    normalize = mode != "mean_sqrt_len_tokens"
    assert not write_sentence_transformers(
        pretrained_dir, tmp_path / "o", pooling=mode, normalize=normalize
    )
    config = read_pooling(tmp_path / "o")
    expected = PoolingConfig(modes=(mode,), max_seq_length=61)
    assert config == (replace(expected, post_modules=("normalize",)) if normalize else expected)
    assert_close(embed(tmp_path / "o", TEXTS), encode_with_sentence_transformers(tmp_path / "o"))
    # Options of embed on the original model give the same vectors.
    name = {"cls": "first", "lasttoken": "last"}.get(mode, mode)
    vectors = embed(pretrained_dir, TEXTS, pooling=name, normalize=normalize)
    assert_close(vectors, embed(tmp_path / "o", TEXTS))


def test_exported_directory_has_a_model_card(tmp_path: Path, pretrained_dir: Path) -> None:
    """The card names sentence-transformers, which loads the directory."""
    write_sentence_transformers(pretrained_dir, tmp_path / "o")
    card = (tmp_path / "o" / "README.md").read_text()
    assert 'library_name: "sentence-transformers"' in card
    assert "from sentence_transformers import SentenceTransformer" in card


def test_default_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, pretrained_dir: Path
) -> None:
    """Without modules.json, both libraries compute the mean over all tokens."""
    reference = SentenceTransformer(
        modules=[models.Transformer(str(pretrained_dir)), models.Pooling(WIDTH)]
    )
    expected = reference.encode(TEXTS)
    assert_close(embed(pretrained_dir, TEXTS), expected)
    assert_close(embed(load(pretrained_dir), TEXTS), expected)
    assert read_pooling(pretrained_dir) is None
    assert embed(pretrained_dir, []).shape == (0, WIDTH)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.Identity, torch.nn.ReLU])
def test_directory_of_sentence_transformers_is_read(
    tmp_path: Path, pretrained_dir: Path, bias: bool, activation: type[torch.nn.Module]
) -> None:
    """Several modes, Dense, Normalize, max_seq_length and a prompt are read and written again."""
    torch.manual_seed(3)
    reference = SentenceTransformer(
        modules=[
            models.Transformer(str(pretrained_dir), max_seq_length=17),
            models.Pooling(WIDTH, pooling_mode=("mean", "cls", "max")),
            models.Dense(3 * WIDTH, 11, bias=bias, activation_function=activation()),
            models.Normalize(),
        ],
        prompts={"query": "the smith: "},
        default_prompt_name="query",
        device="cpu",
    )
    expected = reference.encode(TEXTS)
    reference.save(str(tmp_path / "reference"))
    assert_close(encode_with_sentence_transformers(tmp_path / "reference"), expected)
    assert_close(embed(tmp_path / "reference", TEXTS), expected)
    assert embed(tmp_path / "reference", []).shape == (0, 11)
    write_sentence_transformers(tmp_path / "reference", tmp_path / "exported")
    assert_close(encode_with_sentence_transformers(tmp_path / "exported"), expected)
    assert_close(embed(tmp_path / "exported", TEXTS), expected)
    with pytest.raises(ModelError, match="Dense module was trained with mean, cls, max"):
        write_sentence_transformers(tmp_path / "reference", tmp_path / "no", pooling="max")


def test_prompts_are_applied_and_exported(tmp_path: Path, pretrained_dir: Path) -> None:
    """Each prompt gives the vectors of sentence-transformers, and exports keep all prompts."""
    prompts = {"query": "the smith: ", "document": ""}
    reference = SentenceTransformer(
        modules=[models.Transformer(str(pretrained_dir)), models.Pooling(WIDTH)],
        prompts=prompts,
        device="cpu",
    )
    reference.save(str(tmp_path / "reference"))
    write_sentence_transformers(tmp_path / "reference", tmp_path / "exported")
    exported = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    assert exported.prompts == prompts
    assert exported.default_prompt_name is None
    for name in ("query", "document", None):
        expected = reference.encode(TEXTS, prompt_name=name)
        for directory in ("reference", "exported"):
            assert_close(embed(tmp_path / directory, TEXTS, prompt_name=name), expected)
    with pytest.raises(InputError, match="unknown prompt 'q'; expected one of 'document', 'query'"):
        embed(tmp_path / "exported", TEXTS, prompt_name="q")
    bundle = load_start_model(tmp_path / "exported", EmbeddingSettings(prompt="every: "), {})
    save_embedder(tmp_path / "tuned", bundle, {})
    pooling = read_pooling(tmp_path / "tuned")
    assert pooling is not None
    assert pooling.prompts == dict.fromkeys(("query", "document", "default"), "every: ")
    assert pooling.default_prompt_name == "default"


@pytest.mark.parametrize("truncate_dim", [7, WIDTH + 1])
def test_truncate_dim_is_applied_and_exported(
    tmp_path: Path, pretrained_dir: Path, truncate_dim: int
) -> None:
    """Vectors are truncated after Normalize, as in sentence-transformers; exports keep the value.

    A requested normalization comes after the truncation.
    """
    SentenceTransformer(
        modules=[
            models.Transformer(str(pretrained_dir)),
            models.Pooling(WIDTH),
            models.Normalize(),
        ],
        truncate_dim=truncate_dim,
        device="cpu",
    ).save(str(tmp_path / "reference"))
    reference = SentenceTransformer(str(tmp_path / "reference"), device="cpu")
    write_sentence_transformers(tmp_path / "reference", tmp_path / "exported")
    bundle = load_start_model(tmp_path / "exported", EmbeddingSettings(), {})
    save_embedder(tmp_path / "tuned", bundle, {})
    for normalize in (False, True):
        expected = reference.encode(TEXTS, normalize_embeddings=normalize)
        assert expected.shape[1] == min(truncate_dim, WIDTH)
        for name in ("reference", "exported", "tuned"):
            assert_close(embed(tmp_path / name, TEXTS, normalize=normalize or None), expected)
    assert_close(encode_with_sentence_transformers(tmp_path / "exported"), reference.encode(TEXTS))
    # An explicit pooling replaces the configuration of the directory.
    assert embed(tmp_path / "reference", TEXTS, pooling="max").shape[1] == WIDTH


@pytest.mark.parametrize("normalize", [False, True])
def test_only_the_final_normalization_is_optional(
    tmp_path: Path, pretrained_dir: Path, normalize: bool
) -> None:
    """``normalize`` does not remove a Normalize module before a Dense module."""
    reference = SentenceTransformer(
        modules=[
            models.Transformer(str(pretrained_dir)),
            models.Pooling(WIDTH),
            models.Normalize(),
            models.Dense(WIDTH, 11),
        ],
        device="cpu",
    )
    reference.save(str(tmp_path / "reference"))
    expected = reference.encode(TEXTS, normalize_embeddings=normalize)
    assert_close(embed(tmp_path / "reference", TEXTS, normalize=normalize), expected)
    write_sentence_transformers(tmp_path / "reference", tmp_path / "o", normalize=normalize)
    assert_close(encode_with_sentence_transformers(tmp_path / "o"), expected)


def test_do_lower_case_applies_to_a_cased_tokenizer(tmp_path: Path) -> None:
    """do_lower_case of the Transformer applies although the tokenizer is cased."""
    cased = train_wordpiece(iter(TEXTS * 3), 260, cased=True)
    assert not cased.lowercase
    save(tmp_path / "m", randomize_weights(BertForPreTraining(make_config(cased))), cased, {})
    write_sentence_transformers(tmp_path / "m", tmp_path / "o")
    cased_vectors = embed(tmp_path / "o", TEXTS)
    path = tmp_path / "o" / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": True}))
    lowercase_vectors = embed(tmp_path / "o", TEXTS)
    assert_close(lowercase_vectors, encode_with_sentence_transformers(tmp_path / "o"))
    assert np.abs(lowercase_vectors - cased_vectors).max() > 0.1


def test_model_in_its_own_folder_is_read(
    tmp_path: Path, pretrained_dir: Path, tokenizer: Tokenizer
) -> None:
    """Older directories with 0_Transformer give the same vectors and can be fine-tuned."""
    write_sentence_transformers(pretrained_dir, tmp_path / "root", pooling="cls")
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "root", old / "0_Transformer")
    shutil.move(old / "0_Transformer" / "1_Pooling", old / "1_Pooling")
    entries = json.loads((old / "0_Transformer" / "modules.json").read_text())
    (old / "0_Transformer" / "modules.json").unlink()
    entries[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(entries))
    expected = embed(tmp_path / "root", TEXTS)
    assert_close(encode_with_sentence_transformers(old), expected)
    assert_close(embed(old, TEXTS), expected)
    assert_close(embed(old / "0_Transformer", TEXTS), expected)
    fine_tuned = load_for_fine_tuning(old, HeadConfig("single", ("a", "b")))
    assert fine_tuned.info["newly_initialized"] == ["output.bias", "output.weight"]
    pretrained_state = load(pretrained_dir).model.bert.state_dict()
    for name, value in fine_tuned.model.bert.state_dict().items():
        assert torch.equal(value, pretrained_state[name]), name


def test_hash_covers_all_modules(tmp_path: Path, pretrained_dir: Path) -> None:
    """The hash depends on pickled modules, and for 0_Transformer on the modules next to it."""
    model = tmp_path / "m"
    shutil.copytree(pretrained_dir, model)
    names = ("bertsmith.json", "config.json", "model.safetensors", "tokenizer.json")
    files = sorted((*names, "tokenizer_config.json", "vocab.txt"))
    lines = [f"{name} {compute_file_sha256(model / name)}\n" for name in files]
    hashes = [hashlib.sha256("".join(lines).encode()).hexdigest()]
    assert hash_model_files(model) == hashes[0]
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "pytorch_model.bin").write_bytes(b"0")
    hashes.append(hash_model_files(model))
    old = tmp_path / "old" / "0_Transformer"
    shutil.copytree(pretrained_dir, old)
    (old.parent / "modules.json").write_text("[]")
    hashes.append(hash_model_files(old))
    (old.parent / "1_Pooling").mkdir()
    (old.parent / "1_Pooling" / "config.json").write_text("{}")
    hashes.append(hash_model_files(old))
    assert len(set(hashes)) == 4
    old.parent.rename(tmp_path / "moved")
    assert hash_model_files(tmp_path / "moved" / "0_Transformer") == hashes[-1]
    # Checkpoints of a trainer are not part of the model.
    shutil.copytree(tmp_path / "moved" / "0_Transformer", tmp_path / "moved" / "checkpoint-500")
    assert hash_model_files(tmp_path / "moved" / "0_Transformer") == hashes[-1]
    shutil.copytree(tmp_path / "moved" / "0_Transformer", model / "checkpoint-500")
    assert hash_model_files(model) == hashes[1]


def test_exported_directory_loads_without_warnings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Exports load without warnings in sentence-transformers, and with pooler in AutoModel."""
    for nsp in (True, False):
        config = make_config(tokenizer, nsp=nsp, positions="sinusoidal")
        model, out = tmp_path / f"m-{nsp}", tmp_path / f"o-{nsp}"
        save(model, randomize_weights(BertForPreTraining(config)), tokenizer, {})
        notes = write_sentence_transformers(model, out)
        assert len(notes) == (0 if nsp else 1)
        assert ("pooler.dense.weight" in load_file(out / "model.safetensors")) == nsp
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from sentence_transformers import SentenceTransformer\n"
        "from transformers import AutoModel\n"
        "for path in sys.argv[1:]: SentenceTransformer(path, device='cpu').encode(['iron'])\n"
        "AutoModel.from_pretrained(sys.argv[1])\n"
    )
    folders = [str(tmp_path / name) for name in ("o-True", "o-False")]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *folders],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    # Progress bars are not warnings.
    messages = re.sub(r"Loading weights: .*?(it/s\]|\?it/s\])", "", process.stderr)
    assert not messages.strip()


def test_only_the_encoder_of_a_fine_tuned_model_is_exported(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Export and embedding use only the encoder of classifiers and BiLSTM models."""
    for name, features in (("tuned", None), ("frozen", BiLSTMSettings(layers="last", width=5))):
        head = HeadConfig("single", ("a", "b"))
        torch.manual_seed(9)
        model = head.build_model(make_config(tokenizer, init_range=0.3), features)
        save_fine_tuned(tmp_path / name, model, tokenizer, head, {})
        write_sentence_transformers(tmp_path / name, tmp_path / f"{name} out", normalize=False)
        expected = encode_with_sentence_transformers(tmp_path / f"{name} out")
        assert_close(embed(tmp_path / name, TEXTS), expected)
        assert_close(embed(load_fine_tuned(tmp_path / name), TEXTS), expected)
        assert_close(embed(load_encoder(tmp_path / name), TEXTS), expected)


def test_vectors_do_not_depend_on_batching(pretrained_dir: Path) -> None:
    """Vectors are in input order, and do not depend on the other texts in the batch."""
    texts = [" ".join(["iron", "hammer", "smith"][: 1 + n % 3] * (n % 50)) for n in range(700)]
    vectors = embed(pretrained_dir, texts)
    for number in (0, 1, 49, 50, 333, 699):
        assert_close(
            vectors[number : number + 1], embed(pretrained_dir, texts[number : number + 1])
        )


def test_unsupported_models_are_not_exported(
    tmp_path: Path, tokenizer: Tokenizer, pretrained_dir: Path
) -> None:
    """Pre-norm, causal or ELU models, a folder in use, and an unknown pooling are errors."""
    for number, change in enumerate(
        ({"norm": "pre"}, {"attention": "causal"}, {"activation": "elu"})
    ):
        save(
            tmp_path / f"{number}",
            BertForPreTraining(make_config(tokenizer, **change)),
            tokenizer,
            {},
        )
        with pytest.raises(ModelError, match="transformers' BERT cannot represent this model"):
            write_sentence_transformers(tmp_path / f"{number}", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    with pytest.raises(ModelError, match="already exists"):
        write_sentence_transformers(pretrained_dir, tmp_path / "0")
    with pytest.raises(ModelError, match=r"pooling 'sum' is not supported; use one of mean, cls"):
        write_sentence_transformers(pretrained_dir, tmp_path / "o", pooling="sum")  # type: ignore[arg-type]


def test_similarity_function_is_kept(tmp_path: Path, dense_dir: Path) -> None:
    """The function with which other libraries compare vectors is that of the source."""
    source = shutil.copytree(dense_dir, tmp_path / "source")
    path = source / "config_sentence_transformers.json"
    config = json.loads(path.read_text())
    assert config["similarity_fn_name"] == "cosine"
    path.write_text(json.dumps(config | {"similarity_fn_name": "dot"}))
    write_sentence_transformers(source, tmp_path / "out")
    assert SentenceTransformer(str(tmp_path / "out"), device="cpu").similarity_fn_name == "dot"


def test_dense_weights_in_pytorch_format_are_read(tmp_path: Path, dense_dir: Path) -> None:
    """Weights in pytorch_model.bin, as in older releases, give the same vectors."""
    folder = shutil.copytree(dense_dir, tmp_path / "o")
    weights = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    assert_close(embed(folder, TEXTS), embed(dense_dir, TEXTS))
    assert_close(encode_with_sentence_transformers(folder), embed(dense_dir, TEXTS))


#: Name of a file, text in it, text that replaces it, and the resulting error message.
FAULTS = [
    (
        "modules.json",
        '"1_Pooling"',
        '"../../1_Pooling"',
        "the folder of the module Pooling is outside",
    ),
    ("modules.json", '"1_Pooling"', '"/etc"', "the folder of the module Pooling is outside"),
    ("modules.json", "models.Pooling", "models.LSTM", "expected Pooling after Transformer"),
    ("modules.json", "models.Transformer", "models.CLIPModel", "expected Transformer and Pooling"),
    ("modules.json", "models.Normalize", "models.CNN", "module CNN is not supported"),
    ("modules.json", '"type"', '"kind"', "not a readable list of modules: KeyError"),
    ("modules.json", "[", "{", "not a readable list of modules"),
    (
        "1_Pooling/config.json",
        "{",
        '{"pooling_mode": "median",',
        "pooling 'median' is not supported",
    ),
    ("1_Pooling/config.json", "{", '{"pooling_mode": 3,', "pooling 3 is not supported"),
    ("1_Pooling/config.json", "{", '{"pooling_mode": [],', "pooling [] is not supported"),
    ("sentence_bert_config.json", "61", '"all"', "max_seq_length is 'all'"),
    ("sentence_bert_config.json", "61", "NaN", "max_seq_length is nan"),
    ("sentence_bert_config.json", "{", '{"module_output_name": "x",', "module_output_name is 'x'"),
    (
        "config_sentence_transformers.json",
        "{",
        '{"default_prompt_name": "q",',
        "the default prompt 'q' is not",
    ),
    (
        "config_sentence_transformers.json",
        "{",
        '{"default_prompt_name": ["q"],',
        "the default prompt ['q'] is not",
    ),
    (
        "config_sentence_transformers.json",
        "{",
        '{"truncate_dim": 0,',
        "truncate_dim is 0; expected a positive integer",
    ),
    ("2_Dense/config.json", "activation.Tanh", "os.system", "activation 'system' is not supported"),
    ("2_Dense/config.json", "{", '{"use_residual": true,', "use_residual is True"),
    ("2_Dense/config.json", '"out_features": 11', '"out_features": 10', "as in config.json"),
    (
        "1_Pooling/config.json",
        "{",
        '{"pooling_mode": ["max", "cls"],',
        "expects vectors of width 26",
    ),
    (
        "2_Dense/model.safetensors",
        "linear.bias",
        "linear.bios",
        "tensor 'linear.bias' is missing",
    ),
]


@pytest.fixture(scope="module")
def dense_dir(tmp_path_factory: pytest.TempPathFactory, pretrained_dir: Path) -> Path:
    """Return an exported directory with Transformer, Pooling, Dense and Normalize."""
    reference = SentenceTransformer(
        modules=[
            models.Transformer(str(pretrained_dir)),
            models.Pooling(WIDTH),
            models.Dense(WIDTH, 11),
        ]
    )
    folder = tmp_path_factory.mktemp("dense")
    reference.save(str(folder / "reference"))
    write_sentence_transformers(folder / "reference", folder / "exported", normalize=True)
    return folder / "exported"


@pytest.mark.parametrize(("file", "old", "new", "message"), FAULTS)
def test_invalid_directories_are_rejected(
    tmp_path: Path, dense_dir: Path, file: str, old: str, new: str, message: str
) -> None:
    """Damaged or unsupported files, and paths outside the folder, are errors that name the file."""
    folder = shutil.copytree(dense_dir, tmp_path / "o")
    content = (folder / file).read_bytes()
    assert old.encode() in content
    (folder / file).write_bytes(content.replace(old.encode(), new.encode(), 1))
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        embed(folder, TEXTS)
    # The error about widths concerns two files and names neither.
    assert "width" in message or file.partition("/")[0] in str(caught.value)
