"""Bertsmith: train, fine-tune and use your own BERT, starting from text.

Public names are imported on first use because torch takes seconds to load.

Axis letters in shapes:

    T  tokens in a batch          F  feed-forward width
    B  sequences in a batch       V  vocabulary size
    S  maximum sequence length    L  layers
    D  width                      P  predictions
    N  attention heads            C  classes
    H  head dimension, D / N
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bertsmith.version import __version__

if TYPE_CHECKING:
    from bertsmith.bundle.pretrained import load
    from bertsmith.data.prepare import prepare
    from bertsmith.data.store import Store
    from bertsmith.model.config import ModelConfig
    from bertsmith.text.wordpiece import Tokenizer
    from bertsmith.train.distillation.distill import distill
    from bertsmith.train.embedding.finetune import finetune_embedder
    from bertsmith.train.finetuning.finetune import finetune
    from bertsmith.train.pretraining.pretrain import pretrain
    from bertsmith.train.reranking.finetune import finetune_reranker
    from bertsmith.use.answer import answer
    from bertsmith.use.attributions import attribute
    from bertsmith.use.choose import choose
    from bertsmith.use.embed import Embedder, embed
    from bertsmith.use.evaluate import evaluate
    from bertsmith.use.evaluate_embeddings import evaluate_embeddings
    from bertsmith.use.evaluate_reranker import evaluate_reranker
    from bertsmith.use.explain import attention
    from bertsmith.use.fill import fill
    from bertsmith.use.inspection.compare import compare
    from bertsmith.use.mine_negatives import mine_negatives
    from bertsmith.use.minimal_pairs import evaluate_minimal_pairs
    from bertsmith.use.pair import pair
    from bertsmith.use.predict import predict
    from bertsmith.use.quantization import quantize_model
    from bertsmith.use.rerank import rerank
    from bertsmith.use.score import score
    from bertsmith.use.search import search
    from bertsmith.use.similar import similar
    from bertsmith.use.sparse import embed_sparse

#: The module of each public name. Keep in sync with the imports for type checkers above.
_MODULE_OF_NAME = {
    "Embedder": "bertsmith.use.embed",
    "ModelConfig": "bertsmith.model.config",
    "Store": "bertsmith.data.store",
    "Tokenizer": "bertsmith.text.wordpiece",
    "answer": "bertsmith.use.answer",
    "attention": "bertsmith.use.explain",
    "attribute": "bertsmith.use.attributions",
    "choose": "bertsmith.use.choose",
    "compare": "bertsmith.use.inspection.compare",
    "distill": "bertsmith.train.distillation.distill",
    "embed": "bertsmith.use.embed",
    "embed_sparse": "bertsmith.use.sparse",
    "evaluate": "bertsmith.use.evaluate",
    "evaluate_embeddings": "bertsmith.use.evaluate_embeddings",
    "evaluate_minimal_pairs": "bertsmith.use.minimal_pairs",
    "evaluate_reranker": "bertsmith.use.evaluate_reranker",
    "fill": "bertsmith.use.fill",
    "finetune": "bertsmith.train.finetuning.finetune",
    "finetune_embedder": "bertsmith.train.embedding.finetune",
    "finetune_reranker": "bertsmith.train.reranking.finetune",
    "load": "bertsmith.bundle.pretrained",
    "mine_negatives": "bertsmith.use.mine_negatives",
    "pair": "bertsmith.use.pair",
    "predict": "bertsmith.use.predict",
    "prepare": "bertsmith.data.prepare",
    "pretrain": "bertsmith.train.pretraining.pretrain",
    "quantize_model": "bertsmith.use.quantization",
    "rerank": "bertsmith.use.rerank",
    "score": "bertsmith.use.score",
    "search": "bertsmith.use.search",
    "similar": "bertsmith.use.similar",
}

__all__ = [
    "Embedder",
    "ModelConfig",
    "Store",
    "Tokenizer",
    "__version__",
    "answer",
    "attention",
    "attribute",
    "choose",
    "compare",
    "distill",
    "embed",
    "embed_sparse",
    "evaluate",
    "evaluate_embeddings",
    "evaluate_minimal_pairs",
    "evaluate_reranker",
    "fill",
    "finetune",
    "finetune_embedder",
    "finetune_reranker",
    "load",
    "mine_negatives",
    "pair",
    "predict",
    "prepare",
    "pretrain",
    "quantize_model",
    "rerank",
    "score",
    "search",
    "similar",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
