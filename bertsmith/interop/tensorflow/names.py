"""Names of BERT's variables in TensorFlow: in the original code, and in the official TF2 model.

Original names are derived by rules from Hugging Face's names, which model directories use. Official
names are derived from the original names.
"""

import re
from collections.abc import Iterable
from typing import Final

WORD_EMBEDDINGS: Final = "bert/embeddings/word_embeddings"
POSITION_EMBEDDINGS: Final = "bert/embeddings/position_embeddings"
SEGMENT_EMBEDDINGS: Final = "bert/embeddings/token_type_embeddings"
FIRST_FEED_FORWARD_KERNEL: Final = "bert/encoder/layer_0/intermediate/dense/kernel"
#: Names of the output weights in run_classifier.py and run_squad.py of the original code.
CLASSIFIER_WEIGHTS: Final = "output_weights"
SQUAD_WEIGHTS: Final = "cls/squad/output_weights"

#: Hugging Face name -> original name of variables whose names do not follow the rule, because they
#: do not belong to a dense layer in the original code.
_IRREGULAR_NAMES: Final = {
    "cls.predictions.bias": "cls/predictions/output_bias",
    "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
    "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    "classifier.weight": CLASSIFIER_WEIGHTS,
    "classifier.bias": "output_bias",
    "qa_outputs.weight": SQUAD_WEIGHTS,
    "qa_outputs.bias": "cls/squad/output_bias",
}
#: Replacements that convert original names to names of the official TF2 model, applied in this
#: order (tensorflow/models, tf1_bert_checkpoint_converter_lib.py).
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
#: Matches the names of Adam's moments, the step number, TF2 optimizer slots and the save counter.
_TRAINING_STATE: Final = re.compile(
    r"/adam_[mv]$|^global_step$|^beta[12]_power$|^save_counter$|\.OPTIMIZER_SLOT|^optimizer/|^Adam"
)
#: Parts of variable names that identify architectures other than BERT.
_OTHER_ARCHITECTURES: Final = (
    ("embedding_hidden_mapping_in", "ALBERT"),
    ("embedding_projection", "ALBERT"),
    ("electra/", "ELECTRA"),
    ("discriminator_predictions/", "ELECTRA"),
    ("model/transformer/", "XLNet"),
)
_LAYER: Final = re.compile(r"^bert/encoder/layer_(\d{1,6})/")


def to_original_name(hf_name: str) -> str:
    """Convert a Hugging Face weight name to the original BERT's variable name."""
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
    """Return whether a variable is stored as [in, out], unlike PyTorch's weights [out, in]."""
    return name.endswith("/kernel")


def to_official_name(original_name: str) -> str:
    """Convert an original variable name to the name in the official TF2 model."""
    name = original_name
    for old, new in _OFFICIAL_REPLACEMENTS:
        name = name.replace(old, new)
    return name


def is_training_state(name: str) -> bool:
    """Return whether a tensor belongs to the optimizer or the training state, not to the model."""
    return _TRAINING_STATE.search(name) is not None


def detect_non_bert_architecture(names: Iterable[str]) -> str | None:
    """Return the architecture that the variable names indicate; None for BERT or if unknown."""
    all_names = list(names)
    for part, architecture in _OTHER_ARCHITECTURES:
        if any(part in name for name in all_names):
            return architecture
    return None


def count_layers(names: Iterable[str]) -> int:
    """Return the number of encoder layers in original variable names."""
    return len({match[1] for name in names if (match := _LAYER.match(name))})
