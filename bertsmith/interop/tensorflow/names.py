"""Variable names of BERT in TensorFlow: the original's, and those of the official TF2 model.

The original's names are derived by rule from Hugging Face's names, which model directories use.
"""

import re
from collections.abc import Iterable
from typing import Final

WORD_EMBEDDINGS: Final = "bert/embeddings/word_embeddings"
POSITION_EMBEDDINGS: Final = "bert/embeddings/position_embeddings"
SEGMENT_EMBEDDINGS: Final = "bert/embeddings/token_type_embeddings"
FIRST_FEED_FORWARD_KERNEL: Final = "bert/encoder/layer_0/intermediate/dense/kernel"
#: Output weights of the original's run_classifier.py and run_squad.py.
CLASSIFIER_WEIGHTS: Final = "output_weights"
SQUAD_WEIGHTS: Final = "cls/squad/output_weights"

#: Variables that the original creates directly rather than in a dense layer.
_IRREGULAR_NAMES: Final = {
    "cls.predictions.bias": "cls/predictions/output_bias",
    "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    "classifier.weight": CLASSIFIER_WEIGHTS,
    "classifier.bias": "output_bias",
    "qa_outputs.weight": SQUAD_WEIGHTS,
    "qa_outputs.bias": "cls/squad/output_bias",
}
#: Replacements, applied in this order, from the original's names to those of the official TF2
#: model (tensorflow/models, tf1_bert_checkpoint_converter_lib.py).
_OFFICIAL_REPLACEMENTS: Final = (
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
#: Adam's moments, the step, slots of TF2 optimizers, and the save counter.
_TRAINING_STATE: Final = re.compile(
    r"/adam_[mv]$|^global_step$|^beta[12]_power$|^save_counter$|\.OPTIMIZER_SLOT|^optimizer/|^Adam"
)
#: Parts of variable names by which other architectures are recognized.
_OTHER_ARCHITECTURES: Final = (
    ("embedding_hidden_mapping_in", "ALBERT"),
    ("embedding_projection", "ALBERT"),
    ("electra/", "ELECTRA"),
    ("discriminator_predictions/", "ELECTRA"),
    ("model/transformer/", "XLNet"),
)
_LAYER: Final = re.compile(r"^bert/encoder/layer_(\d{1,6})/")


def to_original_name(hf_name: str) -> str:
    """Return the original's variable name for a Hugging Face weight name."""
    if hf_name in _IRREGULAR_NAMES:
        return _IRREGULAR_NAMES[hf_name]
    module, _, parameter = hf_name.rpartition(".")
    path = module.replace(".layer.", ".layer_").replace(".", "/")
    if path.endswith("_embeddings"):
        return path
    if path.endswith("LayerNorm"):
        return f"{path}/{'gamma' if parameter == 'weight' else 'beta'}"
    return f"{path}/{'kernel' if parameter == 'weight' else parameter}"


def is_transposed(name: str) -> bool:
    """Return whether a variable is stored as [in, out], where a Linear has [out, in]."""
    return name.endswith("/kernel")


def to_official_name(original_name: str) -> str:
    """Return the official TF2 model's variable name for the original's."""
    name = original_name
    for old, new in _OFFICIAL_REPLACEMENTS:
        name = name.replace(old, new)
    return name


def is_training_state(name: str) -> bool:
    """Return whether a tensor is optimizer or training state rather than a weight."""
    return _TRAINING_STATE.search(name) is not None


def identify_other_model(names: Iterable[str]) -> str | None:
    """Return the architecture that variable names belong to if it is known and not BERT."""
    all_names = list(names)
    return next((architecture for part, architecture in _OTHER_ARCHITECTURES
                 if any(part in name for name in all_names)), None)  # fmt: skip


def count_layers(names: Iterable[str]) -> int:
    """Return the number of layers that occur in the original's variable names."""
    return len({match[1] for name in names if (match := _LAYER.match(name))})
