"""Invalid arguments are reported before torch is loaded, which takes seconds."""

import json
import subprocess
import sys

import pytest

from bertsmith.text.wordpiece import Tokenizer
from tests.cli.conftest import VOCAB_SIZE

#: Runs each command and prints its status, the last line of stderr, and whether torch is loaded.
PROBE = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from bertsmith.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bertsmith", *arguments]
    stderr = io.StringIO()
    status = 0
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(stderr):
            main()
    except SystemExit as system_exit:
        status = system_exit.code
    last_line = (stderr.getvalue().strip().splitlines() or [""])[-1]
    print(json.dumps([status, last_line, "torch" in sys.modules]))
"""

#: Command lines and parts of their error messages. M: model directory, S: store, T: text file,
#: t.csv: table.
INVALID_COMMANDS = [
    ("fill nowhere x", "nowhere: no such file or directory"),
    ("fill M x --device gpu", "--device gpu: expected auto"),
    ("fill M x --device cuda:x", "--device cuda:x: expected auto"),
    ("fill M x", "no [MASK] in 'x'; put [MASK] where a word is to be predicted"),
    ("predict M x", "this model is not fine-tuned on a task"),
    ("evaluate M --data T", "this model is not fine-tuned on a task"),
    ("export M --to tensorflow --out x", "the original BERT does not support activation 'gelu'"),
    ("pair M one", "only one text"),
    ("score M no.txt", "no.txt: no such file"),
    ("score M t.csv", "t.csv: a table (CSV), not one text per line"),
    ("similar M t.csv --word a", "t.csv: a table (CSV), not one text per line"),
    ("score M T --text a", "both a file and --text"),
    ("embed nowhere T", "nowhere: no such file or directory"),
    ("embed M no.txt", "no.txt: no such file"),
    ("embed M T --layer a", "--layer a: expected integers separated by commas"),
    ("embed M T --pooling median", "pooling"),
    ("embed M T --out v.csv", "expected a name that ends in"),
    ("embed M T --pooling none --out v.npy", "vectors per token can only be written to"),
    ("similar M T --word ''", "--word is empty; give a word"),
    ("similar nowhere T --word a", "nowhere: no such file or directory"),
    ("search nowhere x", "nowhere: does not exist; make an index"),
    ("predict M", "expected exactly one input, found 0; use texts, --input FILE"),
    ("predict M --input no.txt", "no.txt: no such file"),
    ("predict nowhere x", "nowhere: no such file or directory"),
    ("evaluate M --data no.tsv", "no.tsv: no such file"),
    ("evaluate nowhere --data T", "nowhere: no such file or directory"),
    ("finetune classfy --model M --data T --out r", "'classfy'; did you mean 'classify'?"),
    ("finetune embed --model M --data no.csv --out r", "no.csv: no such file"),
    ("finetune embed --model M --data t.csv --out r --loss mse", "embedding.loss: Input should"),
    ("finetune rerank --model M --data no.csv --out r", "no.csv: no such file"),
    ("finetune rerank --model M --data t.csv --out r --text q", "set pair (--pair)"),
    ("mine nowhere --data t.csv --out x.csv", "nowhere: does not exist; make an index with"),
    ("rerank M query document", "this model is not fine-tuned"),
    ("rerank M query", "give the documents either as arguments or with --documents"),
    ("evaluate M --reranking no.csv", "no.csv: no such file"),
    ("pretrain --data S", "error: --out is missing; give the run directory"),
    ("finetune sorting --model M --data T --out r", "or use `finetune embed` or `finetune rerank`"),
    ("finetune rte --model M --data T --epochs 0 --out r", "'--epochs': 0 is not above 0"),
    ("finetune embed --model M --data T --lr -1 --out r", "'--lr': -1 is not above 0"),
    ("pretrain --data S --minutes nan --out r", "'--minutes': nan is not above 0"),
    ("finetune classify --model nowhere --data T --out r", "nowhere: no such file or directory"),
    ("finetune classify --model M --data no.tsv --out r", "no.tsv: no such file"),
    ("finetune classify --model M --data T --dev no.tsv --out r", "no.tsv: no such file"),
    ("finetune classify --model M --data T --out r --set optim.learning_rate=1", "optim.learning"),
    ("finetune classify --model M --data T --out r --set model.width=8", "model.width"),
    ("finetune classify --model M --data T --out T", "this is a file"),
    ("finetune squad --model M --data M --out r", "squad expects a folder with train-v1.1.json"),
    ("pretrain --data nowhere --out r", "nowhere: no such store"),
    ("pretrain --data T --out r", "T: this is a file, not a store; give the folder that"),
    ("pretrain --data S", "--out RUN"),
    ("pretrain --data S --out r --size huge", "--size 'huge'"),
    ("pretrain --data S --out r --steps 1 --epochs 1", "only one of --steps, --epochs"),
    ("pretrain --data S --out r --set data.masking=1", "unknown setting 'data.masking'"),
    ("pretrain --data S --out r --set data.max_seqlen=9999", "data.max_seqlen is 9999, but"),
    ("pretrain --data S --out r --config no.toml", "no.toml: no such settings file"),
    ("pretrain --data S --out r --from nowhere", "nowhere: no such file or directory"),
    ("pretrain --data S --out T", "this is a file"),
    ("export M --to pickle --out x", "--to pickle: expected one of hf"),
    ("export M --to hf --int8 --out x", "--int8: not an option of the format hf"),
    ("export M --to hf --out M", "already exists"),
    ("export M --to hf --out ..", "..: not the name of a new folder"),
    ("export nowhere --to hf --out x", "nowhere: no such file or directory"),
    ("compare nowhere M", "nowhere: no such file or directory"),
    ("compare M M --text no.txt", "no.txt: no such file"),
    ("import nowhere --out x", "nowhere: no such file or directory"),
    ("push nowhere acme/bert", "nowhere: no such file or directory"),
    ("serve nowhere --port 0", "nowhere: no such file or directory"),
    ("serve M --device gpu", "--device gpu: expected auto"),
    ("vocab extend nowhere --words T --out x", "nowhere: no such file or directory"),
    ("vocab extend M --words no.txt --out x", "no.txt: no such file"),
    ("prepare T --tokenizer nowhere --out x", "nowhere"),
    ("inspect nowhere", "nowhere: no such file or directory"),
    ("lab nothing", "nothing"),
    ("corpus stats ''", "an argument is empty"),
    ("demo --out M", "M: this folder has other files"),
    ("demo --out T", "T: this is a file"),
    ("corpus stats T --language xx", "language 'xx': not a language code"),
]


@pytest.fixture(scope="module")
def outcomes(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, bool]]:
    """Status, last line of stderr, and whether torch is loaded, for each command in one process."""
    folder = tmp_path_factory.mktemp("errors")
    tokenizer.save(folder / "tokenizer")
    (folder / "T").write_text("One line.\n")
    (folder / "t.csv").write_text("text,label\none,1\n")
    corpus = folder / "a.txt"
    corpus.write_text(
        "\n\n".join(f"Line {number} is here.\nSo is {number}." for number in range(60))
    )
    # Without torch only the existence of the weights is checked, so the file may be empty.
    tokenizer.save(folder / "M")
    config = {"vocab_size": VOCAB_SIZE, "hidden_size": 8, "num_attention_heads": 2}
    (folder / "M" / "config.json").write_text(json.dumps(config))
    (folder / "M" / "model.safetensors").touch()
    commands = [["prepare", "a.txt", "--tokenizer", "tokenizer", "--workers", "1", "--out", "S"]]
    commands += [
        ["" if word == "''" else word for word in line.split()] for line, _ in INVALID_COMMANDS
    ]
    completed = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert completed.returncode == 0, completed.stderr
    prepared, *outcomes = [json.loads(line) for line in completed.stdout.splitlines()]
    assert prepared[0] == 0, prepared
    return {
        line: tuple(outcome) for (line, _), outcome in zip(INVALID_COMMANDS, outcomes, strict=True)
    }


@pytest.mark.parametrize(("line", "message"), INVALID_COMMANDS)
def test_invalid_arguments_are_reported_before_torch_is_loaded(
    outcomes: dict[str, tuple[int, str, bool]], line: str, message: str
) -> None:
    """Invalid arguments exit with 2 and a message, without loading torch."""
    status, last_line, has_torch = outcomes[line]
    assert status == 2
    assert message in last_line
    assert not has_torch
