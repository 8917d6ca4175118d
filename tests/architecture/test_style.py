"""The house rules that no linter holds.

These tests never run the package's code, they read it.
"""

import ast
from typing import Any

#: Lines of a file, and of a function without its docstring.
FILE_LINES, FUNCTION_LINES = 500, 60
#: Longer ones, each with its reason; keep this short.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
#: Where the environment may be read: the command line and the file that knows the machine.
READS_ENVIRONMENT = frozenset({"bertsmith.runtime.device"})


def _dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of a chain of names, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, docstring and signature apart."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_every_module_has_a_docstring(modules: dict[str, Any]) -> None:
    """Each module starts with a docstring that says what the module does."""
    undocumented = [
        str(module.path) for module in modules.values() if not ast.get_docstring(module.tree)
    ]
    assert not undocumented, "\n".join(undocumented)


def test_one_module_writes_tensor_files(modules: dict[str, Any]) -> None:
    """Only ``bundle.stored`` calls safetensors' writer, which ignores the umask."""
    users = [
        module.name
        for module in modules.values()
        for name, _, _ in module.imports()
        if name in ("safetensors.torch.save_file", "safetensors.numpy.save_file")
    ]
    assert users == ["bertsmith.bundle.tensor_files"]


def test_nothing_prints_outside_the_command_line(modules: dict[str, Any]) -> None:
    """Library code never prints: it returns, raises, or tells the progress it was given."""
    banned = {"print", "sys.stdout", "sys.stderr", "sys.stdout.write", "sys.stderr.write"}
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in modules.values()
        if module.room != "cli"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name | ast.Attribute) and _dotted(node) in banned
    ]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_two_places(modules: dict[str, Any]) -> None:
    """``os.environ`` is for the command line and the file that knows the machine."""
    banned = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in modules.values()
        if module.room != "cli" and module.name not in READS_ENVIRONMENT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and _dotted(node) in banned
    ]
    assert not wrong, "\n".join(wrong)


def test_no_generator_lives_in_a_module(modules: dict[str, Any]) -> None:
    """No random generator is made or seeded when a module is loaded, and none is the library's."""
    wrong = []
    for module in modules.values():
        inside = {id(node) for function in _functions(module.tree) for node in ast.walk(function)}
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            name = _dotted(node.func)
            makes = any(part in name for part in ("random", "Generator", "manual_seed"))
            shared = name.startswith("random.") and name != "random.Random"
            if (makes and id(node) not in inside) or shared:
                wrong.append(f"{module.path}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_are_short(modules: dict[str, Any]) -> None:
    """A file has at most 500 lines and a function 60, except those listed with a reason."""
    files = {module.name for module in modules.values() if module.lines > FILE_LINES}
    functions = {
        f"{module.name}.{function.name}"
        for module in modules.values()
        for function in _functions(module.tree)
        if _length(function) > FUNCTION_LINES
    }
    assert files == set(LONG_FILES), f"too long, or no longer: {files ^ set(LONG_FILES)}"
    assert functions == set(LONG_FUNCTIONS), f"{functions ^ set(LONG_FUNCTIONS)}"


def test_no_file_is_named_for_nothing(modules: dict[str, Any]) -> None:
    """No module is called utils, helpers, common or misc: a name says what is inside."""
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not vague & {part for name in modules for part in name.split(".")}
