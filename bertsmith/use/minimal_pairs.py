"""Evaluate a model on minimal pairs, as in BLiMP.

A minimal pair is an acceptable sentence and an unacceptable one that differs as little as possible
(Warstadt et al. 2020, arXiv:1912.00582).
The model is correct if the acceptable sentence has the higher pseudo-log-likelihood (PLL).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.files import check_new_file
from bertsmith.progress import NullProgress, Progress
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.tables import Row, get_text, read_rows
from bertsmith.tasks.text_files import UTF8, detect_table_format
from bertsmith.use.inputs import chunked
from bertsmith.use.model_setup import ModelOrPath, resolve_model
from bertsmith.use.pseudo_log_likelihood import (
    PLL_VARIANTS,
    PllVariant,
    check_variants,
    compute_log_probabilities,
)
from bertsmith.use.score import find_problem
from bertsmith.use.table_output import (
    RowWriter,
    TableLayout,
    get_output_format,
    open_row_writer,
)

#: Columns of the acceptable and the unacceptable sentence, as in BLiMP.
SENTENCE_COLUMNS = ("sentence_good", "sentence_bad")
#: Number of pairs scored together, so that sequences of similar length can share a batch.
_CHUNK_SIZE = 512


@dataclass(frozen=True)
class MinimalPairAccuracy:
    """Accuracy on the minimal pairs of one or more files.

    Attributes:
        num_pairs: Number of scored pairs.
        num_correct: Number of pairs whose acceptable sentence has the higher PLL, by PLL variant.
        num_ties: Number of pairs whose sentences have equal PLLs. They are not correct.
    """

    num_pairs: int
    num_correct: Mapping[PllVariant, int]
    num_ties: Mapping[PllVariant, int]

    @property
    def accuracy(self) -> dict[PllVariant, float]:
        """Fraction of correct pairs, by PLL variant."""
        return {variant: count / self.num_pairs for variant, count in self.num_correct.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the accuracy and the counts for JSON."""
        return {
            "num_pairs": self.num_pairs,
            "accuracy": {to_field_name(variant): value for variant, value in self.accuracy.items()},
            "num_ties": {to_field_name(variant): count for variant, count in self.num_ties.items()},
        }


