"""Models of Hugging Face's, in and out: every class, every form of file, the same numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from bertsmith import bundle
from bertsmith.bundle import HeadConfig
from bertsmith.cli import commands  # noqa: F401 (registers them)
from bertsmith.cli.app import app
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.packed import pack_sequences
from bertsmith.use.fill import fill
from bertsmith.use.inspection.artifacts import identify_artifact
from bertsmith.use.inspection.describe import describe_model
from bertsmith.use.pair import pair
from bertsmith.use.score import score
from tests.interop.transformers_models import (
    MODEL_CLASSES,
    WEIGHT_FORMATS,
    make_transformers_model,
    write_model_directory,
)
from tests.model.examples import make_tokenizer, prime_config, randomize_weights

#: Two sequences as (ids, segments): of unlike lengths, one with both segments.
ROWS = [([2, 17, 5, 3, 9, 33, 3], [0, 0, 0, 0, 1, 1, 1]), ([2, 8, 3], [0, 0, 0])]


def asked(model: Any, name: str) -> list[Tensor]:
    """Return what transformers' model says of each row, its tensors on end."""
    found = []
    for ids, segments in ROWS:
        one = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([segments])}
        if name == "BertForMultipleChoice":
            one = {key: value[None] for key, value in one.items()}
        with torch.no_grad():
            output = model(**one)
        if name == "BertModel":
            found.append(output.last_hidden_state[0])
        elif name == "BertForPreTraining":
            pairs = output.seq_relationship_logits.flatten()
            found.append(torch.cat([output.prediction_logits.flatten(), pairs]))
        elif name == "BertForQuestionAnswering":
            found.append(torch.stack([output.start_logits[0], output.end_logits[0]], -1))
        else:
            found.append(output.logits)
    return [one.flatten() for one in found]


def answered(directory: Path, name: str) -> list[Tensor]:
    """Return what Bertsmith says of each row, its tensors on end."""
    packed = pack_sequences(ROWS)
    lengths = [len(ids) for ids, _ in ROWS]
    with torch.no_grad():
        if name in ("BertModel", "BertForMaskedLM", "BertForPreTraining"):
            model = bundle.load(directory).model
            hidden = model.bert(packed)
            rows = (hidden if name == "BertModel" else model.mlm(hidden)).split(lengths)
            if name == "BertForPreTraining":
                pairs = model.next_sentence_logits(hidden, packed)
                return [torch.cat([a.flatten(), b]) for a, b in zip(rows, pairs, strict=True)]
            return [row.flatten() for row in rows]
        if name == "BertForNextSentencePrediction":
            model = bundle.load(directory).model
            return list(model.next_sentence_logits(model.bert(packed), packed))
        found = bundle.load_fine_tuned(directory).model(packed)
    return [row.flatten() for row in (found if len(found) == 2 else found.split(lengths))]


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", MODEL_CLASSES)
def test_every_class_in_every_form_gives_the_same_numbers(
    name: str, form: str, tmp_path: Path
) -> None:
    """What transformers wrote, in any form of file and under old names, answers alike to 1e-5."""
    theirs = make_transformers_model(name)
    write_model_directory(theirs, tmp_path, form)
    for ours, wanted in zip(answered(tmp_path, name), asked(theirs, name), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("one label", HeadConfig("single", ("bad", "fair", "good"))),
        ("many labels", HeadConfig("multi", tuple(f"LABEL_{number}" for number in range(5)))),
        ("regression", HeadConfig("regression")),
        ("BertForTokenClassification", HeadConfig("entities", ("O", "B-PER", "I-PER"))),
        ("BertForQuestionAnswering", HeadConfig("span")),
        ("BertForMultipleChoice", HeadConfig("choice")),
    ],
)
def test_label_maps_are_read(name: str, head: HeadConfig, tmp_path: Path) -> None:
    """A config's labels and problem type say what the outputs mean."""
    write_model_directory(make_transformers_model(name), tmp_path)
    assert bundle.load_fine_tuned(tmp_path).head == head


