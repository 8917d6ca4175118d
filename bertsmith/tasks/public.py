"""The public tasks by name: which files, columns, labels and metrics are theirs.

It never knows how a file is read.

GLUE: Wang et al. 2018 (arXiv:1804.07461); the metrics are those of its table 1. NSMC: Naver
sentiment movie corpus. KorSTS: Ham et al. 2020 (arXiv:2004.03289).
"""

from dataclasses import dataclass, field, replace

from bertsmith.bundle import Kind


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a task's texts and labels stand. ``pair`` is None where there is one text."""

    train: str = "train.tsv"
    #: Held-out files, by what people call them; the first one decides.
    dev: dict[str, str] = field(default_factory=lambda: {"dev": "dev.tsv"})
    #: The test file without labels, where the task has one.
    test: str | None = "test.tsv"
    text: str
    pair: str | None = None
    label: str = "label"
    header: bool = True
    #: The column of the text in the test file, where it has another name there.
    test_text: str | None = None

    def of_test(self) -> "Source":
        """Return where the texts of the test file stand: it always has a header."""
        return replace(self, text=self.test_text or self.text, header=True)


@dataclass(frozen=True, kw_only=True)
class PublicTask:
    """A task that people know by name. The first metric is the one that decides."""

    source: Source
    kind: Kind = "single"
    labels: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ("accuracy",)


_ENTAILMENT = ("entailment", "not_entailment")
_BITS = ("0", "1")

TASKS: dict[str, PublicTask] = {
    "cola": PublicTask(
        source=Source(text="3", label="1", header=False, test_text="sentence"),
        labels=_BITS, metrics=("matthews", "accuracy"),
    ),
    "sst-2": PublicTask(source=Source(text="sentence"), labels=_BITS),
    "mrpc": PublicTask(
        source=Source(text="#1 String", pair="#2 String", label="Quality"),
        labels=_BITS, metrics=("f1", "accuracy"),
    ),
    "sts-b": PublicTask(
        source=Source(text="sentence1", pair="sentence2", label="score"),
        kind="regression", metrics=("spearman", "pearson"),
    ),
    "qqp": PublicTask(
        source=Source(text="question1", pair="question2", label="is_duplicate"),
        labels=_BITS, metrics=("f1", "accuracy"),
    ),
    "mnli": PublicTask(
        source=Source(
            dev={"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
            test="test_matched.tsv", text="sentence1", pair="sentence2", label="gold_label",
        ),
        labels=("contradiction", "entailment", "neutral"),
    ),
    "qnli": PublicTask(source=Source(text="question", pair="sentence"), labels=_ENTAILMENT),
    "rte": PublicTask(source=Source(text="sentence1", pair="sentence2"), labels=_ENTAILMENT),
    "wnli": PublicTask(source=Source(text="sentence1", pair="sentence2"), labels=_BITS),
    "nsmc": PublicTask(
        source=Source(
            train="ratings_train.txt", dev={"test": "ratings_test.txt"}, test=None, text="document"
        ),
        labels=_BITS,
    ),
    "korsts": PublicTask(
        source=Source(
            train="sts-train.tsv", dev={"dev": "sts-dev.tsv"}, test=None,
            text="sentence1", pair="sentence2", label="score",
        ),
        kind="regression", metrics=("spearman", "pearson"),
    ),
}  # fmt: skip
