"""sentence-transformers and Bertsmith give the same vectors, whoever wrote the directory."""

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
    load,
    load_encoder,
    load_fine_tuned,
    load_for_fine_tuning,
    save,
    save_fine_tuned,
)
from bertsmith.errors import ModelError
from bertsmith.interop.sentence_transformers import (
    PoolingConfig,
    PoolingMode,
    read_pooling,
    write_sentence_transformers,
)
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
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
    """A vocabulary learnt from the texts, lowered."""
    return train_wordpiece(iter(TEXTS * 3), 200)


def config_of(tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    """Return a small config for a vocabulary."""
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size, "layers": 2, "width": 26, "heads": 2,
        "feed_forward": 37, "max_positions": 61, "activation": "gelu",
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The directory of a random pre-trained model."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    save(folder, randomize_weights(BertForPreTraining(config_of(tokenizer))), tokenizer, {})
    return folder


def theirs(folder: Path, texts: Sequence[str] = TEXTS) -> NDArray[np.float32]:
    """Return what sentence-transformers makes of texts."""
    found: NDArray[np.float32] = SentenceTransformer(str(folder), device="cpu").encode(list(texts))
    return found


def same(ours: NDArray[np.float32], peer: NDArray[np.float32]) -> None:
    """Compare to 1e-5."""
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, peer, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_gives_the_same_vectors(
    tmp_path: Path, plain: Path, mode: PoolingMode
) -> None:
    """In every mode, with lengths 2 to too long, SentenceTransformer(ours) equals ours to 1e-5."""
    unit = mode != "mean_sqrt_len_tokens"
    assert not write_sentence_transformers(plain, tmp_path / "o", pooling=mode, normalize=unit)
    told = read_pooling(tmp_path / "o")
    wanted = PoolingConfig(modes=(mode,), max_seq_length=61)
    assert told == (replace(wanted, post_modules=("normalize",)) if unit else wanted)
    same(embed(tmp_path / "o", TEXTS), theirs(tmp_path / "o"))
    # Asked for by hand, of the model as it was, the vectors are the same.
    name = {"cls": "first", "lasttoken": "last"}.get(mode, mode)
    found = embed(plain, TEXTS, pooling=name, normalize=unit)
    same(found, embed(tmp_path / "o", TEXTS))


def test_a_plain_model_is_embedded_as_they_do(tmp_path: Path, plain: Path) -> None:
    """Without modules.json both take the mean of all tokens; loaded or by its path."""
    peer = SentenceTransformer(modules=[models.Transformer(str(plain)), models.Pooling(26)])
    wanted = peer.encode(TEXTS)
    same(embed(plain, TEXTS), wanted)
    same(embed(load(plain), TEXTS), wanted)
    assert read_pooling(plain) is None
    assert embed(plain, []).shape == (0, 26)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.Identity, torch.nn.ReLU])
def test_what_they_write_is_read(
    tmp_path: Path, plain: Path, bias: bool, activation: type[torch.nn.Module]
) -> None:
    """Several modes joined, Dense, Normalize, a shorter length, a prompt; and out again by us."""
    torch.manual_seed(3)
    peer = SentenceTransformer(
        modules=[
            models.Transformer(str(plain), max_seq_length=17),
            models.Pooling(26, pooling_mode=("mean", "cls", "max")),
            models.Dense(3 * 26, 11, bias=bias, activation_function=activation()),
            models.Normalize(),
        ],
        prompts={"query": "the smith: "},
        default_prompt_name="query",
        device="cpu",
    )
    wanted = peer.encode(TEXTS)
    peer.save(str(tmp_path / "theirs"))
    same(theirs(tmp_path / "theirs"), wanted)
    same(embed(tmp_path / "theirs", TEXTS), wanted)
    assert embed(tmp_path / "theirs", []).shape == (0, 11)
    write_sentence_transformers(tmp_path / "theirs", tmp_path / "ours")
    same(theirs(tmp_path / "ours"), wanted)
    same(embed(tmp_path / "ours", TEXTS), wanted)
    with pytest.raises(ModelError, match="Dense layer was trained with mean, cls, max"):
        write_sentence_transformers(tmp_path / "theirs", tmp_path / "no", pooling="max")