@pytest.mark.parametrize(
    ("name", "new", "pairs"),
    [
        ("BertModel", True, False),
        ("one label", True, False),
        ("BertForNextSentencePrediction", True, True),
        ("BertForMaskedLM", False, False),
        ("BertForPreTraining", False, True),
    ],
)
def test_a_head_that_is_not_there_never_answers(
    name: str, new: bool, pairs: bool, tmp_path: Path
) -> None:
    """New weights are named; fill and score refuse to speak from them, pair without its head."""
    write_model_directory(make_transformers_model(name), tmp_path)
    found = bundle.load(tmp_path)
    heads = {name.partition(".")[0] for name in found.new_weights}
    assert heads == ({"mlm"} if new else set())
    if new:
        assert any("newly initialized" in note and "mlm.transform.weight" in note
                   for note in found.notes())  # fmt: skip
        for question in (lambda: fill(found, "[MASK]"), lambda: score(found, "word3")):
            with pytest.raises(ModelError, match="has no masked-LM head"):
                question()
    else:
        assert fill(found, "word3 [MASK]")
        assert score(found, "word3").total < 0
    if pairs:
        assert 0 < pair(found, "word3", "word4") < 1
    else:
        with pytest.raises(ModelError, match="no next-sentence head"):
            pair(found, "word3", "word4")


def test_the_weights_say_which_heads_there_are(tmp_path: Path) -> None:
    """A config of BertForMaskedLM beside weights with a next-sentence head: pair uses it."""
    write_model_directory(make_transformers_model("BertForPreTraining"), tmp_path)
    edit(tmp_path, architectures=["BertForMaskedLM"])
    assert bundle.load(tmp_path).config.nsp


def test_what_is_unexpected_is_named(tmp_path: Path) -> None:
    """A tensor that no BERT has is left out and named; one of another head likewise."""
    write_model_directory(make_transformers_model("one label"), tmp_path)
    change(tmp_path, lambda state: state | {"bert.extra": torch.ones(3)})
    assert bundle.load_fine_tuned(tmp_path).unused_weights == ("bert.extra",)
    left = set(bundle.load(tmp_path).unused_weights)
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert left == {"bert.extra", "classifier.weight", "classifier.bias"} | pooler
    told = bundle.load_for_fine_tuning(tmp_path, HeadConfig("regression"))
    assert set(told.unused_weights) == {"bert.extra", "classifier.weight", "classifier.bias"}
    assert told.info["new"] == ["output.bias", "output.weight"]
    done = CliRunner().invoke(app, ["predict", str(tmp_path), "word3"])
    assert done.exit_code == 0, done.stderr
    assert "ignored, since the model has no such weights: bert.extra" in done.stderr


def test_a_bare_encoder_without_a_pooler_is_a_start(tmp_path: Path) -> None:
    """Names without "bert." and no pooler: the pooler is new, and named."""
    theirs = make_transformers_model("BertModel")
    write_model_directory(theirs, tmp_path)
    change(tmp_path, lambda state: {k: v for k, v in state.items() if "pooler" not in k})
    found = bundle.load_for_fine_tuning(tmp_path, HeadConfig("single", ("a", "b")))
    assert {name for name in found.info["new"] if name.startswith("pooler")} == {
        "pooler.dense.weight",
        "pooler.dense.bias",
    }


def test_half_a_head_is_broken(tmp_path: Path) -> None:
    """A head of which a part is there is not drawn anew: the missing tensor is named."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    gone = "cls.predictions.transform.dense.weight"
    change(tmp_path, lambda state: {k: v for k, v in state.items() if k != gone})
    with pytest.raises(ModelError, match=rf"'{gone}' is missing"):
        bundle.load(tmp_path)


def test_a_decoder_of_its_own_is_refused(tmp_path: Path) -> None:
    """A stored decoder that is not the word embeddings would be lost silently."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    name = "cls.predictions.decoder.weight"
    change(tmp_path, lambda state: state | {name: torch.ones(101, 21)})
    with pytest.raises(ModelError, match=rf"{name} differs from bert\.embeddings\.word"):
        bundle.load(tmp_path)


