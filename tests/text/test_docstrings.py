"""Extracting English sentences from docstrings."""

import email
import inspect
from pathlib import Path

import pytest

from bertsmith.text.docstring_prose import extract_prose, is_english
from bertsmith.text.docstrings import find_modules, read_docstrings, read_documentation

NUMPY_DOCSTRING = """Return the sum of the array elements over a given axis.

    The result is a new array of the same shape as the input with the
    axis removed, see [1]_ and :func:`~numpy.mean` for the ``axis`` rule.

    .. note::
        This is a note that should be read as any other sentence.

    Parameters
    ----------
    a : array_like
        Elements to sum over the axis that was given.
    axis : int, optional
        Axis along which the sum is performed.

    Returns
    -------
    ndarray
        An array with the axis removed from it.

    Examples
    --------
    >>> np.sum([0.5, 1.5])
    2.0

    A table follows here::

        this.is(code)

    =====  =====
    name   what
    =====  =====
    a      b
    =====  =====

    References
    ----------
    .. [1] A. Author, "A title of the book that is cited", 1999.
    """

GOOGLE_DOCSTRING = """Make a tokenizer from a [`Config`] or a [link](http://x.y).

    Args:
        config (`Config`, *optional*): The configuration that is to be used.
            It goes on in the next line.
        names (list[str]): Names.

    Example:

    ```python
    This is not for the reader of the text.
    ```

    :param x: The value that is added to the other one.
    :type x: int
    :math:`x^2` is a formula that should not be in the text.
    """


def test_sentences_of_a_numpy_docstring_are_extracted() -> None:
    """Sentences are extracted, without names, types, doctests, code, tables and references."""
    assert extract_prose(NUMPY_DOCSTRING) == [
        ["Return the sum of the array elements over a given axis."],
        ["This is a note that should be read as any other sentence."],
        ["Elements to sum over the axis that was given."],
        ["Axis along which the sum is performed."],
        ["An array with the axis removed from it."],
    ]


def test_sentences_of_a_google_docstring_are_extracted() -> None:
    """Descriptions of arguments are extracted without names and types."""
    assert extract_prose(GOOGLE_DOCSTRING) == [
        ["Make a tokenizer from a Config or a link."],
        ["The configuration that is to be used.", "It goes on in the next line."],
        ["The value that is added to the other one."],
    ]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The value is returned to the caller.", True),
        ("Is this the end of the file?", True),
        ("the value is returned to the caller.", False),
        ("The value is returned to the caller", False),
        ("Set x = [1, 2] and y = {3} to a | b.", False),
        ("Foo bar baz qux quux.", False),
        ("See the_file in os.path.join() of a/b/c.", False),
        ("Yes it is.", False),
        ("The value (of x is returned to the caller.", False),
    ],
)
def test_english_is_distinguished_from_code(sentence: str, expected: bool) -> None:
    """English has a capital, an end mark, common words and few code symbols."""
    assert is_english(sentence) is expected


MODULE_SOURCE = '''"""The first module of the package has this sentence.

It has a second one that is as long as the first.
"""

raise SystemExit("this file must never be run")


class A:
    """This class is a thing that the module has.%s"""

    def f(self):
        """Return the thing that the class has in it."""


add_docstr(A, """
This is about a function in C that is added.
""".format(1))
'''


def write_package(folder: Path) -> Path:
    """Write a package with repeated, invalid, test and short modules; return ``folder``."""
    padding = " It is as long as it is so that the file is read." * 8
    (folder / "p" / "tests").mkdir(parents=True)
    (folder / "p" / "__init__.py").write_text(MODULE_SOURCE % padding)
    (folder / "p" / "again.py").write_text(MODULE_SOURCE % padding)
    (folder / "p" / "broken.py").write_text('def f(:\n"""' + "It is not a module. " * 50 + '"""')
    (folder / "p" / "tests" / "test_p.py").write_text(MODULE_SOURCE % padding)
    (folder / "p" / "one.py").write_text('"""One sentence is not a document.' + " " * 500 + '"""')
    return folder


def test_docstrings_are_read_in_source_order(tmp_path: Path) -> None:
    """Docstrings of module, class, function and ``add_docstr`` are read without an import."""
    docstrings = list(read_docstrings(write_package(tmp_path) / "p" / "__init__.py"))
    assert [text.strip().split(" ")[0] for text in docstrings] == ["The", "This", "Return", "This"]
    assert docstrings[3].strip().endswith("C that is added.")


def test_each_module_is_a_document_without_repeated_sentences(tmp_path: Path) -> None:
    """Tests, invalid files, copies of modules and single sentences give no document."""
    write_package(tmp_path)
    documents = list(read_documentation([tmp_path]))
    assert [document.module for document in documents] == ["p"]
    sentences = [sentence for paragraph in documents[0].paragraphs for sentence in paragraph]
    assert len(sentences) == len(set(sentences)) == 6
    assert sentences[1] == "It has a second one that is as long as the first."
    assert [name for name, _ in find_modules([tmp_path])] == ["p", "p.again", "p.broken", "p.one"]


def test_result_does_not_depend_on_the_number_of_processes() -> None:
    """One process and two give the same documents in the same order, for real packages."""
    folders = [Path(pytest.__file__).parent, Path(inspect.getfile(email)).parent]
    documents = list(read_documentation(folders, processes=1))
    assert documents == list(read_documentation(folders, processes=2))
    num_sentences = sum(
        len(paragraph) for document in documents for paragraph in document.paragraphs
    )
    assert num_sentences > 500
