"""Models of transformers load and save with the same outputs, in all classes and formats."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
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
from tests.model.examples import (
    VOCAB_SIZE,
    WIDTH,
    make_prime_size_config,
    make_tokenizer,
    randomize_weights,
)

#: Two sequences (ids, segments) of different lengths, one with both segments.
ROWS = [([2, 17, 5, 3, 9, 33, 3], [0, 0, 0, 0, 1, 1, 1]), ([2, 8, 3], [0, 0, 0])]


def run_transformers(model: Any, name: str) -> list[Tensor]:
    """Return the outputs of a transformers model for each row, flattened."""
    outputs = []
    for ids, segments in ROWS:
        inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([segments])}
        if name == "BertForMultipleChoice":
            inputs = {key: value[None] for key, value in inputs.items()}
        with torch.no_grad():
            result = model(**inputs)
        if name == "BertModel":
            outputs.append(result.last_hidden_state[0])
        elif name == "BertForPreTraining":
            nsp_logits = result.seq_relationship_logits.flatten()
            outputs.append(torch.cat([result.prediction_logits.flatten(), nsp_logits]))
        elif name == "BertForQuestionAnswering":
            outputs.append(torch.stack([result.start_logits[0], result.end_logits[0]], -1))
        else:
            outputs.append(result.logits)
    return [output.flatten() for output in outputs]


def run_bertsmith(directory: Path, name: str) -> list[Tensor]:
    """Return the outputs of Bertsmith for each row, flattened."""
    packed = pack_sequences(ROWS)
    lengths = [len(ids) for ids, _ in ROWS]
    with torch.no_grad():
        if name in ("BertModel", "BertForMaskedLM", "BertForPreTraining"):
            model = bundle.load(directory).model
            hidden = model.bert(packed)
            rows = (hidden if name == "BertModel" else model.mlm(hidden)).split(lengths)
            if name == "BertForPreTraining":
                nsp_logits = model.compute_nsp_logits(hidden, packed)
                return [
                    torch.cat([mlm.flatten(), nsp])
                    for mlm, nsp in zip(rows, nsp_logits, strict=True)
                ]
            return [row.flatten() for row in rows]
        if name == "BertForNextSentencePrediction":
            model = bundle.load(directory).model
            return list(model.compute_nsp_logits(model.bert(packed), packed))
        output = bundle.load_fine_tuned(directory).model(packed)
    return [row.flatten() for row in (output if len(output) == 2 else output.split(lengths))]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", MODEL_CLASSES)
def test_all_classes_and_formats_give_the_same_outputs(
    name: str, weight_format: str, tmp_path: Path
) -> None:
    """The outputs of all model classes equal those of transformers, in all weight formats."""
    reference = make_transformers_model(name)
    write_model_directory(reference, tmp_path, weight_format)
    for actual, expected in zip(
        run_bertsmith(tmp_path, name), run_transformers(reference, name), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


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
    """Labels and problem type in the config determine the head."""
    write_model_directory(make_transformers_model(name), tmp_path)
    assert bundle.load_fine_tuned(tmp_path).head == head


@pytest.mark.parametrize(
    ("name", "lacks_mlm", "has_nsp"),
    [
        ("BertModel", True, False),
        ("one label", True, False),
        ("BertForNextSentencePrediction", True, True),
        ("BertForMaskedLM", False, False),
        ("BertForPreTraining", False, True),
    ],
)
def test_missing_heads_are_not_used(
    name: str, lacks_mlm: bool, has_nsp: bool, tmp_path: Path
) -> None:
    """Missing heads are reported; fill, score and pair raise an error without their head."""
    write_model_directory(make_transformers_model(name), tmp_path)
    loaded = bundle.load(tmp_path)
    heads = {name.partition(".")[0] for name in loaded.new_weights}
    assert heads == ({"mlm"} if lacks_mlm else set())
    if lacks_mlm:
        assert any("new" in note and "mlm.transform.weight" in note for note in loaded.notes())
        for use_head in (lambda: fill(loaded, "[MASK]"), lambda: score(loaded, "word3")):
            with pytest.raises(ModelError, match="has no masked-LM head"):
                use_head()
    else:
        assert fill(loaded, "word3 [MASK]")
        assert score(loaded, "word3").total < 0
    if has_nsp:
        assert 0 < pair(loaded, "word3", "word4") < 1
    else:
        with pytest.raises(ModelError, match="no next-sentence head"):
            pair(loaded, "word3", "word4")


def test_heads_are_detected_from_weights(tmp_path: Path) -> None:
    """An NSP head is used even if the config names BertForMaskedLM."""
    write_model_directory(make_transformers_model("BertForPreTraining"), tmp_path)
    edit_config(tmp_path, architectures=["BertForMaskedLM"])
    assert bundle.load(tmp_path).config.nsp


def test_unexpected_tensors_are_reported(tmp_path: Path) -> None:
    """Tensors that are not in BERT or belong to another head are reported as unused."""
    write_model_directory(make_transformers_model("one label"), tmp_path)
    change_tensors(tmp_path, lambda state: state | {"bert.extra": torch.ones(3)})
    assert bundle.load_fine_tuned(tmp_path).unused_weights == ("bert.extra",)
    unused = set(bundle.load(tmp_path).unused_weights)
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert unused == {"bert.extra", "classifier.weight", "classifier.bias"} | pooler
    started = bundle.load_for_fine_tuning(tmp_path, HeadConfig("regression"))
    assert set(started.unused_weights) == {"bert.extra", "classifier.weight", "classifier.bias"}
    assert started.info["newly_initialized"] == ["output.bias", "output.weight"]
    process = CliRunner().invoke(app, ["predict", str(tmp_path), "word3"])
    assert process.exit_code == 0, process.stderr
    assert ": bert.extra" in process.stderr


def test_bare_encoder_can_be_fine_tuned(tmp_path: Path) -> None:
    """An encoder without pooler, saved as BertModel, gets a new pooler, which is reported."""
    reference = make_transformers_model("BertModel")
    write_model_directory(reference, tmp_path)
    change_tensors(
        tmp_path,
        lambda state: {name: value for name, value in state.items() if "pooler" not in name},
    )
    loaded = bundle.load_for_fine_tuning(tmp_path, HeadConfig("single", ("a", "b")))
    assert {name for name in loaded.info["newly_initialized"] if name.startswith("pooler")} == {
        "pooler.dense.weight",
        "pooler.dense.bias",
    }


def test_incomplete_head_is_an_error(tmp_path: Path) -> None:
    """A partially missing head is not initialized; the error names the missing tensor."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    missing = "cls.predictions.transform.dense.weight"
    change_tensors(
        tmp_path, lambda state: {name: value for name, value in state.items() if name != missing}
    )
    with pytest.raises(ModelError, match=rf"'{missing}' is missing"):
        bundle.load(tmp_path)