def test_text_lowered_before_a_cased_tokenizer(tmp_path: Path) -> None:
    """do_lower_case of the Transformer is heard, though the tokenizer keeps capitals."""
    cased = train_wordpiece(iter(TEXTS * 3), 260, cased=True)
    assert not cased.lowercase
    save(tmp_path / "m", randomize_weights(BertForPreTraining(config_of(cased))), cased, {})
    write_sentence_transformers(tmp_path / "m", tmp_path / "o")
    before = embed(tmp_path / "o", TEXTS)
    path = tmp_path / "o" / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": True}))
    lowered = embed(tmp_path / "o", TEXTS)
    same(lowered, theirs(tmp_path / "o"))
    assert np.abs(lowered - before).max() > 0.1


def test_the_model_may_stand_in_a_folder_of_its_own(
    tmp_path: Path, plain: Path, tokenizer: Tokenizer
) -> None:
    """Older directories keep it in 0_Transformer: vectors, and a start for fine-tuning."""
    write_sentence_transformers(plain, tmp_path / "root", pooling="cls")
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "root", old / "0_Transformer")
    shutil.move(old / "0_Transformer" / "1_Pooling", old / "1_Pooling")
    listed = json.loads((old / "0_Transformer" / "modules.json").read_text())
    (old / "0_Transformer" / "modules.json").unlink()
    listed[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(listed))
    wanted = embed(tmp_path / "root", TEXTS)
    same(theirs(old), wanted)
    same(embed(old, TEXTS), wanted)
    same(embed(old / "0_Transformer", TEXTS), wanted)
    started = load_for_fine_tuning(old, HeadConfig("single", ("a", "b")))
    assert started.info["new"] == ["output.bias", "output.weight"]
    own = load(plain).model.bert.state_dict()
    for name, value in started.model.bert.state_dict().items():
        assert torch.equal(value, own[name]), name


@pytest.mark.parametrize("nsp", [True, False])
def test_transformers_reads_it_without_a_warning(
    tmp_path: Path, tokenizer: Tokenizer, nsp: bool
) -> None:
    """In a fresh process: theirs with and without a pooler, AutoModel where there is one."""
    config = config_of(tokenizer, nsp=nsp, positions="sinusoidal")
    save(tmp_path / "m", randomize_weights(BertForPreTraining(config)), tokenizer, {})
    notes = write_sentence_transformers(tmp_path / "m", tmp_path / "o")
    assert [*map(len, notes)] == ([] if nsp else [len(notes[0])])
    assert ("pooler.dense.weight" in load_file(tmp_path / "o" / "model.safetensors")) == nsp
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from sentence_transformers import SentenceTransformer\n"
        "from transformers import AutoModel\n"
        "SentenceTransformer(sys.argv[1], device='cpu').encode(['iron'])\n"
        "if sys.argv[2] == 'True': AutoModel.from_pretrained(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "o"), str(nsp)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = re.sub(r"Loading weights: .*?(it/s\]|\?it/s\])", "", done.stderr)
    assert not told.strip()


def test_the_encoder_of_a_fine_tuned_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A classifier, and a frozen encoder under a BiLSTM, are embedded by their encoder alone."""
    for name, features in (("tuned", None), ("frozen", FeatureSettings(layers="last", width=5))):
        head = HeadConfig("single", ("a", "b"))
        torch.manual_seed(9)
        model = head.build_model(config_of(tokenizer, init_range=0.3), features)
        save_fine_tuned(tmp_path / name, model, tokenizer, head, {})
        write_sentence_transformers(tmp_path / name, tmp_path / f"{name} out", normalize=False)
        wanted = theirs(tmp_path / f"{name} out")
        same(embed(tmp_path / name, TEXTS), wanted)
        same(embed(load_fine_tuned(tmp_path / name), TEXTS), wanted)
        same(embed(load_encoder(tmp_path / name), TEXTS), wanted)


def test_the_order_of_the_batches_is_not_seen(plain: Path) -> None:
    """Many texts of mixed lengths: each vector is that of the text alone, in the input's order."""
    texts = [" ".join(["iron", "hammer", "smith"][: 1 + n % 3] * (n % 50)) for n in range(700)]
    found = embed(plain, texts)
    for number in (0, 1, 49, 50, 333, 699):
        same(found[number : number + 1], embed(plain, texts[number : number + 1]))


