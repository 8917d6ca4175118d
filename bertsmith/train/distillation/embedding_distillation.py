"""Distillation of sentence embeddings: teacher and student models, texts, and teacher's vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.bundle import EncoderBundle, load_encoder, locate_model
from bertsmith.errors import RunError, SettingsError
from bertsmith.files import name_paths
from bertsmith.interop.sentence_transformers import (
    Dense,
    PoolingConfig,
    build_embedding_model,
    check_is_expressible,
    read_pooling,
)
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding
from bertsmith.progress import Progress
from bertsmith.runtime.device import Machine
from bertsmith.tasks.embedding_columns import (
    has_columns,
    open_rows,
    read_first_row,
    resolve_columns,
)
from bertsmith.tasks.embedding_data import (
    EncodedTexts,
    TextCollector,
    TextPrompts,
    TokenizeTexts,
    get_row_texts,
)
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.tables import has_txt_suffix
from bertsmith.train.distillation.embedding_objective import (
    EmbeddingDistillationObjective,
    HeldoutSet,
    TeacherAgreement,
)
from bertsmith.train.distillation.settings import DistillRunSettings, DistillSettings
from bertsmith.train.distillation.student import check_same_tokenizer, copy_teacher_weights
from bertsmith.train.distillation.teacher_cache import cache_outputs
from bertsmith.train.embedding.evaluation import encode_texts
from bertsmith.train.embedding.start_model import (
    EmbeddingBundle,
    load_start_model,
    save_embedder,
)
from bertsmith.train.embedding.training_data import (
    build_tokenize_function,
    get_text_prompts,
    list_hashed_files,
    read_heldout_file,
)

#: Rows of the teacher's vectors that are read together to compute principal components.
_PCA_CHUNK_ROWS = 65536


def build_embedding_settings(distill: DistillSettings) -> EmbeddingSettings:
    """Return the settings with which tables and models are read as those of embedding models."""
    columns = {"text": distill.text_column, "pair": distill.pair_column}
    targets = {"score": distill.score_column, "label": distill.label_column}
    # Validation tables that the options do not describe have columns with standard names.
    has_pair_or_target = any([distill.pair_column, *targets.values()])
    return EmbeddingSettings(
        train_files=distill.train_files,
        validation_files=distill.validation_files,
        columns=TextColumns.parse(columns, "the settings"),
        validation_columns=TextColumns.parse(
            columns | targets if has_pair_or_target else {}, "the settings"
        ),
        encoding=distill.encoding,
        delimiter=distill.delimiter,
        skip_invalid=distill.skip_invalid,
    )


@dataclass(frozen=True)
class EmbeddingDistillation:
    """The models and data of a run with the objective ``embedding``.

    Attributes:
        teacher: The teacher.
        student: The student.
        settings: Settings of the run.
        texts: All distinct training texts.
        train_texts: int64 [n], the numbers of the texts that are trained on.
        heldout_texts: int64 [m], the numbers of the other texts, if there are no validation files.
        heldout: Validation sets by name.
        counts: For each file, how many examples were read and skipped.
    """

    teacher: EmbeddingBundle
    student: EmbeddingBundle
    settings: DistillRunSettings
    texts: EncodedTexts
    train_texts: NDArray[np.int64]
    heldout_texts: NDArray[np.int64]
    heldout: dict[str, HeldoutSet]
    counts: dict[str, ExampleCounts]

    @classmethod
    def load(
        cls, settings: DistillRunSettings, *, reads_data: bool = True
    ) -> "EmbeddingDistillation":
        """Load the teacher, build the student, and read the texts.

        Args:
            settings: Settings of the run.
            reads_data: Whether to read the texts; without them, the student can only be saved.

        Raises:
            BertsmithError: If a model or file is invalid, or the student does not suit the teacher.
        """
        distill = settings.distill
        reading = build_embedding_settings(distill)
        teacher = load_start_model(Path(distill.teacher), reading, {})
        max_seqlen = _resolve_max_seqlen(settings, teacher)
        pooling = replace(teacher.pooling, max_seq_length=max_seqlen)
        student = build_student(replace(teacher, pooling=pooling), settings)
        _check_projection(teacher, student, distill)
        settings = settings.model_copy(
            update={"distill": distill.model_copy(update={"max_seqlen": max_seqlen})}
        )
        if not reads_data:
            none = np.empty(0, np.int64)
            no_texts = EncodedTexts(np.empty(0, np.int32), np.zeros(1, np.int64), none)
            return cls(teacher, student, settings, no_texts, none, none, {}, {})
        tokenize = build_tokenize_function(teacher.encoder.tokenizer, pooling)
        files = [Path(file) for file in distill.train_files]
        prompts = get_text_prompts(pooling)
        if pooling.default_prompt_name is None:
            # Indexes are embedded with the prompt of documents.
            prompts = replace(prompts, text=prompts.document)
        texts, counts = read_texts(files, reading, tokenize, prompts)
        heldout: dict[str, HeldoutSet] = {}
        for name, file in distill.validation_files.items():
            heldout[name], counts[name] = read_heldout_file(
                Path(file), reading, tokenize, TextColumns(), student.pooling
            )
        order = np.random.default_rng(0).permutation(len(texts))
        num_heldout = 0
        if not heldout:
            if len(texts) == 1:
                raise RunError(
                    f"{', '.join(distill.train_files)}: 1 distinct text is too few to hold one "
                    "out; give more texts"
                )
            num_heldout = max(1, round(distill.validation_fraction * len(texts)))
            num_heldout = min(num_heldout, distill.max_validation_examples, len(texts) - 1)
        train_texts, heldout_texts = order[num_heldout:], order[:num_heldout]
        return cls(
            teacher, student, settings, texts, np.sort(train_texts), np.sort(heldout_texts),
            heldout, counts,
        )  # fmt: skip

    @property
    def model(self) -> BertForSentenceEmbedding:
        """The student."""
        return self.student.model

    @property
    def batch_tokens(self) -> int:
        """Approximate number of tokens per step."""
        batch_size = min(self.settings.distill.batch_size or 1, len(self.train_texts))
        return round(batch_size * len(self.texts.ids) / len(self.texts))

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics of the first set; the first metric selects the best epoch."""
        first = next(iter(self.heldout.values()), None)
        return list(TeacherAgreement.metric_names) if first is None else list(first.metric_names)

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the first metric is better."""
        first = next(iter(self.heldout.values()), None)
        return True if first is None else first.higher_is_better

    def describe(self) -> str:
        """Return a description of the data and the loss."""
        distill = self.settings.distill
        widths = f"vectors of width {self.student.pooling.output_width(self.model.config.width)}"
        return (
            f"{len(self.train_texts):,} distinct texts, loss {distill.embedding_loss}, {widths}, "
            f"texts of up to {distill.max_seqlen} tokens"
        )

    def build_objective(
        self, run: Path, machine: Machine, progress: Progress
    ) -> EmbeddingDistillationObjective:
        """Compute or open the teacher's vectors, and return the objective of the training loop."""
        targets = self.compute_targets(run, machine, progress)
        heldout = dict(self.heldout)
        if not heldout:
            heldout["heldout"] = TeacherAgreement(
                self.texts, self.heldout_texts, targets, self.student.pooling.truncate_dim
            )
        distill = self.settings.distill
        assert distill.batch_size is not None
        return EmbeddingDistillationObjective(
            self.model,
            self.texts,
            self.train_texts,
            targets,
            heldout,
            machine,
            self.student.encoder.tokenizer,
            loss=distill.embedding_loss,
            batch_size=distill.batch_size,
            micro_batch_tokens=self.settings.run.micro_batch_tokens,
            seed=self.settings.run.seed,
        )

    def compute_targets(
        self, run: Path, machine: Machine, progress: Progress
    ) -> NDArray[np.floating[Any]]:
        """Return the vector that the student learns for each text, [number of texts, W]."""
        teacher = self.teacher.model.to(machine.device)
        teacher.bert.kernel = machine.kernel
        width = self.teacher.pooling.output_width(teacher.config.width)

        def compute_rows(start: int, end: int) -> NDArray[np.float32]:
            return encode_texts(teacher, machine, self.texts, np.arange(start, end))

        distill = self.settings.distill
        vectors = cache_outputs(
            run, len(self.texts), width, distill.fingerprint, compute_rows, progress
        )
        teacher.cpu()
        student_width = self.student.pooling.output_width(self.model.config.width)
        if student_width == width:
            return vectors
        components = compute_principal_components(vectors, self.train_texts, student_width)
        progress.log(
            f"principal components: {student_width} of {width} dimensions keep "
            f"{components.energy:.1%} of the squared length of the teacher's vectors"
        )
        return components.project(vectors)

    def save(self, directory: Path, info: Mapping[str, Any]) -> None:
        """Write the student as a sentence-transformers directory."""
        save_embedder(directory, self.student, {"task": "embed", **info})


