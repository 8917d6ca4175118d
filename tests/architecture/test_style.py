"""Tests of style rules that no linter checks."""

import ast
from typing import Any

#: Maximum number of lines of a file, and of a function without signature and docstring.
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
#: Files and functions above these limits, each with the reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def get_dotted_name(node: ast.AST) -> str:
    """Return the source text of a name such as ``a.b.c``; an empty string for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{get_dotted_name(node.value)}.{node.attr}"
    return ""


def find_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions and methods of a module, including nested ones."""
    function_types = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, function_types)]


def count_body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function without signature and docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_every_module_has_a_docstring(modules: dict[str, Any]) -> None:
    """Each module starts with a docstring."""
    undocumented = [
        str(module.path) for module in modules.values() if not ast.get_docstring(module.tree)
    ]
    assert not undocumented, "\n".join(undocumented)


def test_one_module_writes_tensor_files(modules: dict[str, Any]) -> None:
    """Only ``bundle.tensor_files`` calls safetensors' writer, which ignores the umask."""
    writers = [
        module.name
        for module in modules.values()
        for name, _, _ in module.iterate_imports()
        if name in ("safetensors.torch.save_file", "safetensors.numpy.save_file")
    ]
    assert writers == ["bertsmith.bundle.tensor_files"]


def test_only_the_command_line_prints(modules: dict[str, Any]) -> None:
    """Only the command line uses ``print``, ``sys.stdout`` and ``sys.stderr``."""
    banned = {"print", "sys.stdout", "sys.stderr", "sys.stdout.write", "sys.stderr.write"}
    violations = [
        f"{module.path}:{node.lineno}"
        for module in modules.values()
        if module.subpackage != "cli"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name | ast.Attribute) and get_dotted_name(node) in banned
    ]
    assert not violations, "\n".join(violations)


def test_only_the_command_line_reads_the_environment(modules: dict[str, Any]) -> None:
    """Only the command line and the module for the rank of a process use ``os.environ``."""
    banned = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    violations = [
        f"{module.path}:{node.lineno}"
        for module in modules.values()
        if module.subpackage != "cli" and module.name != "bertsmith.runtime.process_rank"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and get_dotted_name(node) in banned
    ]
    assert not violations, "\n".join(violations)


def test_no_global_random_generators(modules: dict[str, Any]) -> None:
    """No module creates a random generator at import or uses the global one of ``random``."""
    violations = []
    for module in modules.values():
        nodes_in_functions = {
            id(node) for function in find_functions(module.tree) for node in ast.walk(function)
        }
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            name = get_dotted_name(node.func)
            is_random = any(part in name for part in ("random", "Generator", "manual_seed"))
            is_global = name.startswith("random.") and name != "random.Random"
            if (is_random and id(node) not in nodes_in_functions) or is_global:
                violations.append(f"{module.path}:{node.lineno}: {name}")
    assert not violations, "\n".join(violations)


def test_files_and_functions_are_short(modules: dict[str, Any]) -> None:
    """Files and functions are not longer than the limits, except those in the lists."""
    files = {module.name for module in modules.values() if module.num_lines > MAX_FILE_LINES}
    functions = {
        f"{module.name}.{function.name}"
        for module in modules.values()
        for function in find_functions(module.tree)
        if count_body_lines(function) > MAX_FUNCTION_LINES
    }
    message = "too long, or listed needlessly:"
    assert files == set(LONG_FILES), f"{message} {files ^ set(LONG_FILES)}"
    assert functions == set(LONG_FUNCTIONS), f"{message} {functions ^ set(LONG_FUNCTIONS)}"


def test_module_names_are_specific(modules: dict[str, Any]) -> None:
    """No module is called utils, helpers, common or misc."""
    vague_names = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not vague_names & {part for name in modules for part in name.split(".")}
