"""Accuracy on minimal pairs: results, files, and invalid pairs."""

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import BertsmithError, InputError, ModelError
from bertsmith.use.minimal_pairs import MinimalPairResults, evaluate_minimal_pairs
from bertsmith.use.pseudo_log_likelihood import PLL_VARIANTS, PllVariant
from bertsmith.use.score import score
from tests.use.conftest import MAX_POSITIONS

#: Three pairs of sentences.
SENTENCES = [
    "The smith worked there until dark.",
    "The smiths working there until dark.",
    "He lifted it, turned it once, and struck.",
    "He lifted it, turned it once.",
    "Some questions had answers.",
    "Some question had the answers of the hammer.",
]


def write_pairs(path: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    """Write minimal pairs in the format of BLiMP and return the path."""
    rows = [
        {"sentence_good": good, "sentence_bad": bad, "UID": path.stem, "pairID": str(number)}
        for number, (good, bad) in enumerate(pairs)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sort_by_score(
    model: PretrainedBundle, pair: tuple[str, str], variant: PllVariant
) -> tuple[str, str]:
    """Return the sentence with the higher PLL first."""
    first, second = sorted(pair, key=lambda text: -score(model, text, variant=variant).total)
    return first, second


@pytest.fixture
def evaluate_files(pretrained: PretrainedBundle) -> Callable[..., MinimalPairResults]:
    """A function that calls ``evaluate_minimal_pairs`` with the random model."""

    def evaluate_pretrained(*files: Path, **options: object) -> MinimalPairResults:
        return evaluate_minimal_pairs(pretrained, files, **options)  # type: ignore[arg-type]

    return evaluate_pretrained


@pytest.mark.parametrize("variant", PLL_VARIANTS)
def test_pair_is_correct_if_its_acceptable_sentence_scores_higher(
    evaluate_files: Callable[..., MinimalPairResults],
    pretrained: PretrainedBundle,
    tmp_path: Path,
    variant: PllVariant,
) -> None:
    """The accuracy is the fraction of pairs whose good sentence has the higher score."""
    pairs = [
        sort_by_score(pretrained, pair, variant)
        for pair in zip(SENTENCES[::2], SENTENCES[1::2], strict=True)
    ]
    inverted_pairs = [(bad, good) for good, bad in pairs]
    # The vocabulary is lowercase, so these sentences have the same tokens.
    tie = (SENTENCES[0], SENTENCES[0].upper())
    first = write_pairs(tmp_path / "first.jsonl", [*pairs, tie])
    second = write_pairs(tmp_path / "second.jsonl", [inverted_pairs[0], pairs[1]])
    results = evaluate_files(first, second)
    assert results.files[first].accuracy[variant] == 3 / 4
    assert results.files[first].num_ties[variant] == 1
    assert results.files[second].accuracy[variant] == 1 / 2
    assert results.overall.num_pairs == 6
    assert results.overall.accuracy[variant] == 4 / 6
    assert results.mean_accuracy[variant] == pytest.approx((3 / 4 + 1 / 2) / 2)


def test_out_contains_the_scores_of_each_pair(
    evaluate_files: Callable[..., MinimalPairResults], pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """The table of scores has a row for each pair, with the sums that ``score`` returns."""
    pairs = list(zip(SENTENCES[::2], SENTENCES[1::2], strict=True))
    file = write_pairs(tmp_path / "pairs.jsonl", pairs)
    out = tmp_path / "scores.csv"
    evaluate_files(file, out=out)
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["sentence_good"], row["sentence_bad"]) for row in rows] == pairs
    assert [row["file"] for row in rows] == [str(file)] * 3
    assert [row["row"] for row in rows] == ["1", "2", "3"]
    for row, (good, bad) in zip(rows, pairs, strict=True):
        for variant, suffix in zip(PLL_VARIANTS, ("original", "within_word"), strict=True):
            expected = [score(pretrained, text, variant=variant).total for text in (good, bad)]
            values = [float(row[f"pll_{name}_{suffix}"]) for name in ("good", "bad")]
            assert values == pytest.approx(expected, abs=1e-4)


def test_scores_in_a_folder_of_pairs_are_an_error(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path
) -> None:
    """The next evaluation of the folder would count the pairs in the table of scores again."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    file = write_pairs(folder / "first.jsonl", [(SENTENCES[0], SENTENCES[1])])
    with pytest.raises(InputError, match="would read this table as minimal pairs"):
        evaluate_files(folder, out=folder / "scores.csv")
    assert list(folder.iterdir()) == [file]
    # A file of pairs does not stand for the other files in its folder.
    evaluate_files(file, out=folder / "scores.csv")


def test_csv_gives_the_results_of_json_lines(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path
) -> None:
    """Pairs in CSV get the same results as pairs in JSON lines."""
    pairs = list(zip(SENTENCES[::2], SENTENCES[1::2], strict=True))
    expected = evaluate_files(write_pairs(tmp_path / "pairs.jsonl", pairs))
    table = tmp_path / "pairs.csv"
    with table.open("w", newline="") as stream:
        csv.writer(stream).writerows([("sentence_good", "sentence_bad"), *pairs])
    assert evaluate_files(table).overall == expected.overall


def test_only_the_requested_variant_is_computed(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path
) -> None:
    """With one variant, the results of this variant are the same, and there are no others."""
    pairs = list(zip(SENTENCES[::2], SENTENCES[1::2], strict=True))
    file = write_pairs(tmp_path / "pairs.jsonl", pairs)
    num_correct_by_variant = evaluate_files(file).overall.num_correct
    results = evaluate_files(file, variants=["within-word"])
    assert results.overall.num_correct == {"within-word": num_correct_by_variant["within-word"]}
    assert list(results.as_dict()["accuracy"]) == ["within_word"]


def test_folder_stands_for_its_tables(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path
) -> None:
    """A folder stands for the tables in it, in order of their names; repeated files count once."""
    folder = tmp_path / "blimp"
    folder.mkdir()
    second = write_pairs(folder / "second.jsonl", [(SENTENCES[0], SENTENCES[1])])
    first = write_pairs(folder / "first.jsonl", [(SENTENCES[2], SENTENCES[3])])
    (folder / "README.md").write_text("sentence_good")
    assert list(evaluate_files(folder, second).files) == [first, second]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no tables in this folder"):
        evaluate_files(tmp_path / "empty")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sentence_good": "iron"}', "line 2: there is no column 'sentence_bad'"),
        ('{"sentence_good": "iron", "sentence_bad": 3}', "line 2: a value that is not text"),
        ('{"sentence_good": "iron", "sentence_bad": " "}', "line 2: an empty text in column"),
        ('{"sentence_good": "\\u200b", "sentence_bad": "x"}', "sentence_good is empty: there is"),
        ('{"sentence_good": "a", "sentence_bad": "' + "the smith " * 40 + '"}',
         f"sentence_bad is too long: 80 tokens, this model takes at most {MAX_POSITIONS - 2}"),
        ("sentence_good", "line 2: a line that is not JSON"),
    ],
)  # fmt: skip
def test_invalid_pairs_are_errors_or_skipped(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path, line: str, message: str
) -> None:
    """An invalid pair is an error with file and line before any output, or it is skipped."""
    file = write_pairs(tmp_path / "pairs.jsonl", [(SENTENCES[0], SENTENCES[1])])
    file.write_text(file.read_text() + line + "\n")
    out = tmp_path / "scores.jsonl"
    with pytest.raises(BertsmithError, match=r"pairs\.jsonl, line 2: ") as error:
        evaluate_files(file, out=out)
    assert message in str(error.value)
    assert not out.exists()
    results = evaluate_files(file, skip_invalid=True)
    assert results.overall.num_pairs == 1
    assert results.num_skipped == 1
    assert message in str(results.first_skipped)


def test_files_without_pairs_are_errors(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path
) -> None:
    """A missing file, an empty file, and a table without the columns are errors."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(InputError, match=r"empty\.jsonl: no minimal pairs in this file"):
        evaluate_files(empty)
    with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file or folder"):
        evaluate_files(tmp_path / "nowhere.jsonl")
    empty.write_text('{"sentence_good": "", "sentence_bad": "x"}\n')
    with pytest.raises(InputError, match=r"no valid minimal pair; the first problem: .* line 1: "):
        evaluate_files(empty, skip_invalid=True)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "iron"}\n')
    with pytest.raises(BertsmithError, match="line 1: there is no column 'sentence_good'"):
        evaluate_files(other)


