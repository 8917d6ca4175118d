"""The names of BERT's variables in TensorFlow: the original's, and those of the official TF2 model.

It never knows files. The names of Hugging Face's BERT, which the model directory has, come from the
original's by rule, and so the way back is a rule too.
"""

import re
from collections.abc import Iterable
from typing import Final

WORD_EMBEDDINGS: Final = "bert/embeddings/word_embeddings"
POSITION_EMBEDDINGS: Final = "bert/embeddings/position_embeddings"
SEGMENT_EMBEDDINGS: Final = "bert/embeddings/token_type_embeddings"
FIRST_FEED_FORWARD_KERNEL: Final = "bert/encoder/layer_0/intermediate/dense/kernel"
#: Output layers of the original's run_classifier.py and run_squad.py.
CLASSIFIER_WEIGHTS: Final = "output_weights"
SQUAD_WEIGHTS: Final = "cls/squad/output_weights"

#: Where the original has no Linear but weights of its own, which it multiplies with transposed.
_OUTPUTS: Final = {
    "cls.predictions.bias": "cls/predictions/output_bias",
    "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    "classifier.weight": CLASSIFIER_WEIGHTS,
    "classifier.bias": "output_bias",
    "qa_outputs.weight": SQUAD_WEIGHTS,
    "qa_outputs.bias": "cls/squad/output_bias",
}
#: In this order from the original's names to those of the official TF2 model, as the converter
#: says that was published with it (tensorflow/models, tf1_bert_checkpoint_converter_lib.py).
_OFFICIAL: Final = (
    ("bert/", ""),
    ("encoder", "transformer"),
    ("embeddings/word_embeddings", "word_embeddings/embeddings"),
    ("embeddings/token_type_embeddings", "type_embeddings/embeddings"),
    ("embeddings/position_embeddings", "position_embedding/embeddings"),
    ("embeddings/LayerNorm", "embeddings/layer_norm"),
    ("attention/self", "self_attention"),
    ("attention/output/dense", "self_attention/attention_output"),
    ("attention/output/LayerNorm", "self_attention_layer_norm"),
    ("intermediate/dense", "intermediate"),
    ("output/dense", "output"),
    ("output/LayerNorm", "output_layer_norm"),
    ("pooler/dense", "pooler_transform"),
    ("cls/predictions", "bert/cls/predictions"),
    ("cls/predictions/output_bias", "cls/predictions/output_bias/bias"),
    ("cls/seq_relationship/output_bias", "predictions/transform/logits/bias"),
    ("cls/seq_relationship/output_weights", "predictions/transform/logits/kernel"),
)
#: Adam's averages and the step, the TF2 optimizers' slots, and the counter of saves.
_TRAINING: Final = re.compile(
    r"/adam_[mv]$|^global_step$|^beta[12]_power$|^save_counter$|\.OPTIMIZER_SLOT|^optimizer/|^Adam"
)
#: Names by which other models are known, to refuse them by their own name.
_FOREIGN: Final = (
    ("embedding_hidden_mapping_in", "ALBERT"),
    ("embedding_projection", "ALBERT"),
    ("electra/", "ELECTRA"),
    ("discriminator_predictions/", "ELECTRA"),
    ("model/transformer/", "XLNet"),
)
_LAYER: Final = re.compile(r"^bert/encoder/layer_(\d{1,6})/")


def to_original_name(name: str) -> str:
    """Return the original's name of a weight, from its name in a model directory."""
    if name in _OUTPUTS:
        return _OUTPUTS[name]
    module, _, kind = name.rpartition(".")
    path = module.replace(".layer.", ".layer_").replace(".", "/")
    if path.endswith("_embeddings"):
        return path
    if path.endswith("LayerNorm"):
        return f"{path}/{'gamma' if kind == 'weight' else 'beta'}"
    return f"{path}/{'kernel' if kind == 'weight' else kind}"


def is_transposed(name: str) -> bool:
    """Tell whether the original stores a weight turned: [in, out], where a Linear has [out, in]."""
    return name.endswith("/kernel")


def to_official_name(name: str) -> str:
    """Return the official TF2 model's name of a weight, from the original's."""
    for before, after in _OFFICIAL:
        name = name.replace(before, after)
    return name


def is_training_state(name: str) -> bool:
    """Tell whether a tensor belongs to the training, not to the model."""
    return _TRAINING.search(name) is not None


def identify_other_model(names: Iterable[str]) -> str | None:
    """Return what model the names belong to, if it is a known one that is no BERT."""
    found = list(names)
    return next((model for part, model in _FOREIGN if any(part in name for name in found)), None)


def count_layers(names: Iterable[str]) -> int:
    """Return the number of layers that the original's names speak of."""
    return len({found[1] for name in names if (found := _LAYER.match(name))})
