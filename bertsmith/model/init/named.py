"""The initializations of pre-training, by the value of the setting `run.initialization`."""

from torch import Tensor

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.init.structured import (
    init_cross_segment_heads,
    init_neighbor_heads,
    init_separate_positions,
)
from bertsmith.model.init.unigram import init_from_unigrams


def apply_initialization(
    model: BertForPreTraining, initialization: str, token_counts: Tensor, cls_id: int
) -> None:
    """Change the weights of a randomly initialized model.

    Args:
        model: Changed in place.
        initialization: Value of the setting `run.initialization`.
        token_counts: int64 [V], number of occurrences of each token; not used by "random".
        cls_id: Id of the [CLS] token.
    """
    if initialization == "random":
        return
    init_from_unigrams(model, token_counts)
    if initialization == "separate-positions":
        init_separate_positions(model)
    elif initialization == "neighbor-heads":
        init_neighbor_heads(model)
    elif initialization in ("match-heads", "cross-segment-heads"):
        has_neighbor_heads = initialization == "cross-segment-heads"
        init_cross_segment_heads(model, cls_id, neighbor_heads=has_neighbor_heads)