def test_path_of_a_model_is_accepted(model_dir: Path, tmp_path: Path) -> None:
    """``bertsmith.evaluate_minimal_pairs`` accepts the path of a model."""
    file = write_pairs(tmp_path / "pairs.jsonl", [(SENTENCES[0], SENTENCES[1])])
    accuracy = bertsmith.evaluate_minimal_pairs(model_dir, [file]).overall.accuracy
    assert all(math.isclose(value, 0) or math.isclose(value, 1) for value in accuracy.values())
    # A single path is a file, not a sequence of characters.
    assert bertsmith.evaluate_minimal_pairs(model_dir, str(file)).overall.accuracy == accuracy


def test_wrong_arguments_are_errors(
    evaluate_files: Callable[..., MinimalPairResults], tmp_path: Path
) -> None:
    """An unknown or missing variant, and a model of another kind, are errors with a reason."""
    file = write_pairs(tmp_path / "pairs.jsonl", [(SENTENCES[0], SENTENCES[1])])
    with pytest.raises(InputError, match="no PLL variant; expected 'original' or 'within-word'"):
        evaluate_files(file, variants=())
    with pytest.raises(InputError, match="unknown PLL variant: 'other'"):
        evaluate_files(file, variants=("other",))
    model: Any = object()
    with pytest.raises(ModelError, match="expected a pre-trained model, found object"):
        bertsmith.evaluate_minimal_pairs(model, [file])
