"""``bertsmith evaluate --minimal-pairs``, and the masked-LM head that it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bertsmith.bundle import load
from bertsmith.bundle.mlm_head import check_mlm_head
from bertsmith.errors import ModelError
from bertsmith.use.minimal_pairs import evaluate_minimal_pairs
from tests.cli.conftest import SENTENCES, RunCli


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """A file of three minimal pairs; the sentences of the last one have the same tokens."""
    pairs = [
        (SENTENCES[0], SENTENCES[0].replace("crossed", "crossing")),
        ("The old pilot knew the river.", "The old pilot know the river."),
        ("The ferry crossed.", "the ferry crossed."),
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(
            json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in pairs
        )
    )
    return path


@pytest.fixture
def model_without_mlm_head(model: Path, tmp_path: Path) -> Path:
    """A copy of the model without the weights of the masked-LM head."""
    directory = tmp_path / "encoder"
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    encoder = {name: value for name, value in weights.items() if "cls." not in name}
    save_file(encoder, directory / "model.safetensors")
    return directory


def test_accuracy_of_each_file_and_overall(
    run_cli: RunCli, model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    """Several files may follow the option; each has a row, and ties are reported."""
    second_file = tmp_path / "second.jsonl"
    second_file.write_text(pairs_file.read_text().partition("\n")[0])
    completed = run_cli("evaluate", model, "--minimal-pairs", pairs_file, second_file)
    assert completed.status == 0, completed.err
    results = evaluate_minimal_pairs(load(model), [pairs_file, second_file])
    header, first_row, second_row, all_row, mean_row = completed.out.splitlines()
    assert header.split() == ["pairs", "original", "within-word"]
    for row, name, num_pairs, accuracy in (
        (first_row, str(pairs_file), ["3"], results.files[pairs_file].accuracy),
        (second_row, str(second_file), ["1"], results.files[second_file].accuracy),
        (all_row, "all pairs", ["4"], results.overall.accuracy),
        (mean_row, "mean of files", [], results.mean_accuracy),
    ):
        assert row.startswith(name)
        cells = [*num_pairs, *(f"{value:.4f}" for value in accuracy.values())]
        assert row.removeprefix(name).split() == cells
    assert "ties with --pll original, counted as incorrect: 1" in completed.err


def test_json_and_out_contain_the_selected_variant(
    run_cli: RunCli, model: Path, pairs_file: Path, tmp_path: Path
) -> None:
    """--json prints an object, --out writes a row for each pair, --pll selects a variant."""
    out = tmp_path / "scores.jsonl"
    options = ["--pll", "within-word", "--json", "--out", out]
    completed = run_cli("evaluate", model, "--minimal-pairs", pairs_file, *options)
    result = json.loads(completed.out)
    accuracy = evaluate_minimal_pairs(load(model), [pairs_file]).overall.accuracy["within-word"]
    assert result["accuracy"] == {"within_word": accuracy}
    assert result["num_ties"] == {"within_word": 1}
    assert (result["num_pairs"], result["num_skipped"]) == (3, 0)
    assert result["files"][0]["file"] == str(pairs_file)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3
    assert rows[2]["pll_good_within_word"] == rows[2]["pll_bad_within_word"]
    assert f"wrote {out}: 3 pairs" in completed.err


def test_invalid_pairs_can_be_skipped(run_cli: RunCli, model: Path, pairs_file: Path) -> None:
    """An invalid pair is an error with file and line; --skip-invalid counts it."""
    pairs_file.write_text(pairs_file.read_text() + '{"sentence_good": "ferry"}\n')
    completed = run_cli("evaluate", model, "--minimal-pairs", pairs_file)
    assert completed.status == 2
    assert f"{pairs_file}, line 4: there is no column 'sentence_bad'" in completed.err
    completed = run_cli("evaluate", model, "--minimal-pairs", pairs_file, "--skip-invalid")
    assert completed.status == 0
    assert f"skipped 1 pair; the first: {pairs_file}, line 4" in completed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "add --data FILE, --minimal-pairs FILE, --embeddings FILE or --rer"),
        (["--minimal-pairs", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--minimal-pairs", "PAIRS", "--metric", "f1"], "--metric: not valid with"),
        (["--minimal-pairs", "PAIRS", "--out", "x.txt"], "x.txt: expected a name that ends in"),
        (["--data", "PAIRS", "--pll", "original"], "--pll: only valid with --minimal-pairs"),
        (["PAIRS", "--data", "PAIRS"], "unexpected argument; use --data FILE"),
    ],
)
def test_invalid_options_are_errors(
    run_cli: RunCli, model: Path, pairs_file: Path, arguments: list[str], message: str
) -> None:
    """Invalid options exit with 2 and print one message."""
    paths = {"PAIRS": pairs_file}
    completed = run_cli("evaluate", model, *[paths.get(word, word) for word in arguments])
    assert completed.status == 2
    assert completed.err.count("error: ") == 1
    assert message in completed.err


@pytest.mark.parametrize(
    "arguments", [["score"], ["fill", "a [MASK]"], ["evaluate", "--minimal-pairs", "PAIRS"]]
)
def test_models_without_mlm_head_are_errors(
    run_cli: RunCli, model_without_mlm_head: Path, pairs_file: Path, arguments: list[str]
) -> None:
    """Commands that predict masked tokens name the missing head."""
    command, *other_arguments = [pairs_file if word == "PAIRS" else word for word in arguments]
    completed = run_cli(command, model_without_mlm_head, *other_arguments, stdin=b"ferry\n")
    assert completed.status == 2
    assert f"{model_without_mlm_head}: this model has no masked-LM head" in completed.err


def test_missing_mlm_head_is_detected_without_torch(
    model: Path, model_without_mlm_head: Path
) -> None:
    """The check reads only the names of the tensors and does not load torch."""
    check_mlm_head(model)
    with pytest.raises(ModelError, match="no masked-LM head"):
        check_mlm_head(model_without_mlm_head)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bertsmith.bundle.mlm_head import check_mlm_head\n"
        "from bertsmith.errors import ModelError\n"
        "try:\n"
        "    check_mlm_head(Path(sys.argv[1]))\n"
        "except ModelError:\n"
        "    print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(model_without_mlm_head)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert completed.stdout == "False\n", completed.stderr


def test_within_word_masking_changes_the_scores(run_cli: RunCli, model: Path) -> None:
    """--pll within-word prints other scores than the default, original."""
    text = "Nobody remembered."
    original = run_cli("score", model, "--text", text).out
    assert run_cli("score", model, "--text", text, "--pll", "original").out == original
    within_word = run_cli("score", model, "--text", text, "--pll", "within-word").out
    assert within_word.split("\t")[3:] == original.split("\t")[3:]
    assert within_word != original