def test_a_resized_vocabulary_is_told(tmp_path: Path) -> None:
    """More rows than words are noted; a config that is not resized is refused with the number."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    words = make_tokenizer(97).vocab
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    found = bundle.load(tmp_path)
    assert any("97 tokens, 101 word embeddings; 4 are unused" in note for note in found.notes())
    assert all(int(word.removeprefix("word")) < 92
               for word, _ in fill(found, "[MASK]", top=97)[0].words if "word" in word)  # fmt: skip
    edit(tmp_path, vocab_size=97)
    with pytest.raises(ModelError, match=r"\(101, 21\).*set vocab_size to 101"):
        bundle.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("roberta", ["RobertaForMaskedLM"]),
        ("distilbert", ["DistilBertModel"]),
        ("albert", ["AlbertModel"]),
        ("electra", ["ElectraModel"]),
        ("bert", ["RobertaForMaskedLM"]),
        ("bert", ["DistilBertModel"]),
    ],
)
def test_relatives_are_refused_by_name(kind: str, classes: list[str], tmp_path: Path) -> None:
    """By the config's type or class, and the message names it."""
    write_model_directory(make_transformers_model("BertModel"), tmp_path)
    edit(tmp_path, model_type=kind, architectures=classes)
    with pytest.raises(ModelError, match=rf"model_type is '{kind}'|contains {classes[0]}") as error:
        bundle.load(tmp_path)
    assert classes[0].partition("For")[0].removesuffix("Model").lower() in str(error.value).lower()


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("roberta.embeddings.word_embeddings.weight", "a RoBERTa"),
        ("distilbert.transformer.layer.0.ffn.lin1.weight", "a DistilBERT"),
        ("albert.encoder.embedding_hidden_mapping_in.weight", "an ALBERT"),
        ("electra.embeddings_project.weight", "an ELECTRA"),
    ],
)
def test_weights_of_relatives_are_refused_by_name(tensor: str, name: str, tmp_path: Path) -> None:
    """A config that says BERT does not make a BERT of other weights."""
    write_model_directory(make_transformers_model("BertModel"), tmp_path)
    save_file({tensor: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"weights of {name}, not of a BERT"):
        bundle.load(tmp_path)


def test_a_config_from_before_model_types_is_read(tmp_path: Path) -> None:
    """A config.json without model_type and architectures is a BERT's if the weights are."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    kept = {k: v for k, v in raw.items() if k not in ("model_type", "architectures")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert not bundle.load(tmp_path).new_weights


@pytest.mark.parametrize("form", ["sharded", "old bin"])
def test_inspect_shows_every_form(form: str, tmp_path: Path) -> None:
    """``bertsmith inspect`` lists the tensors of shards and of an old checkpoint."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path, form)
    kind, path = identify_artifact(tmp_path)
    found = describe_model(path)
    assert kind == "model"
    shown = {one["name"]: one["shape"] for one in found.facts["tensors"]}
    assert shown["bert.embeddings.word_embeddings.weight"] == [101, 21]
    assert len(shown) > 40


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_stands_for_its_directory(name: str, tmp_path: Path) -> None:
    """A model may be named by its weights or its config."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    assert bundle.load(tmp_path / name).path == tmp_path


def test_do_lower_case_is_read(tmp_path: Path) -> None:
    """With only vocab.txt, tokenizer_config.json says whether text is lowered."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    for lowered in (True, False):
        text = json.dumps({"do_lower_case": lowered, "strip_accents": False})
        (tmp_path / "tokenizer_config.json").write_text(text)
        tokenizer = bundle.load(tmp_path).tokenizer
        assert tokenizer.lowercase is lowered
        assert (tokenizer.encode("WORD3") == tokenizer.encode("word3")) is lowered


#: What we write: a directory's name and what makes it.
HEADS = {
    "BertForSequenceClassification": HeadConfig("single", ("bad", "fair", "good")),
    "BertForTokenClassification": HeadConfig("entities", ("O", "B-X", "I-X")),
    "BertForQuestionAnswering": HeadConfig("span"),
    "BertForMultipleChoice": HeadConfig("choice"),
}
#: A fresh process, so that nothing that was loaded before keeps a warning from being shown.
FRESH = """
import json, sys, warnings
from pathlib import Path
import torch, transformers
warnings.simplefilter("error")
from transformers.utils import logging
logging.disable_progress_bar()
print("START", file=sys.stderr)
found = {}
rows = json.loads(sys.argv[2])
for place in sorted(Path(sys.argv[1]).iterdir()):
    kind = getattr(transformers, place.name)
    model, loading = kind.from_pretrained(place, output_loading_info=True)
    transformers.AutoTokenizer.from_pretrained(place)
    faults = {key: sorted(map(str, value)) for key, value in loading.items() if value}
    answers = []
    for ids, segments in rows:
        one = [torch.tensor([ids]), torch.tensor([segments])]
        if place.name == "BertForMultipleChoice":
            one = [each[None] for each in one]
        with torch.no_grad():
            output = model.eval()(one[0], token_type_ids=one[1])
        if place.name == "BertForQuestionAnswering":
            answers.append(torch.stack([output.start_logits[0], output.end_logits[0]], -1))
        elif place.name == "BertForPreTraining":
            pairs = output.seq_relationship_logits.flatten()
            answers.append(torch.cat([output.prediction_logits.flatten(), pairs]))
        else:
            answers.append(output.logits)
    found[place.name] = [faults, [answer.flatten().tolist() for answer in answers]]
json.dump(found, sys.stdout)
"""


def test_transformers_loads_every_class_that_is_written(tmp_path: Path) -> None:
    """In a fresh process: no warning, no key missing or too many, the same numbers to 1e-5."""
    for name, pairs in (("BertForPreTraining", True), ("BertForMaskedLM", False)):
        config = prime_config(nsp=pairs)
        bundle.save(
            tmp_path / name, randomize_weights(BertForPreTraining(config)), make_tokenizer(101), {}
        )
    for name, head in HEADS.items():
        torch.manual_seed(3)
        model = head.build_model(prime_config(init_range=0.3))
        bundle.save_fine_tuned(tmp_path / name, model, make_tokenizer(101), head, {"task": "none"})
    command = [sys.executable, "-c", FRESH, str(tmp_path), json.dumps(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rpartition("START")[2].strip() == ""
    results = json.loads(done.stdout)
    assert results.keys() == {"BertForPreTraining", "BertForMaskedLM", *HEADS}
    for name, (faults, answers) in results.items():
        assert not faults, name
        for ours, theirs in zip(answered(tmp_path / name, name), answers, strict=True):
            torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM", *HEADS])
def test_there_and_back_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Written here, loaded and saved by transformers, read here: no bit of a weight differs."""
    if name in HEADS:
        model: Any = HEADS[name].build_model(prime_config())
        bundle.save_fine_tuned(tmp_path / "ours", model, make_tokenizer(101), HEADS[name], {})
    else:
        model = randomize_weights(
            BertForPreTraining(prime_config(nsp=name == "BertForPreTraining"))
        )
        bundle.save(tmp_path / "ours", model, make_tokenizer(101), {})
    kind = next(kind for kind, _ in MODEL_CLASSES.values() if kind.__name__ == name)
    kind.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    make_tokenizer(101).save(tmp_path / "theirs")
    read = bundle.load_fine_tuned if name in HEADS else bundle.load
    back = read(tmp_path / "theirs").model.state_dict()
    assert back.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(back[key], value), key


def test_a_model_card_says_what_is_known(tmp_path: Path) -> None:
    """The hub's own parser reads the front matter; no folder of the machine is named."""
    info = {
        "recipe": "fast",
        "heldout": {"masked_lm": 2.5, "steps": 7},
        "provenance": {
            "sources": ["/home/somebody/secret/corpus.jsonl.xz"],
            "documents": 1234,
            "tokens": 56789,
            "language": "ko",
            "settings": {
                "run": {
                    "start_from": "/home/somebody/.cache/hub/models--acme--tiny-bert/snapshots/0a1b"
                }
            },
        },
    }
    bundle.save(
        tmp_path / "m",
        randomize_weights(BertForPreTraining(prime_config())),
        make_tokenizer(101),
        info,
    )
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.language == "ko"
    assert card.data.base_model == "acme/tiny-bert"
    assert card.data.pipeline_tag == "fill-mask"
    assert card.data.library_name == "transformers"
    assert card.data.license is None
    for known in ("`corpus.jsonl.xz`", "1,234 documents", "| masked_lm | 2.5 |", "recipe: fast",
                  "2 layers, width 21, 3 attention heads"):  # fmt: skip
        assert known in card.content, known
    assert "# license: fill this in" in (tmp_path / "m" / "README.md").read_text()
    assert "somebody" not in card.content


def test_a_card_of_a_task_names_labels_and_results(tmp_path: Path) -> None:
    """A fine-tuned model's card has the task, its labels and the run that it started from."""
    head = HeadConfig("single", ("bad", "a|b"))
    info = {
        "task": "sst-2",
        "heldout": {"accuracy": 0.925},
        "provenance": {
            "task": {"train": "/home/somebody/SST-2/train.tsv"},
            "run": {"start_from": "/home/somebody/my-run/model", "seed": 3},
        },
    }
    bundle.save_fine_tuned(
        tmp_path / "m", head.build_model(prime_config()), make_tokenizer(101), head, info
    )
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.base_model is None
    for known in ("# BERT fine-tuned on sst-2", "- bad", "- a\\|b", "| accuracy | 0.925 |",
                  "`train.tsv`", "started from `my-run`", "seed: 3"):  # fmt: skip
        assert known in card.content, known
    assert "somebody" not in card.content


def edit(directory: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change(directory: Path, how: Any) -> None:
    """Change the stored tensors."""
    path = directory / "model.safetensors"
    save_file(how(load_file(path)), path)
