"""The inputs of the panel: files of public tasks, and the loss on held-out text."""

import math
from pathlib import Path

import pytest

from bertsmith.bundle import load
from bertsmith.errors import TaskError
from bertsmith.lab.panel.cost import count_pll_work
from bertsmith.lab.panel.data import PanelData
from bertsmith.lab.panel.held_out import compute_mlm_loss, measure_held_out, sample_sentences
from bertsmith.lab.panel.tasks import TASKS
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.progress import NullProgress
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.use.minimal_pairs import evaluate_minimal_pairs
from bertsmith.use.score import score
from tests.lab.panel.conftest import SENTENCES


def make_data(folder: Path) -> PanelData:
    """Return the inputs in a folder."""
    return PanelData(folder, None, (), folder / "splits")


def test_nsmc_is_split_without_its_test_set(tmp_path: Path) -> None:
    """A fifth of a small training file is held out; the test file need not exist."""
    rows = [f"{number}\t영화 {number}\t{number % 2}\n" for number in range(50)]
    (tmp_path / "nsmc").mkdir()
    (tmp_path / "nsmc" / "ratings_train.txt").write_text("id\tdocument\tlabel\n" + "".join(rows))
    files = make_data(tmp_path).find_files(TASKS["nsmc"])
    train, dev = (files[role].read_text().splitlines(keepends=True) for role in ("train", "dev"))
    assert train[0] == dev[0] == "id\tdocument\tlabel\n"
    assert len(dev) == 11
    assert sorted(train[1:] + dev[1:]) == sorted(rows)
    assert make_data(tmp_path).find_files(TASKS["nsmc"]) == files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 examples, too few to hold some out for validation"),
        (b"id\tdocument\tlabel\n1\ta\t0\n2\tb\t1\n", "2 examples, too few"),
        ("id\tdocument\tlabel\n1\t영화\t0\n".encode("cp949"), "not UTF-8 text"),
    ],
)
def test_file_that_cannot_be_split_is_an_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """An empty file, two examples or another encoding are errors that name the file."""
    (tmp_path / "nsmc").mkdir()
    (tmp_path / "nsmc" / "ratings_train.txt").write_bytes(content)
    with pytest.raises(TaskError, match=rf"ratings_train\.txt: {message}"):
        make_data(tmp_path).find_files(TASKS["nsmc"])
    assert not (tmp_path / "splits").exists()


def test_klue_ner_without_training_file_splits_the_validation_file(tmp_path: Path) -> None:
    """Sentences are held out as a unit; with a training file, both files are used unchanged."""
    folder = tmp_path / "korean" / "klue-ner"
    folder.mkdir(parents=True)
    sentences = [f"## s{number}\n가\tB-PS\n나\tO" for number in range(10)]
    dev_file = folder / "klue-ner-v1.1_dev.tsv"
    dev_file.write_text("\n\n".join(sentences) + "\n")
    files = make_data(tmp_path).find_files(TASKS["klue-ner"])
    parts = [files[role].read_text().strip().split("\n\n") for role in ("train", "dev")]
    assert [len(part) for part in parts] == [8, 2]
    assert sorted(parts[0] + parts[1]) == sorted(sentences)
    (folder / "klue-ner-v1.1_train.tsv").write_text("\n\n".join(sentences))
    assert make_data(tmp_path).find_files(TASKS["klue-ner"])["dev"] == dev_file


def test_validation_files_are_never_test_sets(tmp_path: Path) -> None:
    """Tasks whose reader lists a test set too use only the validation set."""
    for task in TASKS.values():
        if not task.public_task:
            continue
        folder = tmp_path / task.folders[-1]
        folder.mkdir(parents=True, exist_ok=True)
        public = PUBLIC_TASKS[task.public_task]
        for name in (public.train_file, *public.dev_files.values()):
            (folder / name).write_text("header\n" + "".join(f"{row}\n" for row in range(9)))
        for file in make_data(tmp_path).find_files(task).values():
            assert "test" not in file.name
            assert "ratings_test" not in file.parent.name


def test_bits_per_character_is_the_negative_pll_per_character(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """The sum of within-word PLLs in bits is divided by the characters of the sentences."""
    stage = Stage("held-out-text", {"sentences": 3}, {},
                  {"text": data / "text.txt", "model": model_dirs[0]})  # fmt: skip
    result = measure_held_out(Job(stage, tmp_path / "out", {}, NullProgress()))
    sentences = sample_sentences([data / "text.txt"], 3)
    assert len(sentences) == 3
    scores = score(model_dirs[0], sentences, variant="within-word")
    bits = -sum(sentence.total for sentence in scores) / math.log(2)
    num_characters = sum(map(len, sentences))
    assert result["metrics"]["bits_per_character"] == pytest.approx(bits / num_characters)
    assert result["num_characters"] == num_characters


def test_text_without_a_sentence_that_fits_is_an_error(
    model_dirs: list[Path], tmp_path: Path
) -> None:
    """If all sentences are too long for the model, the message says so."""
    text = tmp_path / "text.txt"
    text.write_text("q x z j w v k p " * 12 + ".\n")
    stage = Stage("held-out-text", {"sentences": 3}, {}, {"text": text, "model": model_dirs[0]})
    with pytest.raises(TaskError, match=r"no sentence .* takes at most 46 tokens"):
        measure_held_out(Job(stage, tmp_path / "out", {}, NullProgress()))


def test_masked_lm_loss_of_uniform_predictions_is_the_log_of_the_vocabulary(
    model_dirs: list[Path],
) -> None:
    """With zero logits the loss is ln V; it is deterministic."""
    bundle = load(model_dirs[0])
    sequences = bundle.tokenizer.encode_batch(SENTENCES)
    assert compute_mlm_loss(bundle, sequences) == compute_mlm_loss(bundle, sequences)
    bundle.model.bert.embeddings.words.weight.data.zero_()
    assert compute_mlm_loss(bundle, sequences) == pytest.approx(math.log(bundle.config.vocab_size))


def test_pll_work_counts_the_tokens_of_all_masked_copies(model_dirs: list[Path]) -> None:
    """A sentence of n tokens has n copies of n + 2 tokens, and more for the second variant."""
    tokenizer = load(model_dirs[0]).tokenizer
    # "cats" has two tokens, so the second variant has one more copy.
    ids = tokenizer.encode("the cats")
    num_continuations = sum(bool(tokenizer.is_continuation[token]) for token in ids)
    assert num_continuations == len(ids) - 2 > 0
    work = count_pll_work(tokenizer, ["the cats"], ["within-word"])
    assert work.forward_tokens == len(ids) * (len(ids) + 2)
    work = count_pll_work(tokenizer, ["the cats"], ["original", "within-word"])
    assert work.forward_tokens == (len(ids) + num_continuations) * (len(ids) + 2)


def test_max_pairs_uses_the_first_pairs_of_each_file(model_dirs: list[Path], data: Path) -> None:
    """``max_pairs`` limits the pairs that are read."""
    results = evaluate_minimal_pairs(model_dirs[0], [data / "pairs.jsonl"], max_pairs=2)
    assert results.overall.num_pairs == 2