def _resolve_max_seqlen(settings: DistillRunSettings, teacher: EmbeddingBundle) -> int:
    """Return the maximum number of tokens of a text: by default that of the teacher, if possible.

    Raises:
        SettingsError: If the teacher or the student takes fewer tokens than the settings require.
    """
    max_seqlen = settings.distill.max_seqlen
    if max_seqlen is None:
        assert teacher.pooling.max_seq_length is not None
        return min(teacher.pooling.max_seq_length, settings.model.max_positions)
    teacher.encoder.config.check_max_seqlen("distill.max_seqlen", max_seqlen, "the teacher")
    settings.model.check_max_seqlen("distill.max_seqlen", max_seqlen, "the student")
    return max_seqlen


def list_data_files(distill: DistillSettings) -> list[Path]:
    """Return all data files, and the files of folders in BEIR's format that are read."""
    return list_hashed_files(build_embedding_settings(distill))


def read_texts(
    files: Sequence[Path],
    settings: EmbeddingSettings,
    tokenize: TokenizeTexts,
    prompts: TextPrompts,
) -> tuple[EncodedTexts, dict[str, ExampleCounts]]:
    """Return the distinct texts of all text columns of all tables, and the counts of each table.

    Args:
        files: The tables.
        settings: Columns of the tables and how to read them.
        tokenize: Tokenizes texts that include their prompts.
        prompts: The prompts of texts, queries and documents.

    Raises:
        TaskError: If a table cannot be read or has an invalid row.
    """
    collector = TextCollector(tokenize, prompts)
    all_counts: dict[str, ExampleCounts] = {}
    for file, name in zip(files, name_paths(files), strict=True):
        named_columns = get_training_columns(file, settings)
        columns = resolve_columns(file, settings, named_columns)
        counts = ExampleCounts()
        all_counts["train" if len(files) == 1 else f"train {name}"] = counts
        with open_rows(file, settings, columns, counts.notes) as rows:
            for row in rows:
                with counts.count_example(row.location, settings):
                    collector.add_row(get_row_texts(row, columns), columns.kind, counts)
        collector.flush(counts)
        counts.require_examples([None] * counts.num_used, file)
    return collector.collect(), all_counts


