"""Imports all command modules, which registers their commands with the application."""

from bertsmith.cli import compare as compare
from bertsmith.cli import corpus as corpus
from bertsmith.cli import demo as demo
from bertsmith.cli import embed as embed
from bertsmith.cli import evaluate as evaluate
from bertsmith.cli import export as export
from bertsmith.cli import extend as extend
from bertsmith.cli import fill as fill
from bertsmith.cli import finetune as finetune
from bertsmith.cli import finetune_embed as finetune_embed
from bertsmith.cli import finetune_rerank as finetune_rerank
from bertsmith.cli import import_ as import_
from bertsmith.cli import inspect as inspect
from bertsmith.cli import lab as lab
from bertsmith.cli import pair as pair
from bertsmith.cli import panel as panel
from bertsmith.cli import predict as predict
from bertsmith.cli import prepare as prepare
from bertsmith.cli import pretrain as pretrain
from bertsmith.cli import push as push
from bertsmith.cli import rerank as rerank
from bertsmith.cli import score as score
from bertsmith.cli import search as search
from bertsmith.cli import serve as serve
from bertsmith.cli import similar as similar
from bertsmith.cli import vocab as vocab
