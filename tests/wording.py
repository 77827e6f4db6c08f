"""Counts words that stand in the place of a noun in docstrings and comments, and names that occur twice.

`python tests/wording.py FOLDER ...` lists the places. The limits stand in `test_layers.py`.
"""

import ast
import functools
import re
import sys
from collections import defaultdict
from pathlib import Path

#: a reader has to guess the noun that each of these stands for
PRONOUN = re.compile(
    r"\b(?:what(?! if| is new)|whatever|whom?|whoever|whose|(?:of|by|in|for|to|from|with|on|at|than) which"
    r"|those|others|tell(?:s|ing)?|told|sa(?:y|ys|ying|id)|hears?|heard|own|nobody|somebody|nothing else"
    r"|so many|as many)\b",
    re.I,
)
WORD = re.compile(r"[A-Za-z']+")
#: a string, or a comment; `tokenize` takes two seconds for all files
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)''', re.S
)


@functools.cache
def parts(source):
    """Return the nodes of a file that have a name or a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def texts(source):
    """Yield (line, text) of every docstring and comment of a file."""
    for node in parts(source):
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, text
    for found in STRING_OR_COMMENT.finditer(source):
        if found[1]:
            yield source.count("\n", 0, found.start()) + 1, found[1]


def pronouns(sources):
    """Return the pronouns per 1,000 words of the texts of all files."""
    found = [text for source in sources for _, text in texts(source)]
    words = sum(len(WORD.findall(text)) for text in found)
    return 1000 * sum(len(PRONOUN.findall(text)) for text in found) / words


def twice(names):
    """Return the names, given with their places, that have several places."""
    places = defaultdict(set)
    for name, place in names:
        places[name].add(place)
    return {name: sorted(where) for name, where in places.items() if len(where) > 1}


def classes(source):
    """Return the names of the classes of a file, less leading underscores."""
    return [node.name.lstrip("_") for node in parts(source) if isinstance(node, ast.ClassDef)]


if __name__ == "__main__":
    for file in sorted(file for folder in sys.argv[1:] for file in Path(folder).rglob("*.py")):
        for line, text in texts(file.read_text()):
            for match in PRONOUN.finditer(text):
                print(f"{file}:{line}: {text[max(0, match.start() - 30) : match.end() + 30]!r}")
