"""How one text or two become the sequence that a model takes: [CLS] A [SEP] B [SEP].

It never knows what is asked of them.
"""

from collections.abc import Sequence

from bertsmith.tasks.inputs import TokenSequence
from bertsmith.text.wordpiece import Tokenizer


def add_special_tokens(texts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> TokenSequence:
    """Return the ids [CLS] A [SEP] or [CLS] A [SEP] B [SEP], and the segment of each."""
    ids, segments = [tokenizer.cls_id], [0]
    for segment, own in enumerate(texts):
        ids += [*own, tokenizer.sep_id]
        segments += [segment] * (len(own) + 1)
    return ids, segments


def truncate_texts(ids: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """Cut one or two texts to ``room`` ids together, each at its end, the longer one first.

    Both long: the shorter one keeps half, as ``tokenizers`` truncates ("longest_first").
    """
    if len(ids) == 1:
        return [ids[0][:room]]
    sizes = [len(own) for own in ids]
    if sum(sizes) > room:
        short = min(*sizes, room // 2)
        first_is_longer = sizes[0] > sizes[1]
        sizes = [room - short, short] if first_is_longer else [short, room - short]
    return [own[:size] for own, size in zip(ids, sizes, strict=True)]