def test_what_they_cannot_say_is_refused(tmp_path: Path, tokenizer: Tokenizer, plain: Path) -> None:
    """Pre-norm, causal, ELU; a folder in use; an unknown pooling."""
    for number, change in enumerate(
        ({"norm": "pre"}, {"attention": "causal"}, {"activation": "elu"})
    ):
        save(
            tmp_path / f"{number}",
            BertForPreTraining(config_of(tokenizer, **change)),
            tokenizer,
            {},
        )
        with pytest.raises(ModelError, match="transformers' BERT cannot represent this model"):
            write_sentence_transformers(tmp_path / f"{number}", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    with pytest.raises(ModelError, match="something is there already"):
        write_sentence_transformers(plain, tmp_path / "0")
    with pytest.raises(ModelError, match="pooling must be one of cls, max.*got 'sum'"):
        write_sentence_transformers(plain, tmp_path / "o", pooling="sum")  # type: ignore[arg-type]


def test_a_dense_in_the_old_form(tmp_path: Path, dense: Path) -> None:
    """Its weights in pytorch_model.bin, as older releases wrote them, give the same vectors."""
    folder = shutil.copytree(dense, tmp_path / "o")
    weights = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    same(embed(folder, TEXTS), embed(dense, TEXTS))
    same(theirs(folder), embed(dense, TEXTS))


#: A file of a directory, what replaces a part of it, and what is then said.
FAULTS = [
    ("modules.json", '"1_Pooling"', '"../../1_Pooling"', "the folder of Pooling is outside"),
    ("modules.json", '"1_Pooling"', '"/etc"', "the folder of Pooling is outside"),
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
    ("sentence_bert_config.json", "61", '"all"', "max_seq_length is 'all'"),
    ("sentence_bert_config.json", "{", '{"module_output_name": "x",', "module_output_name is 'x'"),
    (
        "config_sentence_transformers.json",
        "{",
        '{"default_prompt_name": "q",',
        "the default prompt 'q' is not",
    ),
    ("2_Dense/config.json", "activation.Tanh", "os.system", "activation 'system' is not supported"),
    ("2_Dense/config.json", "{", '{"use_residual": true,', "use_residual is True"),
    ("2_Dense/config.json", '"out_features": 11', '"out_features": 10', "as in the config"),
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
def dense(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> Path:
    """A directory of ours with every module: Transformer, Pooling, Dense, Normalize."""
    peer = SentenceTransformer(
        modules=[models.Transformer(str(plain)), models.Pooling(26), models.Dense(26, 11)]
    )
    folder = tmp_path_factory.mktemp("dense")
    peer.save(str(folder / "theirs"))
    write_sentence_transformers(folder / "theirs", folder / "ours", normalize=True)
    return folder / "ours"


@pytest.mark.parametrize(("file", "old", "new", "message"), FAULTS)
def test_a_fault_is_told(
    tmp_path: Path, dense: Path, file: str, old: str, new: str, message: str
) -> None:
    """What is broken, unknown or climbs out of the directory is an error that names the place."""
    folder = shutil.copytree(dense, tmp_path / "o")
    content = (folder / file).read_bytes()
    assert old.encode() in content
    (folder / file).write_bytes(content.replace(old.encode(), new.encode(), 1))
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        embed(folder, TEXTS)
    assert "width" in message or file.partition("/")[0] in str(caught.value)