@dataclass(frozen=True)
class MinimalPairResults:
    """Accuracy on files of minimal pairs.

    Attributes:
        files: The accuracy on each file.
        num_skipped: Number of pairs that cannot be scored and were skipped.
        first_skipped: Location and problem of the first skipped pair; None if none was skipped.
    """

    files: Mapping[Path, MinimalPairAccuracy]
    num_skipped: int = 0
    first_skipped: str | None = None

    @property
    def overall(self) -> MinimalPairAccuracy:
        """The accuracy on the pairs of all files."""
        results = list(self.files.values())
        variants = list(results[0].num_correct)
        return MinimalPairAccuracy(
            num_pairs=sum(result.num_pairs for result in results),
            num_correct={
                variant: sum(result.num_correct[variant] for result in results)
                for variant in variants
            },
            num_ties={
                variant: sum(result.num_ties[variant] for result in results) for variant in variants
            },
        )

    @property
    def mean_accuracy(self) -> dict[PllVariant, float]:
        """Unweighted mean of the accuracies on the files, by PLL variant."""
        accuracies = [result.accuracy for result in self.files.values()]
        return {
            variant: math.fsum(accuracy[variant] for accuracy in accuracies) / len(accuracies)
            for variant in accuracies[0]
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the results for JSON."""
        means = {to_field_name(variant): value for variant, value in self.mean_accuracy.items()}
        return {
            **self.overall.as_dict(),
            "mean_accuracy": means,
            "num_skipped": self.num_skipped,
            "files": [
                {"file": str(file), **result.as_dict()} for file, result in self.files.items()
            ],
        }


def to_field_name(variant: PllVariant) -> str:
    """Return the name of a PLL variant in JSON and in columns, such as ``within_word``."""
    return variant.replace("-", "_")


def evaluate_minimal_pairs(
    model: ModelOrPath,
    files: Sequence[Path | str] | Path | str,
    *,
    variants: Sequence[PllVariant] = PLL_VARIANTS,
    skip_invalid: bool = False,
    encoding: str = UTF8,
    max_pairs: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> MinimalPairResults:
    """Compute the accuracy of a model with a masked-LM head on minimal pairs.

    All files are read and checked before the first pair is scored. Sentences are never truncated.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        files: JSON lines or other tables with the columns ``sentence_good`` and ``sentence_bad``,
            or folders of such files; or a single one.
        variants: Which tokens are masked when a token is predicted; see ``score``.
        skip_invalid: Whether invalid pairs are skipped and counted, instead of being an error.
        encoding: Text encoding of the files.
        max_pairs: Maximum number of pairs of each file, the first ones; None for all.
        out: A new table for the scores of each pair. The suffix of its name determines its format.
        progress: Receives the number of scored tokens.

    Raises:
        ModelError: The model has no masked-LM head.
        InputError: There are no pairs, a variant is unknown, or ``out`` cannot be written.
        BertsmithError: A file cannot be read, lacks a column, or has an empty or too long sentence.
    """
    if isinstance(files, str | Path):
        files = [files]
    check_variants(variants)
    if out is not None:
        _check_score_file(out, files)
    bundle = resolve_model(model)
    bundle.require_mlm_head()
    paths = find_pair_files(files)
    readers = {
        path: _PairReader(bundle, path, encoding, skip_invalid=skip_invalid, max_pairs=max_pairs)
        for path in paths
    }
    num_tokens = sum(reader.count_tokens() for reader in readers.values())
    progress = progress or NullProgress()
    with _open_score_writer(out, variants) as writer:
        progress.start("minimal pairs", num_tokens * len(variants), "tokens")
        try:
            results = {
                path: _evaluate_file(bundle, reader, variants, writer, progress)
                for path, reader in readers.items()
            }
        finally:
            progress.finish()
    num_skipped = sum(reader.num_skipped for reader in readers.values())
    first_skipped = next(filter(None, (reader.first_skipped for reader in readers.values())), None)
    return MinimalPairResults(results, num_skipped, first_skipped)


def find_pair_files(files: Sequence[Path | str]) -> list[Path]:
    """Return the files, without repetitions. A folder stands for the tables in it.

    Raises:
        InputError: A file or folder does not exist, or a folder contains no tables.
    """
    paths: list[Path] = []
    for path in map(Path, files):
        if not path.exists():
            raise InputError(f"{path}: no such file or folder; expected minimal pairs")
        if not path.is_dir():
            paths.append(path)
            continue
        tables = sorted(file for file in path.iterdir() if detect_table_format(file) is not None)
        if not tables:
            raise InputError(f"{path}: no tables in this folder; expected files such as *.jsonl")
        paths += tables
    if not paths:
        raise InputError("no files: expected at least one file of minimal pairs")
    return list(dict.fromkeys(paths))


def read_sentences(path: Path, max_pairs: int | None = None) -> list[str]:
    """Return both sentences of each minimal pair of a file, without checking them.

    Args:
        path: A table with the columns ``sentence_good`` and ``sentence_bad``.
        max_pairs: Maximum number of pairs, the first ones; None for all.

    Raises:
        InputError: A sentence is missing.
    """
    sentences = []
    for row in islice(read_rows(path), max_pairs):
        try:
            sentences += [get_text(row, column) for column in SENTENCE_COLUMNS]
        except BadExampleError as error:
            raise InputError(f"{row.location}: {error}") from None
    return sentences


@dataclass(frozen=True)
class _Pair:
    """A minimal pair.

    Attributes:
        number: Number of the row in its file, from 1.
        sentences: The acceptable and the unacceptable sentence.
        ids: Token ids of the two sentences.
    """

    number: int
    sentences: tuple[str, str]
    ids: tuple[list[int], list[int]]


class _PairReader:
    """Reads and checks the pairs of a file, any number of times.

    Attributes:
        path: The file.
        num_skipped: Number of invalid pairs that were skipped in the last reading.
        first_skipped: Location and problem of the first of them; None if there is none.
    """

    def __init__(
        self,
        bundle: PretrainedBundle,
        path: Path,
        encoding: str,
        *,
        skip_invalid: bool,
        max_pairs: int | None,
    ) -> None:
        self.path = path
        self.num_skipped = 0
        self.first_skipped: str | None = None
        self._bundle = bundle
        self._encoding = encoding
        self._skip_invalid = skip_invalid
        self._max_pairs = max_pairs

    def count_tokens(self) -> int:
        """Read the file and return the number of tokens in all its sentences.

        Raises:
            InputError: A pair is invalid, or the file has no pairs.
        """
        num_tokens = num_pairs = 0
        for chunk in self.iter_chunks():
            num_pairs += len(chunk)
            num_tokens += sum(len(ids) for pair in chunk for ids in pair.ids)
        if not num_pairs and self.first_skipped is not None:
            raise InputError(
                f"{self.path}: no valid minimal pair; the first problem: {self.first_skipped}"
            )
        if not num_pairs:
            raise InputError(f"{self.path}: no minimal pairs in this file; expected at least one")
        return num_tokens

    def iter_chunks(self) -> Iterator[list[_Pair]]:
        """Yield lists of valid pairs.

        Raises:
            InputError: A pair is invalid, and invalid pairs are not skipped.
        """
        self.num_skipped, self.first_skipped = 0, None
        number = 0
        all_rows = read_rows(self.path, encoding=self._encoding)
        for rows in chunked(islice(all_rows, self._max_pairs), _CHUNK_SIZE):
            numbered_rows, sentences = [], []
            for row in rows:
                number += 1
                try:
                    sentences += [get_text(row, column) for column in SENTENCE_COLUMNS]
                except BadExampleError as error:
                    self._handle_problem(row, str(error))
                else:
                    numbered_rows.append((number, row))
            yield list(self._encode(numbered_rows, sentences))

    def _encode(
        self, numbered_rows: Sequence[tuple[int, Row]], sentences: Sequence[str]
    ) -> Iterator[_Pair]:
        """Yield the pairs whose sentences can be scored.

        Args:
            numbered_rows: The row of each pair, with its number in the file.
            sentences: The acceptable and the unacceptable sentence of each row, alternating.
        """
        encoded = self._bundle.tokenizer.encode_batch(sentences)
        for index, (number, row) in enumerate(numbered_rows):
            good_index, bad_index = 2 * index, 2 * index + 1
            pair = _Pair(
                number,
                sentences=(sentences[good_index], sentences[bad_index]),
                ids=(encoded[good_index], encoded[bad_index]),
            )
            problem = self._find_pair_problem(pair)
            if problem is None:
                yield pair
            else:
                self._handle_problem(row, problem)

    def _find_pair_problem(self, pair: _Pair) -> str | None:
        """Return why a pair cannot be scored; None if it can."""
        for column, ids in zip(SENTENCE_COLUMNS, pair.ids, strict=True):
            problem = find_problem(self._bundle, ids)
            if problem is not None:
                return f"{column} is {problem}"
        return None

    def _handle_problem(self, row: Row, problem: str) -> None:
        """Record an invalid pair if invalid pairs are skipped; otherwise raise InputError."""
        if not self._skip_invalid:
            raise InputError(
                f"{row.location}: {problem}; correct it, or skip such pairs with --skip-invalid"
            )
        self.num_skipped += 1
        self.first_skipped = self.first_skipped or f"{row.location}: {problem}"


def _evaluate_file(
    bundle: PretrainedBundle,
    reader: _PairReader,
    variants: Sequence[PllVariant],
    writer: RowWriter | None,
    progress: Progress,
) -> MinimalPairAccuracy:
    """Compute the accuracy on a file, and write the scores of its pairs if there is a writer."""
    num_pairs = 0
    num_correct, num_ties = dict.fromkeys(variants, 0), dict.fromkeys(variants, 0)
    for pairs in reader.iter_chunks():
        sequences = [ids for pair in pairs for ids in pair.ids]
        log_probabilities = compute_log_probabilities(bundle, sequences, variants, progress)
        plls = {
            variant: [math.fsum(values) for values in log_probabilities[variant]]
            for variant in variants
        }
        num_pairs += len(pairs)
        for variant, values in plls.items():
            differences = [good - bad for good, bad in zip(values[::2], values[1::2], strict=True)]
            num_correct[variant] += sum(difference > 0 for difference in differences)
            num_ties[variant] += sum(difference == 0 for difference in differences)
        if writer is not None and pairs:
            writer.append(_build_score_rows(reader.path, pairs, plls))
    return MinimalPairAccuracy(num_pairs, num_correct, num_ties)


def _check_score_file(out: Path, files: Sequence[Path | str]) -> None:
    """Check that the table of scores can be written, and that no folder of pairs contains it.

    The next evaluation of such a folder would read the table as minimal pairs.

    Args:
        out: The table of scores.
        files: Files of minimal pairs, or folders of such files.

    Raises:
        InputError: The format of ``out`` is unknown, it exists already, or its folder does not
            exist or is one of ``files``.
    """
    get_output_format(out)
    check_new_file(out)
    if any(out.resolve().parent == Path(file).resolve() for file in files):
        raise InputError(
            f"{out}: the next evaluation of the folder {out.parent} would read this table as "
            "minimal pairs; write it to another folder"
        )


@contextmanager
def _open_score_writer(
    out: Path | None, variants: Sequence[PllVariant]
) -> Iterator[RowWriter | None]:
    """Yield a writer for the table of scores, or None if ``out`` is None."""
    if out is None:
        yield None
        return
    types = {"file": "text", "row": "index", **dict.fromkeys(SENTENCE_COLUMNS, "text")}
    types |= {column: "number" for variant in variants for column in _get_score_columns(variant)}
    layout = TableLayout(get_output_format(out), list(types), types=types)
    with open_row_writer(out, layout) as writer:
        yield writer


def _get_score_columns(variant: PllVariant) -> tuple[str, str]:
    """Return the columns of the PLLs of the acceptable and the unacceptable sentence."""
    return f"pll_good_{to_field_name(variant)}", f"pll_bad_{to_field_name(variant)}"


def _build_score_rows(
    path: Path, pairs: Sequence[_Pair], plls: Mapping[PllVariant, Sequence[float]]
) -> list[dict[str, Any]]:
    """Return the rows of the table of scores.

    Args:
        path: The file of the pairs.
        pairs: The pairs.
        plls: By variant, the PLLs of the two sentences of each pair, alternating.
    """
    rows = []
    for index, pair in enumerate(pairs):
        row: dict[str, Any] = {"file": str(path), "row": pair.number}
        row.update(zip(SENTENCE_COLUMNS, pair.sentences, strict=True))
        for variant, values in plls.items():
            pair_plls = values[2 * index : 2 * index + 2]
            row.update(zip(_get_score_columns(variant), pair_plls, strict=True))
        rows.append(row)
    return rows