def test_untied_decoder_is_an_error(tmp_path: Path) -> None:
    """A decoder that differs from the word embeddings cannot be represented."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    name = "cls.predictions.decoder.weight"
    change_tensors(tmp_path, lambda state: state | {name: torch.ones(VOCAB_SIZE, WIDTH)})
    with pytest.raises(ModelError, match=rf"{name} differs from bert\.embeddings\.word"):
        bundle.load(tmp_path)


def test_vocabulary_size_mismatch_is_reported(tmp_path: Path) -> None:
    """Unused embedding rows are reported; another number of rows than vocab_size is an error."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    words = make_tokenizer(97).vocab
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    loaded = bundle.load(tmp_path)
    assert any("101 word embeddings; 4 " in note for note in loaded.notes())
    predicted = {word for word, _ in fill(loaded, "[MASK]", top=97)[0].predictions}
    assert predicted <= set(words)
    edit_config(tmp_path, vocab_size=97)
    with pytest.raises(ModelError, match=r"\(101, 21\).*vocab_size .*101"):
        bundle.load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "class_name", "message"),
    [
        ("roberta", "RobertaForMaskedLM", r"model_type is 'roberta' \(RoBERTa\)"),
        ("distilbert", "DistilBertModel", r"model_type is 'distilbert' \(DistilBERT\)"),
        ("albert", "AlbertModel", r"model_type is 'albert' \(ALBERT\)"),
        ("electra", "ElectraModel", r"model_type is 'electra' \(ELECTRA\)"),
        ("bert", "RobertaForMaskedLM", "architectures contains RobertaForMaskedLM"),
        ("bert", "DistilBertModel", "architectures contains DistilBertModel"),
    ],
)
def test_other_architectures_are_rejected_by_config(
    model_type: str, class_name: str, message: str, tmp_path: Path
) -> None:
    """A config of another architecture is rejected; the error names its model type or class."""
    write_model_directory(make_transformers_model("BertModel"), tmp_path)
    edit_config(tmp_path, model_type=model_type, architectures=[class_name])
    with pytest.raises(ModelError, match=message):
        bundle.load(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("roberta.embeddings.word_embeddings.weight", "a RoBERTa"),
        ("distilbert.transformer.layer.0.ffn.lin1.weight", "a DistilBERT"),
        ("albert.encoder.embedding_hidden_mapping_in.weight", "an ALBERT"),
        ("electra.embeddings_project.weight", "an ELECTRA"),
    ],
)
def test_other_architectures_are_rejected_by_weights(
    tensor: str, name: str, tmp_path: Path
) -> None:
    """Weights of another model are an error even if the config says BERT."""
    write_model_directory(make_transformers_model("BertModel"), tmp_path)
    save_file({tensor: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"weights of {name}, not of a BERT"):
        bundle.load(tmp_path)


def test_config_without_model_type_is_read(tmp_path: Path) -> None:
    """A config.json without model_type and architectures is accepted with BERT weights."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = {
        key: value for key, value in raw.items() if key not in ("model_type", "architectures")
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not bundle.load(tmp_path).new_weights


@pytest.mark.parametrize("weight_format", ["sharded", "old bin"])
def test_inspect_lists_tensors_of_all_formats(weight_format: str, tmp_path: Path) -> None:
    """``bertsmith inspect`` lists the tensors of shards and of old checkpoints."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path, weight_format)
    kind, path = identify_artifact(tmp_path)
    description = describe_model(path)
    assert kind == "model"
    shapes = {tensor["name"]: tensor["shape"] for tensor in description.facts["tensors"]}
    assert shapes["bert.embeddings.word_embeddings.weight"] == [VOCAB_SIZE, WIDTH]
    assert len(shapes) > 40


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_model_is_found_by_one_of_its_files(name: str, tmp_path: Path) -> None:
    """A model can be given by its weights file or its config."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    assert bundle.load(tmp_path / name).path == tmp_path


def test_do_lower_case_is_read(tmp_path: Path) -> None:
    """With only vocab.txt, tokenizer_config.json decides whether text is lowercased."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    for lowercase in (True, False):
        text = json.dumps({"do_lower_case": lowercase, "strip_accents": False})
        (tmp_path / "tokenizer_config.json").write_text(text)
        tokenizer = bundle.load(tmp_path).tokenizer
        assert tokenizer.lowercase is lowercase
        assert (tokenizer.encode("WORD3") == tokenizer.encode("word3")) is lowercase


#: The heads of the exported models, by class name.
HEADS = {
    "BertForSequenceClassification": HeadConfig("single", ("bad", "fair", "good")),
    "BertForTokenClassification": HeadConfig("entities", ("O", "B-X", "I-X")),
    "BertForQuestionAnswering": HeadConfig("span"),
    "BertForMultipleChoice": HeadConfig("choice"),
}
#: Script that loads models with transformers. It runs in a new process, because some warnings are
#: shown only once per process.
LOAD_SCRIPT = """
import json, sys, warnings
from pathlib import Path
import torch, transformers
warnings.simplefilter("error")
from transformers.utils import logging
logging.disable_progress_bar()
print("START", file=sys.stderr)
outputs = {}
rows = json.loads(sys.argv[2])
for path in sorted(Path(sys.argv[1]).iterdir()):
    model_class = getattr(transformers, path.name)
    model, loading = model_class.from_pretrained(path, output_loading_info=True)
    transformers.AutoTokenizer.from_pretrained(path)
    problems = {key: sorted(map(str, value)) for key, value in loading.items() if value}
    answers = []
    for ids, segments in rows:
        inputs = [torch.tensor([ids]), torch.tensor([segments])]
        if path.name == "BertForMultipleChoice":
            inputs = [tensor[None] for tensor in inputs]
        with torch.no_grad():
            output = model.eval()(inputs[0], token_type_ids=inputs[1])
        if path.name == "BertForQuestionAnswering":
            answers.append(torch.stack([output.start_logits[0], output.end_logits[0]], -1))
        elif path.name == "BertForPreTraining":
            pairs = output.seq_relationship_logits.flatten()
            answers.append(torch.cat([output.prediction_logits.flatten(), pairs]))
        else:
            answers.append(output.logits)
    outputs[path.name] = [problems, [answer.flatten().tolist() for answer in answers]]
json.dump(outputs, sys.stdout)
"""


def test_transformers_loads_all_exported_classes(tmp_path: Path) -> None:
    """All classes load in transformers without warnings, and their outputs agree within 1e-5."""
    for name, nsp in (("BertForPreTraining", True), ("BertForMaskedLM", False)):
        config = make_prime_size_config(nsp=nsp)
        bundle.save(
            tmp_path / name, randomize_weights(BertForPreTraining(config)), make_tokenizer(), {}
        )
    for name, head in HEADS.items():
        torch.manual_seed(3)
        model = head.build_model(make_prime_size_config(init_range=0.3))
        bundle.save_fine_tuned(tmp_path / name, model, make_tokenizer(), head, {"task": "none"})
    command = [sys.executable, "-c", LOAD_SCRIPT, str(tmp_path), json.dumps(ROWS)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stderr.rpartition("START")[2].strip() == ""
    results = json.loads(process.stdout)
    assert results.keys() == {"BertForPreTraining", "BertForMaskedLM", *HEADS}
    for name, (problems, hf_outputs) in results.items():
        assert not problems, name
        outputs = run_bertsmith(tmp_path / name, name)
        for output, hf_output in zip(outputs, hf_outputs, strict=True):
            torch.testing.assert_close(output, torch.tensor(hf_output), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM", *HEADS])
def test_round_trip_through_transformers_is_exact(name: str, tmp_path: Path) -> None:
    """Loading and saving a model with transformers preserves all weights."""
    if name in HEADS:
        model: Any = HEADS[name].build_model(make_prime_size_config())
        bundle.save_fine_tuned(tmp_path / "bertsmith", model, make_tokenizer(), HEADS[name], {})
    else:
        model = randomize_weights(
            BertForPreTraining(make_prime_size_config(nsp=name == "BertForPreTraining"))
        )
        bundle.save(tmp_path / "bertsmith", model, make_tokenizer(), {})
    model_class = getattr(transformers, name)
    model_class.from_pretrained(tmp_path / "bertsmith").save_pretrained(tmp_path / "transformers")
    make_tokenizer().save(tmp_path / "transformers")
    load_model = bundle.load_fine_tuned if name in HEADS else bundle.load
    state = load_model(tmp_path / "transformers").model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key


def test_model_card_has_the_provenance(tmp_path: Path) -> None:
    """The hub's parser reads the card's metadata, and the card does not contain local folders."""
    info = {
        "recipe": "fast",
        "heldout_metrics": {"mlm_loss": 2.5, "steps": 7},
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
        randomize_weights(BertForPreTraining(make_prime_size_config())),
        make_tokenizer(),
        info,
    )
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.language == "ko"
    assert card.data.base_model == "acme/tiny-bert"
    assert card.data.pipeline_tag == "fill-mask"
    assert card.data.library_name == "transformers"
    assert card.data.license is None
    for text in (
        "`corpus.jsonl.xz`",
        "1,234 documents",
        "| mlm_loss | 2.5 |",
        "recipe: fast",
        "2 layers, width 21, 3 attention heads",
    ):
        assert text in card.content, text
    assert "# license: fill this in" in (tmp_path / "m" / "README.md").read_text()
    assert "somebody" not in card.content


def test_model_card_of_a_task_has_labels_and_results(tmp_path: Path) -> None:
    """The card of a fine-tuned model has the task, its labels and its results."""
    head = HeadConfig("single", ("bad", "a|b"))
    info = {
        "task": "sst-2",
        "heldout_metrics": {"accuracy": 0.925},
        "provenance": {
            "task": {"train_file": "/home/somebody/SST-2/train.tsv"},
            "run": {"start_from": "/home/somebody/my-run/model", "seed": 3},
        },
    }
    bundle.save_fine_tuned(
        tmp_path / "m", head.build_model(make_prime_size_config()), make_tokenizer(), head, info
    )
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.base_model is None
    for text in (
        "# BERT fine-tuned on sst-2",
        "- bad",
        "- a\\|b",
        "| accuracy | 0.925 |",
        "`train.tsv`",
        "started from `my-run`",
        "seed: 3",
    ):
        assert text in card.content, text
    assert "somebody" not in card.content


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Any) -> None:
    """Replace the stored tensors by the result of ``change``, a function of the tensors by name."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)
