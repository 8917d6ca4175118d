"""The directory of a fine-tuned model: what transformers makes of it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertModel,
)

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, load_fine_tuned, load_for_fine_tuning, save_fine_tuned
from bertsmith.errors import ModelError
from bertsmith.model.packed import pack_sequences
from bertsmith.model.task_models import TaskModel
from tests.model.examples import make_tokenizer, prime_config

HEADS = [
    HeadConfig("single", ("bad", "fair", "good")),
    HeadConfig("multi", ("red", "green", "blue", "black", "white")),
    HeadConfig("regression"),
    HeadConfig("entities", ("O", "B-X", "I-X")),
    HeadConfig("tags", ("NN", "VB")),
    HeadConfig("choice"),
    HeadConfig("span"),
]
#: The class that transformers has for a kind of model, where it is not that for sequences.
CLASSES: dict[str, Any] = {
    "choice": AutoModelForMultipleChoice,
    "entities": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
    "tags": AutoModelForTokenClassification,
}
ROWS = [([2, 17, 5, 3, 9, 3], [0, 0, 0, 0, 1, 1]), ([2, 8, 3], [0, 0, 0])]


def saved(directory: Path, head: HeadConfig) -> TaskModel:
    """Save a random model, and return it."""
    torch.manual_seed(5)
    config = prime_config(init_range=0.3)
    model = head.build_model(config).eval()
    save_fine_tuned(directory, model, make_tokenizer(config.vocab_size), head, {"task": "none"})
    return model


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_transformers_loads_the_same_numbers(tmp_path: Path, head: HeadConfig) -> None:
    """The matching class, no missing or unexpected key, the labels, and equal logits to 1e-5."""
    model = saved(tmp_path / "m", head)
    auto = CLASSES.get(head.kind, AutoModelForSequenceClassification)
    peer, told = auto.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    if head.labels:
        assert tuple(peer.config.id2label[n] for n in range(head.num_outputs)) == head.labels
    with torch.no_grad():
        found = model(pack_sequences(ROWS))
        rows = found if len(found) == len(ROWS) else found.split([len(ids) for ids, _ in ROWS])
        for (ids, segments), row in zip(ROWS, rows, strict=True):
            # [1, S], and for a choice [1, 1, S]: one prompt with one ending.
            one = [torch.tensor(each)[None] for each in (ids, segments)]
            one = [each[None] for each in one] if head.kind == "choice" else one
            said = peer.eval()(input_ids=one[0], token_type_ids=one[1])
            if head.kind == "span":
                wanted = torch.stack([said.start_logits, said.end_logits], -1)
            else:
                wanted = said.logits
            torch.testing.assert_close(row[None], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_a_round_trip_changes_nothing(tmp_path: Path, head: HeadConfig) -> None:
    """What was saved is loaded: weights, labels, kind."""
    model = saved(tmp_path / "m", head)
    found = load_fine_tuned(tmp_path / "m")
    assert found.head == head
    assert not found.model.training
    for name, value in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name


def test_a_start_takes_the_encoder_and_draws_the_rest(tmp_path: Path) -> None:
    """From a pre-trained directory all but the output layer; from another task's likewise."""
    saved(tmp_path / "m", HEADS[0])
    before = load_file(tmp_path / "m" / bundle.WEIGHTS_FILE)
    torch.manual_seed(1)
    found = load_for_fine_tuning(tmp_path / "m", HEADS[1])
    assert found.info["new"] == ["output.bias", "output.weight"]
    assert len(found.model.state_dict()["output.bias"]) == 5
    state = bundle.to_hf_state_dict(found.model.state_dict())
    for name, value in before.items():
        if not name.startswith("classifier"):
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("pooler", [True, False])
def test_a_bare_encoder_is_a_start(tmp_path: Path, pooler: bool) -> None:
    """Transformers' BertModel, whose names lack "bert.", gives the same hidden states."""
    config = prime_config()
    torch.manual_seed(2)
    peer = BertModel(
        BertConfig(
            **{k: v for k, v in bundle.to_hf_config(config).items() if k != "architectures"}
        ),
        add_pooling_layer=pooler,
    ).eval()
    peer.save_pretrained(tmp_path)
    make_tokenizer(config.vocab_size).save(tmp_path)
    found = load_for_fine_tuning(tmp_path, HEADS[0])
    new = {name for name in found.info["new"] if name.startswith("pooler.")}
    assert new == (set() if pooler else {"pooler.dense.bias", "pooler.dense.weight"})
    ids = torch.tensor([ROWS[0][0]])
    with torch.no_grad():
        wanted = peer(ids, token_type_ids=torch.tensor([ROWS[0][1]])).last_hidden_state[0]
        torch.testing.assert_close(
            found.model.eval().bert(pack_sequences(ROWS[:1])), wanted, rtol=0, atol=1e-5
        )


def test_what_is_not_fine_tuned_is_refused(tmp_path: Path) -> None:
    """A pre-trained model has no labels: the message says which verb makes one."""
    saved(tmp_path / "m", HEADS[0])
    config = (tmp_path / "m" / "config.json").read_text()
    (tmp_path / "m" / "config.json").write_text(
        config.replace("BertForSequenceClassification", "BertForPreTraining")
    )
    with pytest.raises(ModelError, match=r"BertForPreTraining, not fine-tuned.*bertsmith finetune"):
        load_fine_tuned(tmp_path / "m")


def test_a_missing_weight_is_told(tmp_path: Path) -> None:
    """An encoder without one of its tensors is no start."""
    saved(tmp_path / "m", HEADS[0])
    file = tmp_path / "m" / bundle.WEIGHTS_FILE
    weights = load_file(file)
    del weights["bert.embeddings.LayerNorm.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"bert\.embeddings\.LayerNorm\.bias' is missing"):
        load_for_fine_tuning(tmp_path / "m", HEADS[0])