def get_training_columns(file: Path, settings: EmbeddingSettings) -> TextColumns:
    """Return the named columns of a training table; none for a text file with a text per line.

    A .txt file is a table if its first row has the columns. Otherwise the names are those of the
    validation tables.
    """
    columns = settings.columns
    if not has_txt_suffix(file) or not columns.list_columns():
        return columns
    first_row = read_first_row(file, settings, columns)
    is_table = first_row is not None and has_columns(first_row, columns)
    return columns if is_table else TextColumns()


@dataclass(frozen=True)
class PrincipalComponents:
    """Directions in which vectors are longest.

    Attributes:
        directions: float32 [W, K], orthonormal columns.
        energy: The share of the squared length of the vectors that the K dimensions keep.
    """

    directions: NDArray[np.float32]
    energy: float

    def project(self, vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Return the vectors in K dimensions: [n, W] -> float32 [n, K]."""
        return np.concatenate(
            [
                vectors[start : start + _PCA_CHUNK_ROWS].astype(np.float32) @ self.directions
                for start in range(0, len(vectors), _PCA_CHUNK_ROWS)
            ]
        )


def compute_principal_components(
    vectors: NDArray[np.floating[Any]], rows: NDArray[np.int64], num_components: int
) -> PrincipalComponents:
    """Return the eigenvectors of X^T X with the largest eigenvalues, where X are the vectors.

    The mean is not subtracted, so that inner products are kept as well as possible.

    Args:
        vectors: float16 or float32 [n, W].
        rows: The rows that are used.
        num_components: K, at most W.
    """
    width = vectors.shape[1]
    products = np.zeros((width, width))
    for start in range(0, len(rows), _PCA_CHUNK_ROWS):
        chunk = vectors[rows[start : start + _PCA_CHUNK_ROWS]].astype(np.float64)
        products += chunk.T @ chunk
    eigenvalues, eigenvectors = np.linalg.eigh(products)
    directions = eigenvectors[:, ::-1][:, :num_components].astype(np.float32)
    energy = float(eigenvalues[::-1][:num_components].sum() / eigenvalues.sum())
    return PrincipalComponents(np.ascontiguousarray(directions), energy)


def _check_projection(
    teacher: EmbeddingBundle, student: EmbeddingBundle, distill: DistillSettings
) -> None:
    """Raise SettingsError if principal components are too few for the student's vectors.

    Otherwise, this would be noticed after the teacher has encoded all texts.
    """
    widths = [
        bundle.pooling.output_width(bundle.encoder.config.width) for bundle in (teacher, student)
    ]
    if distill.projection == "pca" and widths[1] > widths[0]:
        raise SettingsError(
            f"the student's vectors have {widths[1]} dimensions and the teacher's {widths[0]}, so "
            "there are too few principal components; use --projection dense"
        )


def build_student(teacher: EmbeddingBundle, settings: DistillRunSettings) -> EmbeddingBundle:
    """Return the student at the start of a run, drawn from PyTorch's default generator.

    Raises:
        ModelError: If the start model cannot be loaded, or has another tokenizer.
    """
    distill = settings.distill
    config = settings.model
    tokenizer = teacher.encoder.tokenizer
    if distill.size is None and not distill.student_layers:
        path = locate_model(settings.run.start_from)
        encoder = load_encoder(path, config_overrides=config.get_dropout_rates())
        check_same_tokenizer(tokenizer, encoder.tokenizer, path)
        pooling = read_pooling(path) or teacher.pooling
    else:
        bert = BertForPreTraining(config).bert
        if distill.student_layers:
            copy_teacher_weights(bert, teacher.encoder.model, distill.student_layers)
        path = teacher.encoder.path
        encoder = EncoderBundle(bert.eval(), tokenizer, config, path)
        pooling = teacher.pooling
    check_is_expressible(encoder)
    pooling = _match_width(pooling, teacher, encoder, distill)
    pooling = replace(
        pooling,
        max_seq_length=teacher.pooling.max_seq_length,
        prompts=teacher.pooling.prompts,
        default_prompt_name=teacher.pooling.default_prompt_name,
        matryoshka_dims=(),
    )
    return EmbeddingBundle(encoder, pooling, build_embedding_model(encoder.model, pooling))


def _match_width(
    pooling: PoolingConfig,
    teacher: EmbeddingBundle,
    student: EncoderBundle,
    distill: DistillSettings,
) -> PoolingConfig:
    """Return the student's pooling config, with a Dense module if the widths differ.

    Args:
        pooling: The pooling config of the teacher, or of the model that the student starts from.
        teacher: The teacher.
        student: The student's encoder.
        distill: How to match the widths.
    """
    width = teacher.pooling.output_width(teacher.encoder.config.width)
    hidden_width = student.config.width * len(pooling.modes)
    has_teacher_width = student.config.width == teacher.encoder.config.width
    normalize: tuple[Literal["normalize"], ...] = (
        ("normalize",) if teacher.pooling.is_normalized else ()
    )
    if has_teacher_width and pooling is teacher.pooling:
        return pooling
    if pooling is teacher.pooling:
        pooling = replace(pooling, post_modules=normalize)
    if pooling.output_width(student.config.width) == width or distill.projection == "pca":
        return pooling
    weight = torch.empty(width, hidden_width)
    torch.nn.init.normal_(weight, std=hidden_width**-0.5)
    dense = Dense(weight, None, "Identity")
    return replace(pooling, post_modules=(dense, *normalize))
