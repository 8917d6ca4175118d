"""``bertsmith export``: convert a model to another format."""

from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.cli.model_options import Model, check_readable, find_model, read_lines
from bertsmith.errors import InputError, SettingsError
from bertsmith.files import check_new_directory
from bertsmith.plurals import count_noun

#: For each format, the import path of the function that writes it, and the names of its options.
#: The function takes the model, the output folder and the options, and returns notes for the user.
_WRITERS = {
    "hf": ("bertsmith.interop.huggingface.write_huggingface", ("dtype",)),
    "sentence-transformers": (
        "bertsmith.interop.sentence_transformers.write_sentence_transformers",
        ("pooling", "normalize"),
    ),
    "tensorflow": ("bertsmith.interop.tensorflow.writing.write_tensorflow", ()),
    "onnx": ("bertsmith.interop.onnx.write_onnx", ("int8",)),
    "openvino": (
        "bertsmith.interop.openvino.writing.write_openvino",
        ("calibration", "pooling", "normalize"),
    ),
    "static": ("bertsmith.interop.model2vec.write_static_model", ("dims", "frequencies")),
}
#: The suggested next step for each format.
_NEXT_STEPS = {
    "hf": "bertsmith compare {model} {shell_path}",
    "sentence-transformers": 'in Python, SentenceTransformer({python_path}).encode(["..."])',
    "tensorflow": "bertsmith import {shell_path} --out DIR",
    "onnx": "in Python, open the .onnx file there with onnxruntime.InferenceSession",
    "openvino": "bertsmith embed {shell_path} LINES --out vectors.npy",
    "static": 'in Python, SentenceTransformer({python_path}).encode(["..."])',
}


@app.command(
    epilog=format_examples(
        "bertsmith export my-run --to hf --out my-model",
        "bertsmith export my-run --to onnx --int8 --out my-model-onnx",
        "bertsmith export my-run --to sentence-transformers --out my-embedder",
        "bertsmith export my-embedder --to openvino --calibration lines.txt --out out",
        "bertsmith export my-embedder --to static --out my-static",
    )
)
def export(
    model: Model,
    to: Annotated[str, typer.Option("--to", help=f"The format: {', '.join(_WRITERS)}.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    int8: Annotated[
        bool,
        typer.Option(
            "--int8",
            help="onnx: quantize the weights to 8 bits; the files are a third of the size.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="hf: dtype of the stored weights: fp32, bf16 or fp16. Files of 16-bit weights "
            "have half the size. Default: fp32."
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="sentence-transformers, openvino: mean, cls, max, and so on. Default: as the "
            "model specifies, else mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="sentence-transformers, openvino: scale vectors to length 1. Default: as the "
            "model specifies, else yes, unlike `bertsmith embed`.",
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="openvino: quantize weights and activations to 8 bits, with ranges measured on "
            "the first 300 lines of this file that are not blank, which should be like the texts "
            "to embed. Default: no quantization.",
            show_default=False,
        ),
    ] = None,
    dims: Annotated[
        int | None,
        typer.Option(
            help="static: number of dimensions of the vectors. Default: 256, or less if the "
            "model's vectors have less.",
            min=1,
        ),
    ] = None,
    frequencies: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="static: a file or folder of text in which tokens are counted, because rare ones "
            "have more weight. Default: assume that the vocabulary is sorted by frequency.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a model to another format, such as ONNX.

    The converted model computes the same outputs (nearly the same with --int8 or --calibration),
    except for static. A model that the format cannot express is rejected.

    hf: a Hugging Face model directory with a single safetensors file.

    sentence-transformers: a directory with modules.json and a pooling layer.

    tensorflow: the format of the original release. Its GELU is the tanh approximation, so the
    model must be trained with --recipe paper or --set model.activation=gelu_tanh.

    onnx: for onnxruntime, with any batch size and sequence length. For an embedding model, the
    modules after the encoder are written as for sentence-transformers.

    openvino: a directory for `bertsmith embed`, which is fast on the CPU. It has the layout of
    sentence-transformers for backend="openvino". Without --calibration, OpenVINO computes in
    bfloat16 if the CPU does so fast.

    static: a vector for each token, in the format of model2vec. The vector of a text is the mean
    of those of its tokens: much faster, and less accurate. Loads in model2vec and
    sentence-transformers.
    """
    if to not in _WRITERS:
        raise SettingsError(f"--to {to}: expected one of {', '.join(_WRITERS)}")
    writer_path, valid_options = _WRITERS[to]
    all_options: dict[str, Any] = {
        "int8": int8 or None, "dtype": dtype, "pooling": pooling, "normalize": normalize,
        "calibration": calibration, "dims": dims, "frequencies": frequencies,
    }  # fmt: skip
    options = {name: value for name, value in all_options.items() if value is not None}
    if to == "openvino" and int8:
        raise SettingsError(
            "--int8: openvino quantizes to 8 bits with --calibration FILE; replace --int8 by it, "
            "with a file of a few hundred lines like the texts to embed"
        )
    for name in sorted(set(options) - set(valid_options)):
        raise SettingsError(f"--{name}: not an option of the format {to}; remove it")
    check_new_directory(out)
    path = find_model(model)
    if calibration is not None:
        texts = _read_calibration_texts(calibration)
        log(f"quantizing with {count_noun(len(texts), 'text')}, which takes a minute or more")
        options["calibration"] = texts
    if to == "tensorflow":
        from bertsmith.interop.tensorflow.release import check_original_config

        check_original_config(path)
    module_name, _, function_name = writer_path.rpartition(".")
    write_model = getattr(import_module(module_name), function_name)
    notes: list[str] = write_model(path, out, **options)
    if as_json:
        print_json({"model": str(model), "format": to, "out": str(out), "notes": notes})
    for note in notes:
        log(f"note: {note}")
    log(f"wrote {out}")
    next_step = _NEXT_STEPS[to].format(
        model=quote_path(model), shell_path=quote_path(out), python_path=repr(str(out))
    )
    log(f"next: {next_step}")


def _read_calibration_texts(name: str) -> list[str]:
    """Return the first lines of a file that are not blank. Raises InputError if there are none."""
    from bertsmith.interop.openvino.writing import NUM_CALIBRATION_TEXTS

    check_readable(name)
    lines = (line for line in read_lines(name) if line.strip())
    texts = list(islice(lines, NUM_CALIBRATION_TEXTS))
    if not texts:
        raise InputError(
            f"--calibration {name}: no line with text; expected a few hundred lines like the texts "
            "to embed"
        )
    return texts
